"""``strop serve`` from the command line: what it says when it cannot, and how it stops."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

from strop.cli import app
from strop.cli import serve as command
from tests.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
TOKEN = "0123456789abcdef"


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is loaded before the arguments are checked."""

    def refused(*args: Any) -> Any:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(command, "load_studio", refused)


def _said(*words: str, env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(app, ["serve", *words], env=env)
    assert result.exit_code == 1, result.output
    return " ".join(result.output.split())


def test_a_port_that_is_in_use(never: None) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert f"port {port} is in use; stop the program" in _said("--port", port)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("no-such-model",), "there is no diffusers model in no-such-model; give 'sprites'"),
        (("--host", "0.0.0.0"), "give --token-file FILE, or --without-token"),
        (("--host", "no.such.host.invalid", "--without-token"), "give --host 127.0.0.1"),
        (("--host", "203.0.113.7", "--without-token"), "this machine has no address 203.0.113.7"),
        (("--token-file", "none.txt"), "openssl rand -hex 32 > none.txt"),
        (("--lora", "nowhere"), "there is no folder nowhere"),
        (("sprites-dit", "--lora", "."), "leave out --lora"),
    ],
    ids=str,
)
def test_what_is_wrong_is_answered_by_what_to_do(
    words: tuple[str, ...],
    part: str,
    never: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert part in _said("--port", "0", *words)


@pytest.mark.parametrize(
    ("text", "part"), [("", "is empty"), ("short", "at least 16"), ("é" * 20, "at least 16")]
)
def test_tokens_that_are_none(text: str, part: str, never: None, tmp_path: Path) -> None:
    file = tmp_path / "token.txt"
    file.write_text(text)
    assert part in _said("--token-file", str(file), "--port", "0")
    if text:
        assert "STROP_SERVE_TOKEN" in _said("--port", "0", env={"STROP_SERVE_TOKEN": text})


def test_a_token_that_others_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token.txt"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o644)
    assert command.secret_of(file, "") == TOKEN
    assert "chmod 600" in capsys.readouterr().err
    file.chmod(0o600)
    assert command.secret_of(file, "") == TOKEN
    assert not capsys.readouterr().err


def test_the_token_in_the_environment_is_no_unknown_option(monkeypatch: pytest.MonkeyPatch) -> None:
    from strop.options import Options

    monkeypatch.setenv("STROP_SERVE_TOKEN", TOKEN)
    Options.from_environment()


def test_loras_have_the_names_of_their_files(tmp_path: Path) -> None:
    import torch

    from strop.cli.mistakes import CommandError

    with pytest.raises(CommandError, match=r"no \.safetensors file"):
        command.lora_files(tmp_path)
    (tmp_path / "old.bin").touch()
    for name in ("ink", "pencil-2"):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    assert list(command.lora_files(tmp_path)) == ["ink", "pencil-2"]
    save_file({"x": torch.zeros(1)}, tmp_path / "a b.safetensors")
    with pytest.raises(CommandError, match="rename the file"):
        command.lora_files(tmp_path)


def test_without_its_packages_it_says_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name)
    )
    assert "needs uvicorn: pip install 'strop[serve]'" in _said("--port", "0")


def test_help_needs_none_of_them() -> None:
    """Nor does it import them, or torch."""
    code = (
        "import sys; from typer.testing import CliRunner; from strop.cli import app;"
        "print(CliRunner().invoke(app, ['serve', '--help']).exit_code);"
        "print({'fastapi', 'uvicorn', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "set()"]


SERVER = """
import sys
sys.path.insert(0, {root!r})
from strop.serve import running
from strop.serve.app import build_app
from strop.serve.logs import log_as_json
from strop.serve.service import Service
from tests.serve.asking import LIMITS
from tests.serve.painters import FakePainter
painter = FakePainter()
painter.gate.clear()
wait = painter.gate.wait
painter.gate.wait = lambda seconds: wait(0.05)  # a step takes as long as nobody cancels
draw = painter.draw
painter.draw = lambda *given: (print("drawing", flush=True), draw(*given))[1]
log_as_json()
listening = running.bound("127.0.0.1", 0)
print(running.address_of(listening), flush=True)
service = Service(painter, LIMITS)
import threading
threading.Thread(target=lambda: (sys.stdin.readline(), painter.gate.set()), daemon=True).start()
running.run(build_app(service), service, listening)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, whose first picture takes until it reads a line."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER.format(root=str(ROOT))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def _ask(address: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def _state(address: str) -> int:
    """The status of ``/healthz``, and 0 where nobody listens yet."""
    try:
        return _ask(f"{address}/healthz")[0]
    except urllib.error.URLError:
        return 0


def test_a_signal_finishes_what_is_accepted(server: tuple[subprocess.Popen[str], str]) -> None:
    process, address = server
    generate = f"{address}/v1/images/generations"
    wait_until(lambda: _state(address) == 200)
    found: list[tuple[int, Any]] = []
    accepted = threading.Thread(target=lambda: found.append(_ask(generate, {"prompt": "a cat"})))
    accepted.start()
    assert process.stdout is not None
    assert process.stdout.readline() == "drawing\n"
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: _state(address) == 503)
    assert _ask(generate, {"prompt": "a cat"})[0] == 503
    assert process.poll() is None
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    accepted.join(LIMIT_S)
    assert [status for status, _ in found] == [200]
    assert process.wait(LIMIT_S) == 0
    assert process.stderr is not None
    lines = [json.loads(line) for line in process.stderr.read().splitlines()]
    assert any(line["message"] == "stopping" for line in lines)
    assert {line["status"] for line in lines if line["message"] == "answered"} == {200, 503}


def test_a_second_signal_ends_it_at_once(server: tuple[subprocess.Popen[str], str]) -> None:
    process, address = server
    wait_until(lambda: _state(address) == 200)
    assert _ask(f"{address}/api/pictures", {"prompt": "a cat"})[0] == 202
    process.send_signal(signal.SIGINT)
    wait_until(lambda: _state(address) == 503)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.wait(LIMIT_S)


def test_help_teaches() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "100"}).output
    for part in ("/v1/images/generations", "/sdapi/v1/txt2img", "--token-file", "strop serve   #"):
        assert part in text
    assert re.search(r"one|first SIGINT", text)

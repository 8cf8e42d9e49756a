"""Start ComfyUI from a checkout, and ask it for pictures over HTTP, with its WebSocket beside."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.comfyui.conftest import PACK

ROOT = Path(__file__).parents[2]
SECONDS_TO_START, SECONDS_TO_DRAW = 180, 300


class ComfyServer:
    """A server that runs. ``folder`` holds its models and outputs."""

    def __init__(self, folder: Path, port: int, log: Path) -> None:
        self.folder, self.port, self.log = folder, port, log

    @property
    def said(self) -> str:
        return self.log.read_text()

    def ask(self, path: str, given: Any = None) -> Any:
        """Return what the server answers, decoded."""
        body = None if given is None else json.dumps(given).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from error

    def run(self, graph: Mapping[str, Any]) -> Any:
        """Run a workflow and return what its nodes have shown, by their names. Raises
        AssertionError with what the server said if a node failed."""
        client = uuid.uuid4().hex
        with Messages(self.port, client) as messages:
            number = self.ask("/prompt", {"prompt": graph, "client_id": client})["prompt_id"]
            for message in messages:
                data = message.get("data", {})
                if data.get("prompt_id") != number:
                    continue
                error = [data.get(name) for name in ("node_type", "exception_message")]
                assert message["type"] != "execution_error", (
                    *error,
                    *data.get("traceback", ())[-3:],
                )
                if message["type"] == "execution_interrupted":
                    return None
                if message["type"] == "execution_success":
                    break
        while not (history := self.ask(f"/history/{number}")):  # which is written a little later
            time.sleep(0.05)
        return history[number]["outputs"]

    def saved(self, shown: Mapping[str, Any], kind: str) -> list[Path]:
        """Return the files of a kind, "images" or "latents", that a workflow has saved."""
        files = [file for node in shown.values() for file in node.get(kind, ())]
        return [self.folder / "output" / file["subfolder"] / file["filename"] for file in files]


class Messages:
    """The messages that the server sends about a prompt: a WebSocket of which only the text is
    read."""

    def __init__(self, port: int, client: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), SECONDS_TO_DRAW)
        key = base64.b64encode(uuid.uuid4().bytes).decode()
        self._socket.sendall(
            f"GET /ws?clientId={client} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._read = self._socket.makefile("rb")
        assert b" 101 " in self._read.readline()
        while self._read.readline() != b"\r\n":
            pass

    def __enter__(self) -> Messages:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            kind, text = self._frame()
            if kind == 1:
                yield json.loads(text)
            assert kind != 8, "the server has closed the connection"

    def _frame(self) -> tuple[int, bytes]:
        first, length = self._read.read(2)
        if length >= 126:
            size = 2 if length == 126 else 8
            (length,) = struct.unpack(">H" if size == 2 else ">Q", self._read.read(size))
        return first & 15, self._read.read(length)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def started(
    checkout: Path, python: str, folder: Path, cache: Path, *flags: str, **environment: str
) -> Iterator[ComfyServer]:
    """Start a server whose custom nodes are the pack alone. Nothing is written into the checkout.
    Raises AssertionError with what it said if it does not start."""
    for name in ("custom_nodes", "front", "input", "output", "temp", "user"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    shutil.copytree(PACK, folder / "custom_nodes" / "strop", dirs_exist_ok=True)
    (folder / "front" / "index.html").write_text("<html></html>")
    port, log = free_port(), folder / "log.txt"
    words = [python, "main.py", "--cpu", "--listen", "127.0.0.1", "--port", str(port)]
    words += ["--base-directory", str(folder), "--front-end-root", str(folder / "front")]
    words += ["--database-url", f"sqlite:///{folder}/user/comfyui.db"]
    words += ["--disable-api-nodes", "--disable-auto-launch", *flags]
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    environment |= {"PYTHONPATH": path, "STROP_CACHE_DIR": str(cache)}
    with log.open("w") as said:
        process = subprocess.Popen(
            words, cwd=checkout, env={**os.environ, **environment}, stdout=said, stderr=said
        )
    server = ComfyServer(folder, port, log)
    try:
        _wait(server, process)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def _wait(server: ComfyServer, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < until:
        assert process.poll() is None, server.said[-4000:]
        with contextlib.suppress(OSError):
            server.ask("/system_stats")
            return
        time.sleep(0.5)
    raise AssertionError(f"no answer within {SECONDS_TO_START} s: {server.said[-4000:]}")

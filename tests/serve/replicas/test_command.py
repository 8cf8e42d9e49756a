"""``strop serve --ray`` from the command line, as far as it needs no Ray."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from strop.cli import app, serve_replicas
from strop.cli.mistakes import CommandError
from strop.cli.serve_options import ServeSettings
from strop.serve.replicas.plan import PlanError, ReplicaWish
from tests.control_files import write_controlnet

TOKEN = "0123456789abcdef"


def _run(*words: str, env: dict[str, str] | None = None, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["serve", *words], env=env)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def _written(folder: Path, *words: str, env: dict[str, str] | None = None) -> tuple[str, Any]:
    file = folder / "serve.yaml"
    assert f"serve run {file}" in _run("--ray", "--deployment-file", str(file), *words, env=env)
    text = file.read_text()
    return text, yaml.safe_load(text)


def test_a_file_says_what_the_flags_say(tmp_path: Path) -> None:
    words = "--device cuda --replicas 2 --max-replicas 6 --replicas-per-gpu 2 --replica-cpus 3"
    more = "--scale-up-s 5 --scale-down-s 60 --max-batch 4 --max-steps 50 --port 9000"
    text, content = _written(tmp_path, *words.split(), *more.split())
    assert "#     serve deploy serve.yaml" in text
    (application,) = content["applications"]
    assert content["http_options"] == {"host": "127.0.0.1", "port": 9000}
    settings, counts, front = serve_replicas._read_args(application["args"])
    assert settings == ServeSettings("sprites", max_batch=4, max_steps=50, device="cuda")
    assert counts == ReplicaWish(2, 6, 2, 3, 5, 60)
    assert front == serve_replicas.FrontSettings()
    plan = counts.plan(settings.device, None)
    scaling = plan.options()["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 6)
    assert (scaling["upscale_delay_s"], scaling["downscale_delay_s"]) == (5, 60)
    assert plan.options()["ray_actor_options"] == {"num_cpus": 3, "num_gpus": 0.5}


def test_a_file_names_what_builds_the_application(tmp_path: Path) -> None:
    _, content = _written(tmp_path, "--device", "cuda", "--replicas", "1")
    module, _, name = content["applications"][0]["import_path"].partition(":")
    assert getattr(importlib.import_module(module), name) is serve_replicas.build


def test_a_file_has_whole_paths(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").symlink_to(tiny_model)
    (tmp_path / "loras").mkdir()
    monkeypatch.chdir(tmp_path)
    write_controlnet(tmp_path / "depth", tiny_model)
    words = ("model", "--lora", "loras", "--device", "cuda", "--replicas", "1")
    words += ("--controlnet", "deep=depth")
    _, content = _written(tmp_path, *words)
    settings = content["applications"][0]["args"]["model"]
    assert settings["model"] == str(tiny_model.resolve())
    assert settings["lora"] == str((tmp_path / "loras").resolve())
    assert settings["controlnets"] == [f"deep={tmp_path.resolve()}/depth"]


def test_a_file_has_no_secret(tmp_path: Path) -> None:
    where = ("--device", "cuda", "--replicas", "1", "--host", "0.0.0.0")
    text, content = _written(tmp_path, *where, env={"STROP_SERVE_TOKEN": TOKEN})
    assert TOKEN not in text
    front = content["applications"][0]["args"]["front"]
    assert front == {"token_file": "", "is_local": False, "needs_token": True}
    secret = tmp_path / "token.txt"
    secret.write_text(TOKEN)
    secret.chmod(0o600)
    text, content = _written(tmp_path, *where, "--token-file", str(secret))
    assert TOKEN not in text
    assert content["applications"][0]["args"]["front"]["token_file"] == str(secret)


def test_the_front_of_a_file_reads_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STROP_SERVE_TOKEN", raising=False)
    needs = serve_replicas.FrontSettings(is_local=False, needs_token=True)
    with pytest.raises(CommandError, match="set STROP_SERVE_TOKEN where it runs"):
        serve_replicas.rules_of(needs)
    monkeypatch.setenv("STROP_SERVE_TOKEN", TOKEN)
    rules = serve_replicas.rules_of(needs)
    assert (rules.token, rules.hosts) == (TOKEN, ())
    monkeypatch.delenv("STROP_SERVE_TOKEN")
    local = serve_replicas.rules_of(serve_replicas.FrontSettings())
    assert (local.token, "localhost" in local.hosts) == ("", True)
    with pytest.raises(CommandError, match="there is no file"):
        serve_replicas.rules_of(serve_replicas.FrontSettings(str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--replicas", "2"), "give --ray, too"),
        (("--max-replicas", "2"), "give --ray, too"),
        (("--ray-address", "auto"), "give --ray, too"),
        (("--deployment-file", "x.yaml"), "give --ray, too"),
        (("--ray", "--deployment-file", "x.yaml"), "give --device cuda or --device cpu"),
        (("--ray", "--deployment-file", "x.yaml", "--device", "cuda"), "give --replicas"),
        (
            ("--ray", "--deployment-file", "x.yaml", "--device", "cpu", "--replicas", "2"),
            "give --replica-cpus",
        ),
        (
            ("none", "--ray", "--deployment-file", "x.yaml", "--device", "cuda"),
            "there is no diffusers model in none",
        ),
        (("--ray", "--deployment-file", "no/x.yaml", "--device", "cuda"), "there is no folder no"),
        (
            ("--ray", "--deployment-file", "x.yaml", "--host", "0.0.0.0"),
            "give --token-file FILE, or --without-token",
        ),
    ],
    ids=" ".join,
)
def test_what_is_wrong_is_answered_by_what_to_do(
    words: tuple[str, ...], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert part in _run(*words, code=1)
    assert not [*tmp_path.iterdir()]


def test_without_ray_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "ray" else find(name, *more),
    )
    assert "--ray needs ray: pip install 'strop[ray]'" in _run("--ray", "--port", "0", code=1)


ARGS = serve_replicas.deployment(
    ServeSettings("sprites", device="cpu"),
    ReplicaWish(2, replica_cpus=1),
    serve_replicas.FrontSettings(),
    ("127.0.0.1", 8000),
)["applications"][0]["args"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"models": {}}, "give model, replicas and front"),
        ({"model": {"model": "sprites", "steps": 3}}, "model has no steps"),
        ({"replicas": {"replicas": "two"}}, "args: replicas: .*valid integer"),
        ({"model": {}}, "args: model: .*required"),
    ],
)
def test_args_that_are_wrong(change: dict[str, Any], part: str) -> None:
    with pytest.raises(CommandError, match=f"(?s){part}"):
        serve_replicas._read_args(ARGS | change)


def test_args_that_count_too_little() -> None:
    _, counts, _ = serve_replicas._read_args(
        ARGS | {"replicas": {"max_replicas": 1, "replicas": 2}}
    )
    with pytest.raises(PlanError, match="--max-replicas 1 is less"):
        counts.plan("cuda", None)


def test_a_ray_that_is_joined_says_what_there_is() -> None:
    machines = serve_replicas.Machines
    assert serve_replicas._device_on(machines(2, 8), "auto", "10.0.0.1:6379") == "cuda"
    assert serve_replicas._device_on(machines(0, 8), "auto", "10.0.0.1:6379") == "cpu"
    assert serve_replicas._device_on(machines(2, 8), "cpu", "10.0.0.1:6379") == "cpu"
    assert serve_replicas._device_on(machines(0, 8), "cpu", "") == "cpu"


def test_help_tells_of_replicas() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "100"}).output
    for part in ("--ray", "--replicas", "--max-replicas", "--deployment-file", "--replica-cpus"):
        assert part in text
    assert "strop[ray]" in text

"""What is missing on a machine is named, with how to get it."""

from __future__ import annotations

import email
import importlib.metadata
import json
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.cli import doctor

from .conftest import Invoke, said

ROOT = Path(__file__).parents[2]
USAGE = shutil.disk_usage("/")


def findings(invoke: Invoke) -> tuple[int, dict[str, dict[str, str]]]:
    result = invoke("doctor", "--json")
    return result.exit_code, {each["name"]: each for each in json.loads(result.output)}


def states(found: dict[str, dict[str, str]]) -> dict[str, str]:
    return {name: each["state"] for name, each in found.items()}


def test_a_machine_with_all_that_tests_need(invoke: Invoke) -> None:
    code, found = findings(invoke)
    assert code == 0
    assert {states(found)[name] for name in ("torch", "cpu", "diffusion", "train")} == {"ok"}
    assert not any(each["remedy"] for each in found.values() if each["state"] == "ok")
    text = said(invoke("doctor"))
    assert "ok cpu: compiles and runs a small model, with eager's result" in text


def test_without_a_compiler(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = invoke("doctor")
    assert result.exit_code == 1
    text = said(result)
    assert "fault cpu: a small model cannot be compiled: g++ was not found" in text
    assert "-> install g++ 11 or newer (Debian, Ubuntu: apt-get install g++;" in text


def test_a_result_that_differs_is_a_fault(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "allclose", lambda *given, **named: False)
    code, found = findings(invoke)
    assert code == 1
    assert found["cpu"]["text"] == "a small model gives another result than eager"
    assert "report it" in found["cpu"]["remedy"]


def test_packages_of_other_versions(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"torch": "2.7.1+cu126", "diffusers": "0.35.0"}
    version = importlib.metadata.version

    def found_version(package: str) -> str:
        if package == "peft":
            raise importlib.metadata.PackageNotFoundError
        return others.get(package) or version(package)

    monkeypatch.setattr(doctor.importlib.metadata, "version", found_version)
    code, found = findings(invoke)
    assert code == 1
    assert found["torch"]["state"] == "fault"
    assert found["torch"]["remedy"] == 'pip install "torch<2.14,>=2.11"'
    assert found["diffusion"]["state"] == "advice"
    assert "peft" in found["diffusion"]["text"]
    assert "diffusers<0.43,>=0.42 (0.35.0 is there)" in found["diffusion"]["text"]
    assert found["diffusion"]["remedy"] == "pip install 'strop[diffusion]'"


def test_every_extra_that_a_command_needs_is_looked_at(invoke: Invoke) -> None:
    """So whoever adds one says what lacks it. Extras that only measure or develop are no lack."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    given = set(project["optional-dependencies"])
    assert given - {"dev", "peers"} == set(doctor.EXTRAS)
    assert set(doctor.EXTRAS) <= set(findings(invoke)[1])


def test_a_server_without_its_packages(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def found_version(package: str) -> str:
        if package == "uvicorn":
            raise importlib.metadata.PackageNotFoundError
        return version(package)

    monkeypatch.setattr(doctor.importlib.metadata, "version", found_version)
    code, found = findings(invoke)
    assert code == 0
    assert found["serve"]["text"] == "strop serve: without uvicorn"
    assert found["serve"]["remedy"] == "pip install 'strop[serve]'"


def test_an_install_that_is_older_than_the_code(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = email.message_from_string("Provides-Extra: diffusion\n")
    monkeypatch.setattr(doctor.importlib.metadata, "metadata", lambda name: older)
    _, found = findings(invoke)
    assert found["diffusion"]["state"] == "ok"
    assert found["serve"]["state"] == "advice"
    assert "pip install -e ." in found["serve"]["remedy"]


@pytest.mark.parametrize("is_full", [False, True])
def test_a_cache_without_room(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    if is_full:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: USAGE._replace(free=1 << 20))
    else:
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    code, found = findings(invoke)
    assert code == 0
    assert found["cache"]["state"] == "advice"
    assert ("1 MiB of room" if is_full else "cannot be written") in found["cache"]["text"]
    assert "set STROP_CACHE_DIR" in found["cache"]["remedy"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("cuda", "says"), [(None, "a build for CPUs"), ("13.0", "finds no GPU")])
def test_a_driver_whose_gpu_torch_does_not_see(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, cuda: Any, says: str
) -> None:
    which = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name, *given: name if name == "nvidia-smi" else which(name, *given)
    )
    monkeypatch.setattr(torch.version, "cuda", cuda)
    code, found = findings(invoke)
    assert code == 0
    assert found["gpu"]["state"] == "advice"
    assert says in found["gpu"]["text"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu(invoke: Invoke) -> None:
    code, found = findings(invoke)
    assert code == 0
    assert [state for name, state in states(found).items() if name.startswith("cuda:0")] == ["ok"]

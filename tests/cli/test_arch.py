"""--arch: an older architecture for everything that a command starts."""

from __future__ import annotations

import pytest
import torch
import typer

from strop.cli.arguments import DeviceName, chosen_device, parse_arch
from strop.options import Options
from strop.runtime.build import devices
from tests.gpus import A100, H100


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command sets there ends with the test."""
    monkeypatch.setenv("STROP_ARCH", "0")


@pytest.fixture
def on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(devices, "gpu", lambda index: H100)


@pytest.mark.parametrize("arch", [80, 86, 89])
def test_options_made_from_now_on_have_it(on_h100: None, arch: int) -> None:
    assert parse_arch(str(arch)) == arch
    assert Options.from_environment().arch == arch
    assert chosen_device(DeviceName.auto) == chosen_device(DeviceName.cuda) == "cuda"


def test_without_it_the_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_ARCH", "89")
    assert parse_arch(0) == 0
    assert Options.from_environment().arch == 89


@pytest.mark.parametrize("arch", ["100", "120"])
def test_a_gpu_that_cannot_stand_in_is_told_at_once(on_h100: None, arch: str) -> None:
    parse_arch(arch)
    with pytest.raises(typer.BadParameter, match="it can stand in for arch=80, 86, 87, 89"):
        chosen_device(DeviceName.auto)


def test_an_a100_stands_in_for_nobody(on_h100: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu", lambda index: A100)
    parse_arch("86")
    with pytest.raises(typer.BadParameter, match=r"A100.*cannot run kernels for sm_86"):
        chosen_device(DeviceName.cuda)


def test_it_has_no_effect_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    parse_arch("86")
    assert chosen_device(DeviceName.cpu) == "cpu"
    assert "arch=86 has no effect on a CPU" in capsys.readouterr().err

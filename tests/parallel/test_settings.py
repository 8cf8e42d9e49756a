"""Which devices calls are spread over, and what is refused."""

from __future__ import annotations

import pytest
import torch

import strop
from strop.dispatch.parallel.settings import Parallel, parallel_of
from strop.errors import OptionError
from tests.e2e import tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def see(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")


def names(found: Parallel) -> list[str]:
    return [*map(str, found.devices)]


def test_guidance_takes_the_next_gpu_and_a_batch_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 3)
    assert names(parallel_of("cfg", None, GPU)) == ["cuda:1", "cuda:2"]
    assert names(parallel_of("batch", None, GPU)) == ["cuda:1", "cuda:2", "cuda:0"]
    assert names(parallel_of("cfg", ["cuda:1", "cuda:0"], GPU)) == ["cuda:1", "cuda:0"]
    assert names(parallel_of("batch", ["cpu"] * 3, CPU)) == ["cpu"] * 3


@pytest.mark.parametrize(
    ("mode", "devices", "home", "said"),
    [
        ("cfg", None, GPU, r"needs two GPUs, and this process sees 1 GPU \(card 0\)"),
        ("batch", None, CPU, r"lies on cpu: move it first .* sees 1 GPU"),
        ("both", None, GPU, "expected 'cfg' or 'batch'"),
        ("cfg", ["cpu"], CPU, "takes two devices"),
        ("cfg", ["cpu"] * 3, CPU, "takes two devices"),
        ("batch", ["cuda:0", "cuda:0"], GPU, "expected different ones"),
        ("batch", ["cuda:0", "cpu"], GPU, "of one type"),
        ("cfg", ["cuda:0", "cuda:1"], GPU, "there is no 'cuda:1'"),
        ("cfg", "cuda:0", GPU, "expected a list"),
        ("cfg", ["cpu", "gpu"], CPU, "is no device"),
        ("cfg", ["cpu", "meta"], CPU, "neither a CPU nor an NVIDIA GPU"),
        ("cfg", ["cpu", "cpu"], GPU, "lies on cuda:1"),
    ],
)
def test_what_is_not_there_is_named(
    mode: str,
    devices: list[str] | None,
    home: torch.device,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    see(monkeypatch, 1)
    with pytest.raises(OptionError, match=said):
        parallel_of(mode, devices, home)


def test_rows_are_cut_evenly_and_in_order() -> None:
    two, three = Parallel("batch", (CPU,) * 2), Parallel("batch", (CPU,) * 3)
    assert [two.sizes(n) for n in (2, 3, 8)] == [(1, 1), (2, 1), (4, 4)]
    assert [three.sizes(n) for n in (2, 4, 5, 9)] == [(1, 1), (2, 1, 1), (2, 2, 1), (3, 3, 3)]
    halves = Parallel("cfg", (CPU,) * 2)
    assert "not two halves" in halves.refusal(3)
    assert "one row" in halves.refusal(1)
    assert not halves.refusal(4)
    assert not two.refusal(3)


def test_what_cannot_be_together_is_refused() -> None:
    pair = {"parallel": "cfg", "devices": ["cpu", "cpu"]}
    for more, said in (
        ({"train": True}, "strop train"),
        ({"options": tiny.options(weights_budget_bytes=1)}, "weights_budget_bytes"),
    ):
        with pytest.raises(OptionError, match=said):
            strop.optimize(tiny.unet(), **pair, **more)
    with pytest.raises(OptionError, match="devices is for"):
        strop.optimize(tiny.unet(), devices=["cpu", "cpu"])
    with pytest.raises(OptionError, match="nothing says which arguments of a Linear"):
        strop.optimize(torch.nn.Linear(2, 2), **pair)
    module = tiny.unet()
    with pytest.raises(OptionError, match="needs two GPUs, and the model lies on cpu"):
        strop.optimize(module, parallel="cfg")
    assert "forward" not in vars(module)

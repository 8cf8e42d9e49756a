"""Pipelines whose models are offloaded by parts are compiled, and one model at a time has memory of
the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

import strop
from strop.dispatch import model_offload
from strop.errors import OptionError
from tests.budgeted import CountedMemory, lend_memory
from tests.diffusion.test_lora_roads import ROADS, assert_close, draw, pipes
from tests.diffusion.test_model_offload import picture
from tests.e2e import tiny

CPU = torch.device("cpu")
PARTS = ("unet", "vae")


def by_block(pipe: Any) -> None:
    pipe.enable_group_offload(CPU, offload_type="block_level", num_blocks_per_group=1)


def by_leaf(pipe: Any) -> None:
    pipe.enable_group_offload(CPU, offload_type="leaf_level")


def sequential(pipe: Any) -> None:
    """Do as ``enable_sequential_cpu_offload`` does, which takes weights to "cpu:0": for that
    accelerate puts tensors in the places of Parameters, and fails."""
    for name in PARTS:
        cpu_offload(getattr(pipe, name), CPU)


def unet_alone(pipe: Any) -> None:
    pipe.unet.enable_group_offload(CPU, offload_type="leaf_level")


WAYS: dict[str, Callable[[Any], None]] = {
    "by block": by_block,
    "by leaf": by_leaf,
    "sequential": sequential,
    "of one model": unet_alone,
}


@pytest.mark.parametrize("order", ["optimize first", "offload first"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["host", "device"])
def test_pictures(way: str, order: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = lend_memory(monkeypatch) if place == "device" else CountedMemory()
    expected, pipe = picture(tiny.pipeline()), tiny.pipeline()
    if order == "offload first":
        WAYS[way](pipe)
    strop.optimize(pipe, options=tiny.options(strict=True))
    if order == "optimize first":
        torch.testing.assert_close(picture(pipe), expected, rtol=0, atol=1e-4)  # fp32 sums
        WAYS[way](pipe)
    for _ in range(3):
        torch.testing.assert_close(picture(pipe), expected, rtol=0, atol=1e-4)
    served = strop.api.dispatchers_of(pipe)
    assert {d.counters.eager_calls for d in served.values()} == {0}
    assert "does nothing meanwhile" in str(strop.explain(pipe))
    if place == "device":
        budgets = [d.budget for d in served.values() if d.budget is not None and d.counters.calls]
        assert 0 < memory.most <= max(budget._most_bytes for budget in budgets)
    strop.restore(pipe)
    assert memory.now == 0
    assert not strop.api.dispatchers_of(pipe)
    torch.testing.assert_close(picture(pipe), expected, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["by block", "by leaf", "sequential"])
def test_loras_of_an_offloaded_pipeline(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = lend_memory(monkeypatch)
    eager, fast = pipes(tmp_path)
    WAYS[way](fast)
    fast.enable_sequential_cpu_offload = lambda: sequential(fast)  # loaders do so at the end
    assert_close(draw(fast), draw(eager))
    for name, road in ROADS.items():
        given = [road(pipe) or {} for pipe in (eager, fast)]
        assert_close(draw(fast, **given[1]), draw(eager, **given[0]), name)
    served = strop.api.dispatchers_of(fast)
    assert {d.counters.eager_calls for d in served.values()} == {0}
    assert "are streamed there in each call" in str(strop.explain(fast))
    strop.restore(fast)
    if way != "sequential":  # loaders take a copy to "cpu", which is none here
        assert memory.now == 0
    assert_close(draw(fast), draw(eager))


@pytest.mark.parametrize("order", ["optimize first", "offload first"])
def test_model_offload_beside_a_budget_is_refused(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lend_memory(monkeypatch)
    monkeypatch.setattr(model_offload, "DEVICES", ("cpu",))
    expected, pipe = picture(tiny.pipeline()), tiny.pipeline()
    options = tiny.options(weights_budget_bytes=600_000)
    if order == "offload first":
        pipe.enable_model_cpu_offload(device="cpu")
        with pytest.raises(OptionError, match="enable_model_cpu_offload takes all of the model"):
            strop.optimize(pipe, options=options)
        return
    strop.optimize(pipe, options=options)
    torch.testing.assert_close(picture(pipe), expected, rtol=0, atol=1e-4)
    pipe.enable_model_cpu_offload(device="cpu")
    with pytest.raises(OptionError, match="enable_model_cpu_offload takes all of the model"):
        picture(pipe)
    pipe.remove_all_hooks()
    torch.testing.assert_close(picture(pipe), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", ["by leaf", "sequential"])
def test_a_pipeline_that_is_optimised_again_stays_as_it_is(way: str) -> None:
    expected, pipe = picture(tiny.pipeline()), tiny.pipeline()
    strop.optimize(pipe, options=tiny.options(strict=True))
    WAYS[way](pipe)
    picture(pipe)
    before = strop.api.dispatchers_of(pipe)
    strop.optimize(pipe, options=tiny.options(strict=True))
    assert strop.api.dispatchers_of(pipe) == before
    torch.testing.assert_close(picture(pipe), expected, rtol=0, atol=1e-4)

"""Noise of the host's generators: the same numbers, and a GPU is not waited for."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.pipelines.stable_diffusion import pipeline_stable_diffusion_img2img
from diffusers.utils import torch_utils

from strop.diffusion import noise
from strop.diffusion.changes import Changes
from strop.diffusion.noise import NAME, Unwaited, draw_without_waiting, is_drawn_on_host

KEPT = Changes()
SHAPE = (2, 4, 8, 8)
CUDA = torch.device("cuda", 0)


@pytest.fixture
def own() -> FunctionType:
    """diffusers' function as published: pipelines of earlier tests may be optimised still."""
    there = torch_utils.randn_tensor
    published: Any = there.own if isinstance(there, Unwaited) else there
    assert isinstance(published, FunctionType)
    return published


@pytest.fixture
def changes(own: FunctionType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Changes]:
    """Of a process in which no pipeline is optimised."""
    for place in (torch_utils, pipeline_stable_diffusion_img2img):
        monkeypatch.setattr(place, NAME, own)
    made = Changes()
    yield made
    made.undo()


@pytest.fixture
def quick(own: FunctionType, monkeypatch: pytest.MonkeyPatch) -> Unwaited:
    """Ours, which everybody is given."""
    monkeypatch.setattr(noise, "is_called_by_optimised", lambda: True)
    ours = Unwaited(own)
    KEPT.put([SimpleNamespace()], NAME, ours)
    return ours


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(number) for number in range(count)]


def test_who_draws_on_the_host() -> None:
    one, two = generators(1)[0], generators(2)
    assert all(is_drawn_on_host(some, CUDA) for some in (one, [one], two))
    assert is_drawn_on_host(one, "cuda")
    assert not is_drawn_on_host(None, CUDA)  # the GPU's own
    assert not is_drawn_on_host([], CUDA)
    assert not is_drawn_on_host([one, None], CUDA)
    assert not any(is_drawn_on_host(one, where) for where in (None, "cpu", torch.device("mps")))


@pytest.mark.parametrize("count", [None, 1, 2])
def test_the_same_numbers(count: int | None, own: FunctionType, quick: Unwaited) -> None:
    def drawn(draw: Any) -> torch.Tensor:
        given = generators(count) if count else None
        torch.manual_seed(3)
        found: torch.Tensor = draw(SHAPE, generator=given, dtype=torch.half)
        return found

    assert torch.equal(drawn(quick), drawn(own))


def test_it_is_wherever_diffusers_has_imported_it(own: FunctionType, changes: Changes) -> None:
    assert draw_without_waiting(changes)
    ours: Any = torch_utils.randn_tensor
    assert isinstance(ours, Unwaited)
    assert ours.own is own
    assert pipeline_stable_diffusion_img2img.randn_tensor is ours
    changes.undo()
    assert torch_utils.randn_tensor is pipeline_stable_diffusion_img2img.randn_tensor is own


def test_another_function_stays(
    own: FunctionType, changes: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newer(shape: Any, **given: Any) -> Any:
        return own(shape, **given).clone()

    monkeypatch.setattr(torch_utils, NAME, newer)
    assert not draw_without_waiting(changes)
    assert torch_utils.randn_tensor is newer


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("count", [1, 2])
def test_a_gpu_is_not_waited_for(count: int, own: FunctionType, quick: Unwaited) -> None:
    ours, wanted = quick, own(SHAPE, generator=generators(count), device=CUDA)
    ours(SHAPE, generator=generators(count), device=CUDA)  # pinned memory is there from now on
    torch.cuda.synchronize()
    work = torch.ones(4096, 4096, device=CUDA)
    for _ in range(20):
        work = work @ work * 0
    done = torch.cuda.Event()
    done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [ours(SHAPE, generator=generators(count), device=CUDA) for _ in range(4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not done.query(), "it was waited for"
    assert all(torch.equal(each, wanted) for each in found)
    assert all(each.device == CUDA for each in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_pinned_memory_is_kept_until_it_has_been_copied(own: FunctionType, quick: Unwaited) -> None:
    """Much noise one after the other, while the GPU is busy: none is written over."""
    ours, (given, same) = quick, generators(2)
    same.manual_seed(0)
    work = torch.ones(4096, 4096, device=CUDA)
    for _ in range(20):
        work = work @ work * 0
    found = [ours(SHAPE, generator=given, device=CUDA) for _ in range(50)]
    assert all(torch.equal(each, own(SHAPE, generator=same, device=CUDA)) for each in found)

"""Noise of the host's generators: the same numbers, and a GPU is not waited for."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import pytest
import torch
from diffusers.pipelines.stable_diffusion import pipeline_stable_diffusion_img2img
from diffusers.utils import torch_utils

import strop
from strop.diffusion.noise import NAME, Unwaited, draw_without_waiting, is_drawn_on_host
from tests.e2e import tiny

SHAPE = (2, 4, 8, 8)
CUDA = torch.device("cuda", 0)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> FunctionType:
    """diffusers' function as published, in its places: earlier tests may have put ours there."""
    there = torch_utils.randn_tensor
    published: Any = there.own if isinstance(there, Unwaited) else there
    for place in (torch_utils, pipeline_stable_diffusion_img2img):
        monkeypatch.setattr(place, NAME, published)
    assert isinstance(published, FunctionType)
    return published


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
def test_the_same_numbers(count: int | None, own: FunctionType) -> None:
    def drawn(draw: Any) -> torch.Tensor:
        given = generators(count) if count else None
        torch.manual_seed(3)
        found: torch.Tensor = draw(SHAPE, generator=given, dtype=torch.half)
        return found

    assert torch.equal(drawn(Unwaited(own)), drawn(own))


def test_it_is_wherever_diffusers_has_imported_it(own: FunctionType) -> None:
    strop.optimize(tiny.pipeline(), options=tiny.options())
    ours = torch_utils.randn_tensor
    assert isinstance(ours, Unwaited)
    assert ours.own is own
    assert pipeline_stable_diffusion_img2img.randn_tensor is ours
    assert draw_without_waiting()
    assert torch_utils.randn_tensor is ours  # not ours around ours


def test_another_function_stays(own: FunctionType, monkeypatch: pytest.MonkeyPatch) -> None:
    def newer(shape: Any, **given: Any) -> Any:
        return own(shape, **given).clone()

    monkeypatch.setattr(torch_utils, NAME, newer)
    assert not draw_without_waiting()
    assert torch_utils.randn_tensor is newer


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("count", [1, 2])
def test_a_gpu_is_not_waited_for(count: int, own: FunctionType) -> None:
    ours, wanted = Unwaited(own), own(SHAPE, generator=generators(count), device=CUDA)
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
def test_pinned_memory_is_kept_until_it_has_been_copied(own: FunctionType) -> None:
    """Much noise one after the other, while the GPU is busy: none is written over."""
    ours, (given, same) = Unwaited(own), generators(2)
    same.manual_seed(0)
    work = torch.ones(4096, 4096, device=CUDA)
    for _ in range(20):
        work = work @ work * 0
    found = [ours(SHAPE, generator=given, device=CUDA) for _ in range(50)]
    assert all(torch.equal(each, own(SHAPE, generator=same, device=CUDA)) for each in found)

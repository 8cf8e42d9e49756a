"""The second picture captures the CUDA graphs of what runs once a picture, and no other again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

import strop
from strop.debug.explain import UNCOUNTED
from strop.runtime.run import cuda_graphs, growing_memory, workspace
from tests.diffusion.replayed import replayed_first
from tests.e2e import tiny
from tests.runtime.host_pages import host_memory

STEPS = 4


def pipeline() -> Any:
    """Return a pipeline whose decoder needs more working memory than its UNet, as real ones do."""
    pipe = tiny.pipeline()
    torch.manual_seed(2)
    pipe.vae = AutoencoderKL(**{**pipe.vae.config, "block_out_channels": (64, 64)}).eval()
    return pipe


def picture(pipe: Any, size: int = 16) -> Tensor:
    """Draw with the UNet and the decoder of the VAE, whose working memory is the larger one."""
    prompt = torch.randn(1, 7, tiny.PROMPT_DIM, generator=torch.manual_seed(0)).to(pipe.device)
    found = pipe(
        prompt_embeds=prompt,
        negative_prompt_embeds=prompt * 0,
        num_inference_steps=STEPS,
        height=size,
        width=size,
        output_type="pt",
        generator=torch.manual_seed(1),
    )
    return found.images


# Whether memory grows where it is -> captures after each of four pictures, the last one larger,
# and then a small one: the UNet at its second step, the decoder at the second picture.
CAPTURES = {True: [1, 2, 2, 3, 3], False: [1, 3, 3, 4, 6]}
SIZES = (16, 16, 16, 32, 16)


@pytest.mark.parametrize("stays", CAPTURES)
def test_captures_of_pictures(stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_WORKSPACES", {})  # others have left large ones
    pipe = pipeline()
    expected = {size: picture(pipe, size) for size in set(SIZES)}
    where: AbstractContextManager[Any] = host_memory() if stays else nullcontext()
    with where, replayed_first() as pool:
        strop.optimize(pipe, options=tiny.options())
        counts = []
        for size in SIZES:
            torch.testing.assert_close(picture(pipe, size), expected[size], rtol=0, atol=1e-3)
            counts.append(pool.num_captures)
    assert counts == CAPTURES[stays]
    places = [*pipe.unet.forward.loop.kept.values()]
    tables = sum(graph.bound.timetable.held_bytes for graph in pool._graphs.values())
    assert len(pool._graphs) == 3, "two of the UNet, which hoist to one place"
    assert pool.held_bytes == tables + sum(place.memory.nbytes for place in places)
    assert all(place.memory.nbytes for place in places)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_captures_of_pictures_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    pool = cuda_graphs.pool_of(device)
    pool.drop()
    pipe = pipeline().to(device)
    expected = {size: picture(pipe, size) for size in set(SIZES)}
    before = pool.num_captures
    strop.optimize(pipe, options=tiny.options())
    counts = []
    for size in SIZES:
        torch.testing.assert_close(picture(pipe, size), expected[size], rtol=0, atol=1e-2)
        counts.append(pool.num_captures - before)
    assert counts == CAPTURES[True]
    assert growing_memory.held_bytes(device)
    assert any(note.startswith(UNCOUNTED) for note in strop.explain(pipe).notes)

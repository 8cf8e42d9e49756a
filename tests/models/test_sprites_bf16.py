"""Pictures of the sprites model in bf16 on a CPU."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

import strop
from strop.models import sprites
from strop.models.sprites import evaluate
from strop.testing import psnr
from tests.e2e.tiny import cache_dir

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = 4
ALLOWED_DB = 1.0  # below eager's, as docs/numerics.md says


def pipeline(dtype: torch.dtype) -> Any:
    pipe = sprites.load().to(dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.nightly
def test_pictures_are_as_near_to_fp32_as_those_of_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    prompts = sprites.held_out_prompts(PROMPTS)
    drawn = [
        evaluate.draw_prompts(pipe, prompts, 64, 64, evaluate.Options())
        for pipe in (
            pipeline(torch.float32),
            pipeline(torch.bfloat16),
            strop.optimize(pipeline(torch.bfloat16)),
        )
    ]
    exact, eager, ours = (pictures.float() for pictures in drawn)
    near = [
        statistics.median(psnr(a[None], b[None]) for a, b in zip(some, exact, strict=True))
        for some in (eager, ours)
    ]
    assert near[1] >= near[0] - ALLOWED_DB, near

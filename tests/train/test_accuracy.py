"""A hundred steps with everything in them, against fp64: no worse than torch's fused optimizer."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from strop import train
from tests.train import judge

STEPS = 100
SOME_STEPS = 45  # where the arithmetic was judged before, and only the checks are new
# Equal arithmetic in another order is a few percent better or worse; a wrong formula is not.
MARGIN = 1.1


@cache
def expected(steps: int) -> judge.Run:
    return judge.judge(steps, judge.INFINITE.__contains__)


@cache
def peer(steps: int, device: str) -> judge.Run:
    return judge.torch_run(steps, device)


@pytest.mark.parametrize("kind", [train.GradScaler, torch.amp.GradScaler], ids=["strop", "torch"])
def test_loop(kind: type[torch.amp.GradScaler], device: str) -> None:
    steps = STEPS if kind is train.GradScaler else SOME_STEPS
    run, _ = judge.strop_run(steps, device, kind=kind)
    torchs, true = peer(steps, device), expected(steps)
    assert run.scales == torchs.scales
    assert len(set(run.scales)) > 5, "the scale has grown and backed off"
    for step, (norm, exact) in enumerate(zip(run.norms, true.norms, strict=True)):
        assert step in judge.INFINITE or norm == pytest.approx(exact, rel=1e-6)
    for name in ("params", "averages"):
        ours, theirs = (judge.errors(getattr(r, name), getattr(true, name)) for r in (run, torchs))
        for a, b in zip(ours, theirs, strict=True):
            assert a <= MARGIN * b, (name, ours, theirs)


@pytest.mark.parametrize("grads", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_another_type(grads: torch.dtype, device: str) -> None:
    """The judge's gradients fit in bf16; in fp16 the small ones round."""
    if not hasattr(torch.nn.Parameter(torch.zeros(1)), "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    steps = 12
    true = expected(steps)
    run, _ = judge.strop_run(steps, device, grads=grads)
    limit = 1e-6 if grads == torch.bfloat16 else 1e-4
    assert max(judge.errors(run.params, true.params)) < limit

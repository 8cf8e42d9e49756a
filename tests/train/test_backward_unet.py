"""Each tensor's gradient of a whole UNet under autocast, beside eager's and fp64's."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from torch import nn

import strop
from tests.e2e import tiny
from tests.train.compiled import gradients, options, roles, unet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("fresh"),
]

RUNS = 60
LIMIT = 1.10  # of eager's RMS error; half an ulp of fp32 is nothing beside the error of bf16
SIZES = ((2, 8, 8, 7), (3, 8, 12, 9), (2, 12, 8, 5), (4, 16, 8, 7), (3, 8, 16, 11))


def squared_errors(
    ours: nn.Module, eager: nn.Module, device: str, runs: int
) -> dict[str, torch.Tensor]:
    """By parameter: ours and eager's in every run, in units of the gradient's size. Weights and
    sizes are others each time."""
    exact, found = copy.deepcopy(eager).double(), defaultdict(list)
    for run in range(runs):
        args = tuple(t.to(device) for t in tiny.unet_args(*SIZES[run % len(SIZES)], seed=run))
        with torch.no_grad():
            for p, q, r in zip(*(net.parameters() for net in (eager, ours, exact)), strict=True):
                p.mul_(1 + 0.1 * torch.randn_like(p))
                q.copy_(p)
                r.copy_(p)
        true = gradients(exact, tuple(a.double() for a in args))
        both = [gradients(net, args, torch.bfloat16) for net in (ours, eager)]
        assert both[0].keys() == both[1].keys() == true.keys()
        for name, value in true.items():
            off = [(grads[name] - value).square().mean() for grads in both]
            found[name].append(torch.stack(off) / value.square().mean())
    return {name: torch.stack(rows).double().cpu() for name, rows in found.items()}


def ratio(errors: torch.Tensor) -> tuple[float, float]:
    """Our RMS error over eager's, and the standard error of that: by leaving out each run."""
    total, count = errors.sum(0), len(errors)
    without = ((total - errors)[:, 0] / (total - errors)[:, 1]).sqrt()
    spread = ((without - without.mean()).square().sum() * (count - 1) / count).sqrt()
    return float((total[0] / total[1]).sqrt()), float(spread)


def judge(errors: dict[str, torch.Tensor]) -> None:
    """All together, and one by one: beyond the limit by more than chance, which decides much
    where the numbers of a tensor share the errors of a few others."""
    ratios = {name: ratio(each) for name, each in errors.items()}
    together, _ = ratio(torch.cat(list(errors.values())))
    assert together <= LIMIT
    assert torch.tensor([r for r, _ in ratios.values()]).median() <= 1.05
    worse = {name: pair for name, pair in ratios.items() if pair[0] - 3 * pair[1] > LIMIT}
    assert not worse, worse
    assert max(r for r, _ in ratios.values()) < 1.5


def test_each_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    eager = unet().train().cuda()
    ours = strop.optimize(copy.deepcopy(eager), train=True, options=options())
    errors = squared_errors(ours, eager, "cuda", RUNS)
    assert len(errors) == len(list(eager.parameters()))
    judge(errors)
    assert roles(ours.forward.log) == ["backward", "forward"]

"""Losses whose arithmetic torch knows: one kernel or two, no further from fp64 than eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import strop
from strop.debug.case import inaccuracy
from strop.options import Options
from tests.views.running import Function

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, beta=0.3),
    "huber": lambda x, y: F.huber_loss(x, y, delta=0.3),
    "binary_cross_entropy": F.binary_cross_entropy,
    "weighted": lambda x, y: F.binary_cross_entropy(x, y, weight=y + 1, reduction="none"),
    "with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x * 8 - 4, y),
    "pos_weight": lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=y[0] + 1),
    "soft_margin": lambda x, y: F.soft_margin_loss(x, y.round() * 2 - 1, reduction="sum"),
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "kl_div": lambda x, y: F.kl_div(x.log(), y, reduction="batchmean"),
    "cross_entropy": lambda x, y: F.cross_entropy(x, y.softmax(-1), label_smoothing=0.1),
    "nansum": lambda x, y: torch.where(x > y, torch.nan, x).nansum(-1),
}


@pytest.mark.parametrize("is_dynamo", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, dtype: torch.dtype, is_dynamo: bool, tmp_path: Path) -> None:
    function = LOSSES[name]
    torch.manual_seed(0)
    if is_dynamo:
        torch._dynamo.reset()
        fast = torch.compile(function, backend="strop", options={"strict": True})
    else:
        options = Options(cache_dir=str(tmp_path), strict=True)
        fast = strop.optimize(Function(function).eval(), options=options)
    for shape in ((7, 33), (2, 130)):
        x, y = torch.rand(2, *shape).to(dtype).clamp(0.01, 0.99)
        with torch.no_grad():
            ours, eager, exact = fast(x, y), function(x, y), function(x.double(), y.double())
        assert ours.dtype == eager.dtype
        assert not inaccuracy(ours, eager, exact)

"""Let torch take operators apart itself, into arithmetic that has rows.

https://docs.pytorch.org/docs/stable/torch.compiler_ir.html: its own decompositions, which compute
half types in fp32 where eager does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions

from strop.frontend.whole import MOVES

aten = torch.ops.aten

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = (
    get_decompositions(
        [
            aten.smooth_l1_loss,
            aten.huber_loss,
            aten.binary_cross_entropy,
            aten.binary_cross_entropy_with_logits,
            aten.soft_margin_loss,
            aten.nansum,
        ]
    )
    | MOVES
)
# autograd's zeros, which have no memory
DECOMPOSITIONS[aten._efficientzerotensor.default] = torch.zeros

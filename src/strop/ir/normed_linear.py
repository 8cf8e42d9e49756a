"""Compute a linear whose columns are normalised, by torch: what a program runs where no kernel can,
and what tests compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.ir.contractions import NUM_OF_NORM, RELU, SILU, ColumnNorm

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {RELU: torch.relu, SILU: F.silu}


def normed_linear(operands: Sequence[Tensor], norm: ColumnNorm) -> Tensor:
    """Return ``norm`` of x @ weight.T, (..., N), for the operands of one of ``NORMED``: x (..., K),
    weight (N, K), maybe a value (..., N) that is added, and mean, variance, factor and shift (N,).

    The product is rounded to the type of x, as eager rounds it; all else is computed in fp32 for
    half types. What is added is added to a rounded norm: one by statistics of new layers has a
    factor of nearly 1, and would break all ties of the sum to one side.
    """
    x, weight, *added = operands[:-NUM_OF_NORM]
    wide = torch.promote_types(x.dtype, torch.float32)
    mean, variance, factor, shift = (each.to(wide) for each in operands[-NUM_OF_NORM:])
    factor = factor * torch.rsqrt(variance + norm.eps)
    found = torch.addcmul(shift, F.linear(x, weight).to(wide) - mean, factor)
    for each in added:
        found = found.to(x.dtype).to(wide) + each
    activation = _ACTIVATIONS.get(norm.activation)
    return (activation(found) if activation else found).to(x.dtype)

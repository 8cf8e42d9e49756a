"""Fill a diagonal in place. torch does so by strides, through a view that nothing undoes."""

from __future__ import annotations

import torch
from torch import Tensor


def fill_diagonal(x: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """Fill where all indices are equal, as ``Tensor.fill_diagonal_`` does. With ``wrap`` the
    diagonal of a tall matrix begins anew behind one row that has none."""
    same = all(a == b for a, b in zip(x.shape, x.shape[1:], strict=False))
    if x.dim() < 2 or not (x.dim() == 2 or same):
        return x.fill_diagonal_(fill_value, wrap)  # raises eager's error
    rows, *others = (_index(x, dim) for dim in range(x.dim()))
    is_inside = rows == others[0]
    if wrap and x.dim() == 2:
        is_inside = rows % (x.shape[1] + 1) == others[0]
    for other in others[1:]:
        is_inside = is_inside & (rows == other)
    return x.masked_fill_(is_inside, x.new_full((), fill_value))


def _index(x: Tensor, dim: int) -> Tensor:
    """Return the index in one dim, to broadcast with ``x``."""
    shape = [-1 if place == dim else 1 for place in range(x.dim())]
    return torch.arange(x.shape[dim], device=x.device).view(shape)

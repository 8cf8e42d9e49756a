"""A black picture must never come silently: results are looked at for NaN and inf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def not_finite(name: str, results: Sequence[Any], tensors: Sequence[Tensor]) -> str:
    """Return what to say of the first results at a shape, or nothing."""
    floats = [r for r in results if isinstance(r, Tensor) and _has_fractions(r)]
    if _are_finite(floats):
        return ""
    given = all(_are_finite([t]) for t in tensors if _has_fractions(t))
    text = f"{name}: NaN or inf in the result at {[tuple(t.shape) for t in tensors]}"
    return text + ("" if given else "; the arguments hold NaN or inf already")


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    """Look at the least and the largest number of each, which are NaN where one is: to compare all
    of them would take three times the memory of the results, above the peak of the call itself."""
    ends = [end.double() for t in tensors if t.numel() for end in torch.aminmax(t)]
    return not ends or bool(torch.isfinite(torch.stack(ends)).all())


def _has_fractions(tensor: Tensor) -> bool:
    """Tell whether a tensor's type is one in which NaN and inf can be asked for."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1

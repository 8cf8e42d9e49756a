"""Index a tensor by calls of operators, as PyTorch's own ``x[index]`` does it.

PyTorch's own asks which device is the current one, as ``copy_`` and ``contiguous`` do as methods of
a tensor. Without a GPU that is an error, and a module that is compiled ahead for one could not be
traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from strop.errors import UnsupportedError

_ALL = slice(None)


def needs_operators(x: Tensor) -> bool:
    """Tell whether the tensor is on a device that this process does not have."""
    return x.device.type == "cuda" and not _has_gpu()


@cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def made_on(usual: Callable[..., Tensor], data: Any, *, device: Any, **how: Any) -> Tensor:
    """Make a tensor of Python's numbers as ``usual`` does; of constants, one by one, on a device
    that this process does not have."""
    if device is None or torch.device(device).type != "cuda" or _has_gpu():
        return usual(data, device=device, **how)
    if isinstance(data, Tensor):
        return usual(data, **how) if data.device.type == "cuda" else usual(data, device=device)
    with _disable_current_modes():
        real = torch.tensor(data, **how)
    numbers, kind = real.flatten().tolist(), {"dtype": real.dtype, "device": device}
    if not numbers:
        return torch.empty(real.shape, **kind)
    each = [torch.full((1,), number, **kind) for number in numbers]
    return torch.cat(each).reshape(real.shape)


def indexed(x: Tensor, index: Any) -> Tensor:
    """Return ``x[index]``."""
    view, found = _looked_at(x, index)
    if all(place is None for place in found):
        return view if view is not x else torch.ops.aten.alias.default(x)
    result: Tensor = torch.ops.aten.index.Tensor(view, found)
    return result


def write_indexed(x: Tensor, index: Any, value: Any) -> None:
    """Do ``x[index] = value``."""
    view, found = _looked_at(x, index)
    if all(place is None for place in found):
        if isinstance(value, Tensor):
            torch.ops.aten.copy_.default(view, value)
        else:
            view.fill_(value)
        return
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    torch.ops.aten.index_put_.default(view, found, value)


def _looked_at(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Return the view that whole numbers, slices and new dims make, and the tensors that look into
    it, by dim."""
    found: list[Tensor | None] = []
    for place in _without_ellipsis(x, index):
        dim = len(found)
        if place is None:
            x = x.unsqueeze(dim)
            found.append(None)
        elif isinstance(place, slice):
            if place != _ALL:
                x = torch.ops.aten.slice.Tensor(x, dim, place.start, place.stop, place.step or 1)
            found.append(None)
        elif isinstance(place, bool) or getattr(place, "dtype", None) == torch.bool:
            raise UnsupportedError("a mask as an index, which is traced where there is a GPU alone")
        elif isinstance(place, Tensor):
            found.append(place)
        elif isinstance(place, list | tuple):
            found.append(made_on(torch.tensor, place, device=x.device))
        else:
            x = x.select(dim, place)
    return x, found


def _without_ellipsis(x: Tensor, index: Any) -> Sequence[Any]:
    places = [*index] if isinstance(index, tuple) else [index]
    at = [n for n, place in enumerate(places) if place is Ellipsis]
    if not at:
        return places
    taken = sum(place is not None and place is not Ellipsis for place in places)
    return [*places[: at[0]], *[_ALL] * (x.dim() - taken), *places[at[0] + 1 :]]

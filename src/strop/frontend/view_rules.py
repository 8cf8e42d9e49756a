"""Compute the shapes of views of contiguous memory while tracing: by products of sizes, without a
guard and without sympy's simplification, which torch asks for each view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
from torch import Tensor
from torch._subclasses import FakeTensor

from strop.frontend.fake_orders import VIEWS, Size, exact, is_positive, order_of
from strop.frontend.fake_tensors import fake_view
from strop.frontend.formats import traced


def viewed(mode: Any, x: Tensor, shape: Sequence[Size]) -> Tensor | None:
    """Look at memory in another shape, where sizes are products; None: torch's own rule."""
    look = mode, exact(x.shape), exact(x.stride()), exact(shape)
    found = VIEWS.get(look) or _found(mode, x, shape)
    if found is None:
        return None
    VIEWS[look] = found
    assert isinstance(x, FakeTensor)
    return fake_view(x, x, *found, x.storage_offset())


def _found(mode: Any, x: Tensor, shape: Sequence[Size]) -> tuple[list[Size], Sequence[Size]] | None:
    """Return the shape and the strides of such a view."""
    sizes, before = list(exact(shape)), exact(x.shape)
    given = [size for size in sizes if size != -1]
    are_products = all(_is_product(mode, size) for size in (*given, *before))
    if len(sizes) - len(given) > 1 or not are_products:
        return None
    rest = sympy.Mul(*before) / sympy.Mul(*given)
    if not _is_product(mode, rest):
        return None
    shape = list(shape)
    if len(given) < len(sizes):
        known = math.prod(map(traced, x.shape)) // abs(math.prod(map(traced, shape)))
        shape[sizes.index(-1)] = _count(mode, rest, known)
    elif rest != 1:
        return None  # torch's own error
    is_contiguous = order_of(x) == "contiguous"
    strides = _strides(x, shape) if is_contiguous else _joined(x, shape)
    return None if strides is None else (shape, strides)


def _strides(x: Tensor, shape: Sequence[Size]) -> Sequence[Size]:
    """Return the strides of contiguous memory in another shape."""
    if exact(shape) == exact(x.shape):
        return x.stride()
    strides: list[Size] = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides[: len(shape)]


def _joined(x: Tensor, shape: Sequence[Size]) -> list[Size] | None:
    """Return the strides of a shape whose dims are each a run of x's dims that lie behind each
    other, such as the pixels of a picture; None for other shapes."""
    sizes, steps, strides = exact(x.shape), exact(x.stride()), list[Size]()
    first = 0
    for size in exact(shape):
        last = first + 1
        while last < len(sizes) and sympy.Mul(*sizes[first:last]) != size:
            last += 1
        is_run = all(steps[d] == sizes[d + 1] * steps[d + 1] for d in range(first, last - 1))
        if not is_run or first == len(sizes) or sympy.Mul(*sizes[first:last]) != size:
            return None
        strides.append(x.stride(last - 1))
        first = last
    return strides if first == len(sizes) else None


def _is_product(mode: Any, size: Any) -> bool:
    """Tell whether a size is a number above 0 or a product of what is above 0: of symbols, and of
    what a trace has computed of them, such as the half of a size that is rounded up."""
    for factor in sympy.Mul.make_args(sympy.sympify(size)):
        base, power = factor.as_base_exp()
        is_power = power.is_Integer and power > 0 and is_positive(mode, base)
        if not (is_power or (factor.is_Integer and factor > 0)):
            return False
    return True


def _count(mode: Any, size: Any, known: int) -> Size:
    """Return a size by its expression and its value in this trace."""
    if size.is_Integer:
        return int(size)
    found: Size = mode.shape_env.create_symintnode(size, hint=known)
    return found

"""Tell what is known of the sizes of a fake tensor and of its order in memory, and make others like
it, without a guard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._prims_common import is_contiguous_for_memory_format_or_false
from torch._subclasses import FakeTensor
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from strop.frontend.fake_tensors import fake_memory, fake_view

Size = int | SymInt
# by shape and strides; "" for any but the two that torch's own rule has
_ORDERS: dict[tuple[tuple[Any, ...], tuple[Any, ...]], str] = {}
_POSITIVE: dict[Any, bool] = {}
# The shape and the strides of views, by the fake mode, those of what is looked at, and the shape
# that is asked for.
VIEWS: dict[tuple[Any, ...], tuple[list[Size], Sequence[Size]]] = {}


def exact(sizes: Sequence[Size]) -> tuple[Any, ...]:
    """Return sizes as expressions, which compare without guards."""
    return tuple(s.node.expr if isinstance(s, SymInt) else s for s in sizes)


def order_of(x: Tensor) -> str:
    """Return "contiguous" or "channels last", or "" for another order and for one that is not
    known."""
    key = exact(x.shape), exact(x.stride())
    if key not in _ORDERS:
        formats = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
        _ORDERS[key] = next(
            (
                name
                for name, value in formats.items()
                if is_contiguous_for_memory_format_or_false(x, memory_format=value)
            ),
            "",
        )
    return _ORDERS[key]


def is_positive(mode: Any, size: Any) -> bool:
    """Tell whether a symbol, or a number that is computed of some, is above 0 whatever they are."""
    if size not in _POSITIVE:
        is_symbolic = not size.is_number and mode.shape_env is not None
        _POSITIVE[size] = is_symbolic and bool(size.is_integer) and _least(mode, size) >= 1
    return _POSITIVE[size]


def _least(mode: Any, size: Any) -> Any:
    """Return the least value of what is computed of sizes. Calls with sizes of 0 are none for the
    graphs of our own traces, which torch does not know."""
    env = mode.shape_env
    ranges = {symbol: env.bound_sympy(symbol) for symbol in size.free_symbols}
    if getattr(env, "are_sizes_positive", False):
        positive = ValueRanges(1, int_oo)
        ranges = {symbol: known & positive for symbol, known in ranges.items()}
    return bound_sympy(size, ranges).lower


def forget_sizes() -> None:
    """Forget what is known of a trace: symbols of another one have the same names."""
    _ORDERS.clear()
    _POSITIVE.clear()
    VIEWS.clear()


def like(mode: Any, x: Tensor) -> Tensor:
    """Make an empty tensor like x, which is dense: to count its bytes by sizes and strides takes
    longer than by the number of its elements."""
    assert isinstance(x, FakeTensor)
    memory = fake_memory(mode, x.shape, x.dtype)
    return fake_view(x, memory, x.shape, x.stride(), 0)


def fake(mode: Any, x: Tensor, shape: Sequence[Size], strides: Sequence[Size]) -> Tensor:
    """Make an empty tensor on the device and in the type of x."""
    meta = torch.empty_strided(shape, strides, dtype=x.dtype, device="meta")
    return FakeTensor(mode, meta, x.device)

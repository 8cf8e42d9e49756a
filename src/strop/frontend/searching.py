"""Search sorted numbers: a few steps that halve a range, each a lookup, which fuse like any other.

They are the steps of torch's own search, so that numbers which are not sorted, or no numbers, end
up where they do in eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.frontend.lookups import PLACE, take
from strop.ir.graph import Builder, Node

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
MOST_SEARCHED = 4095  # numbers, of 12 steps; a library looks among more


def _search(im: Importer, fx: FxNode, numbers: Any, values: Any, *, is_upper: bool) -> Node | None:
    """Find how many of the sorted ``numbers`` (..., N) lie before each of ``values``."""
    if not isinstance(numbers, FxNode) or not isinstance(values, FxNode):
        return None
    b, source, wanted = im.builder, im.node(numbers), im.node(values)
    size = source.shape[-1] if source.shape else None
    if size is None or not size.is_const or not 0 < size.value <= MOST_SEARCHED:
        return None
    if source.dtype != wanted.dtype or len(source.shape) not in (1, len(wanted.shape)):
        return None
    if source.dtype is torch.bool or source.shape[:-1] not in ((), wanted.shape[:-1]):
        return None
    walks = [*range(len(source.shape) - 1), None]
    start = _full(b, 0, wanted)
    end = _full(b, size.value, wanted)
    for _ in range(size.value.bit_length()):
        start, end = _halved(b, source, wanted, walks, (start, end), is_upper=is_upper)
    return b.cast(start, fx.meta["val"].dtype)


def _halved(
    b: Builder,
    source: Node,
    wanted: Node,
    walks: list[int | None],
    within: tuple[Node, Node],
    *,
    is_upper: bool,
) -> tuple[Node, Node]:
    """Return the half of a range in which the search goes on; one that is empty stays as it is."""
    start, end = within
    one = b.constant(1, PLACE)
    total = b.pointwise("add", start, end, dtype=PLACE, alpha=1)
    middle = b.pointwise("shift_right", total, one, dtype=PLACE)
    last = b.constant(source.shape[-1].value - 1, PLACE)
    place = b.pointwise("minimum", middle, last, dtype=PLACE)
    found = take(b, source, (place,), walks, wanted.shape, "known")
    assert found is not None
    compares = "gt" if is_upper else "ge"
    is_behind = b.pointwise(compares, found, wanted, dtype=torch.bool)
    is_open = b.pointwise("lt", start, end, dtype=torch.bool)
    is_before = b.pointwise("logical_not", is_behind, dtype=torch.bool)
    goes_up = b.pointwise("logical_and", is_open, is_before, dtype=torch.bool)
    after = b.pointwise("add", middle, one, dtype=PLACE, alpha=1)
    goes_down = b.pointwise("logical_and", is_open, is_behind, dtype=torch.bool)
    return (
        b.pointwise("where", goes_up, after, start, dtype=PLACE),
        b.pointwise("where", goes_down, middle, end, dtype=PLACE),
    )


def _full(b: Builder, value: int, like: Node) -> Node:
    return b.expand(b.view_as_rank(b.constant(value, PLACE), len(like.shape)), like.shape)


def _bucketize(
    im: Importer,
    fx: FxNode,
    values: Any,
    numbers: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
) -> Node | None:
    return _search(im, fx, numbers, values, is_upper=right)


def _searchsorted(
    im: Importer,
    fx: FxNode,
    numbers: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Node | None:
    if sorter is not None:
        return None
    return _search(im, fx, numbers, values, is_upper=right or side == "right")


SEARCHING: dict[Any, Callable[..., Any]] = {
    aten.bucketize.Tensor: _bucketize,
    aten.searchsorted.Tensor: _searchsorted,
}

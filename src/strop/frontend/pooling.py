"""Pool over small windows: the elements of a window are strided slices, side by side.

What stands before and behind the pooling then shares its kernel. An element of a window that may
lie over the edge is looked up at the nearest place inside: a maximum has that one already, a mean
takes 0 instead. Large windows stay with torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.frontend.lookups import PLACE, take
from strop.frontend.pointwise import apply
from strop.frontend.reductions import Rule, binary
from strop.ir.dims import Expr, const
from strop.ir.graph import Node
from strop.ir.ops import compute_dtype

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten

MAX_WINDOW = 9  # a kernel holds as many loads


def _both(value: int | Sequence[int]) -> tuple[int, int]:
    first, *rest = [value] if isinstance(value, int) else value
    return first, rest[0] if rest else first


@dataclass(frozen=True, slots=True)
class _Side:
    """Describe a pooled dim of ``size`` elements and its windows."""

    dim: int
    size: Expr
    windows: Expr
    kernel: int
    step: int
    padding: int
    dilation: int
    may_end_outside: bool  # ceil_mode

    @property
    def elements(self) -> Iterator[_Element]:
        """Yield the elements of a window, by the place of the first window's."""
        last_inside = (self.kernel - 1) * self.dilation - 2 * self.padding
        for number in range(self.kernel):
            start = number * self.dilation - self.padding
            is_behind = start > last_inside or (self.may_end_outside and number > 0)
            yield _Element(self, start, start < 0, is_behind)

    def places(self, im: Importer, start: int, rank: int) -> Node:
        b, shape = im.builder, [const(1)] * rank
        shape[self.dim] = self.windows
        iota = b.make("iota", (), (self.windows,), torch.int64, start=start, step=self.step)
        return b.reshape(b.cast(iota, PLACE), shape)


@dataclass(frozen=True, slots=True)
class _Element:
    """Describe one element of all windows along a side, and over which edges it may lie."""

    side: _Side
    start: int
    before: bool
    behind: bool

    @property
    def is_inside(self) -> bool:
        return not self.before and not self.behind

    def clamped(self, im: Importer, at: Node) -> Node:
        at = apply(im, "maximum", at, 0, dtype=PLACE) if self.before else at
        return apply(im, "minimum", at, self.side.size - 1, dtype=PLACE) if self.behind else at

    def tests(self, im: Importer, at: Node) -> list[Node]:
        first, end = (im.operand(place, PLACE) for place in (0, self.side.size))
        before = [apply(im, "ge", at, first, dtype=torch.bool)] if self.before else []
        behind = [apply(im, "lt", at, end, dtype=torch.bool)] if self.behind else []
        return before + behind


def _sides(
    im: Importer,
    fx: FxNode,
    x: Node,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    *,
    ceil_mode: bool,
) -> tuple[_Side, ...]:
    value = fx.meta["val"]
    shape = im.symbols.shape((value if isinstance(value, torch.Tensor) else value[0]).shape)
    rank = len(x.shape)
    columns = zip(
        (rank - 2, rank - 1), *map(_both, (kernel, stride, padding, dilation)), strict=True
    )
    return tuple(
        _Side(dim, x.shape[dim], shape[dim], width, step, pad, gap, ceil_mode)
        for dim, width, step, pad, gap in columns
    )


def _over_windows(
    im: Importer,
    x: Node,
    sides: Sequence[_Side],
    join: Callable[[Node, Node], Node],
    outside: float | None = None,
) -> Node:
    """Reduce over windows. ``outside`` counts for an element over the edge; without it, the one at
    the edge does."""
    pieces = [
        _piece(im, x, elements, outside)
        for elements in itertools.product(*(side.elements for side in sides))
    ]
    return reduce(join, pieces)


def _piece(im: Importer, x: Node, elements: Sequence[_Element], outside: float | None) -> Node:
    b, rank = im.builder, len(x.shape)
    walks: list[int | None] = list(range(rank))
    indices: list[Node] = []
    tests: list[Node] = []
    shape = list(x.shape)
    for element in elements:
        side = element.side
        shape[side.dim] = side.windows
        if element.is_inside:
            x = b.slice(x, side.dim, element.start, side.windows, side.step)
            continue
        at = side.places(im, element.start, rank)
        walks[side.dim] = None
        indices.append(element.clamped(im, at))
        tests += element.tests(im, at)
    piece = take(b, x, indices, walks, shape, "known") if indices else x
    assert piece is not None, "torch refuses to pool over no element"
    if not tests or outside is None:
        return piece
    inside = reduce(lambda p, q: apply(im, "logical_and", p, q, dtype=torch.bool), tests)
    return apply(im, "where", inside, piece, outside, dtype=x.dtype)


def _fits(node: Node, kernel: Any) -> bool:
    return math.prod(_both(kernel)) <= MAX_WINDOW and node.dtype.is_floating_point


def _max_pool(
    im: Importer,
    fx: FxNode,
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Node, None] | None:
    b, node = im.builder, im.node(x)
    reads_places = any(user.args[1] == 1 and user.users for user in fx.users)
    if reads_places or not _fits(node, kernel):
        return None
    sides = _sides(im, fx, node, kernel, stride or kernel, padding, dilation, ceil_mode=ceil_mode)
    # the nearest place inside is in the window, unless that steps over it
    outside = -math.inf if _both(dilation) != (1, 1) else None
    return _over_windows(
        im, node, sides, lambda p, q: binary(b, "maximum", p, q, node.dtype), outside
    ), None


def _avg_pool(
    im: Importer,
    fx: FxNode,
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Node | None:
    b, node = im.builder, im.node(x)
    if not _fits(node, kernel):
        return None
    wide = compute_dtype(node.dtype)
    sides = _sides(im, fx, node, kernel, stride or kernel, padding, 1, ceil_mode=ceil_mode)
    total = _over_windows(im, node, sides, lambda p, q: binary(b, "add", p, q, wide), 0.0)
    if divisor_override:
        count = b.constant(float(divisor_override), wide)
    else:
        counts = (_count(im, side, len(node.shape), count_include_pad, wide) for side in sides)
        count = reduce(lambda p, q: binary(b, "mul", p, q, wide), counts)
    return binary(b, "div", total, count, node.dtype)


def _count(im: Importer, side: _Side, rank: int, with_padding: bool, wide: torch.dtype) -> Node:
    """Return how many elements each window along a side has, which may reach over the padding
    too."""
    padded = side.padding > 0 and not with_padding
    if not padded and not side.may_end_outside:
        return im.builder.constant(float(side.kernel), wide)
    first = side.places(im, -side.padding, rank)
    limit = side.size if not with_padding else side.size + side.padding
    end = apply(im, "add", first, side.kernel, dtype=PLACE)
    end = apply(im, "minimum", end, limit, dtype=PLACE)
    begin = apply(im, "maximum", first, 0, dtype=PLACE) if padded else first
    return im.builder.cast(apply(im, "sub", end, begin, dtype=PLACE), wide)


POOLING: dict[Any, Rule] = {
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.avg_pool2d.default: _avg_pool,
}

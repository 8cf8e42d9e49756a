"""Pooling over small windows: the elements of a window as strided slices, side by side.

What stands before and behind the pooling then shares its kernel. Large windows, dilated ones and
those that reach over the edge stay with torch: nine loads, each with a test for the edge, took 1.3
(maximum) to 2 times (mean) as long as torch on a CPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.frontend.reductions import Rule, binary
from strop.ir.dims import Expr
from strop.ir.graph import Builder, Node
from strop.ir.ops import compute_dtype

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten

MAX_WINDOW = 9  # a kernel holds as many loads


def _both(value: int | Sequence[int]) -> tuple[int, int]:
    first, *rest = [value] if isinstance(value, int) else value
    return first, rest[0] if rest else first


def _over_windows(b: Builder, x: Node, kernel: Sequence[int], stride: Sequence[int],
                  sizes: Sequence[Expr], join: Callable[[Node, Node], Node]) -> Node:  # fmt: skip
    rank, pieces = len(x.shape), []
    for starts in itertools.product(*map(range, kernel)):
        piece = x
        for dim, start, step, size in zip((rank - 2, rank - 1), starts, stride, sizes, strict=True):
            piece = b.slice(piece, dim, start, size, step)
        pieces.append(piece)
    return reduce(join, pieces)


def _fits(node: Node, kernel: Sequence[int], padding: Any, ceil_mode: bool) -> bool:
    is_inside = not ceil_mode and _both(padding) == (0, 0)
    return is_inside and math.prod(kernel) <= MAX_WINDOW and node.dtype.is_floating_point


def _max_pool(im: Importer, fx: FxNode, x: Any, kernel: Any, stride: Any = (), padding: Any = 0,
              dilation: Any = 1, ceil_mode: bool = False) -> tuple[Node, None] | None:  # fmt: skip
    b, node, kernel = im.builder, im.node(x), _both(kernel)
    reads_places = any(user.args[1] == 1 and user.users for user in fx.users)
    if reads_places or _both(dilation) != (1, 1) or not _fits(node, kernel, padding, ceil_mode):
        return None
    sizes = im.symbols.shape(fx.meta["val"][0].shape[-2:])
    return _over_windows(b, node, kernel, _both(stride or kernel), sizes,
                         lambda x, y: binary(b, "maximum", x, y, node.dtype)), None  # fmt: skip


def _avg_pool(im: Importer, fx: FxNode, x: Any, kernel: Any, stride: Any = (), padding: Any = 0,
              ceil_mode: bool = False, count_include_pad: bool = True,
              divisor_override: int | None = None) -> Node | None:  # fmt: skip
    b, node, kernel = im.builder, im.node(x), _both(kernel)
    if not _fits(node, kernel, padding, ceil_mode):
        return None
    wide = compute_dtype(node.dtype)
    total = _over_windows(b, node, kernel, _both(stride or kernel), im.shape(fx)[-2:],
                          lambda x, y: binary(b, "add", x, y, wide))  # fmt: skip
    count = b.constant(float(divisor_override or math.prod(kernel)), wide)
    return binary(b, "div", total, count, node.dtype)


POOLING: dict[Any, Rule] = {
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.avg_pool2d.default: _avg_pool,
}

"""Pad with elements of the tensor itself: mirrored at its ends, or the last ones again.

Constants around a tensor are a cat (``indexing``). These are lookups at places that are arithmetic
on positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.frontend.creation import positions
from strop.frontend.lookups import PLACE, take
from strop.frontend.pointwise import apply
from strop.frontend.whole import IN_TORCH
from strop.ir.dims import Expr
from strop.ir.graph import Node

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
Rule = Callable[..., Any]
Places = Callable[["Importer", Node, Expr], Node]  # of positions, behind a dim's last element


def _repeated(im: Importer, at: Node, last: Expr) -> Node:
    return apply(im, "clamp", at, 0, last, dtype=PLACE)


def _mirrored(im: Importer, at: Node, last: Expr) -> Node:
    """Mirror a place: last - |last - |at||. Torch has made sure that the padding is shorter than
    the dim."""
    behind = apply(im, "sub", last, apply(im, "abs", at, dtype=PLACE), dtype=PLACE)
    return apply(im, "sub", last, apply(im, "abs", behind, dtype=PLACE), dtype=PLACE)


def _padded(places: Places) -> Rule:
    def rule(im: Importer, fx: FxNode, x: Any, pad: Sequence[Any]) -> Node | None:
        node, b, shape = im.node(x), im.builder, im.shape(fx)
        first = len(shape) - len(pad) // 2
        indices = []
        for dim in range(first, len(shape)):
            before = im.size(pad[2 * (len(shape) - 1 - dim)])
            at = b.cast(positions(b, shape, dim, before * -1), PLACE)
            indices.append(places(im, at, node.shape[dim] - 1))
        walks = [*range(first), *[None] * len(indices)]
        return take(b, node, indices, walks, shape, "known")

    return rule


PADDING: dict[Any, Rule] = {
    aten.reflection_pad1d.default: _padded(_mirrored),
    aten.reflection_pad2d.default: _padded(_mirrored),
    aten.reflection_pad3d.default: _padded(_mirrored),
    aten.replication_pad1d.default: _padded(_repeated),
    aten.replication_pad2d.default: _padded(_repeated),
    aten.replication_pad3d.default: _padded(_repeated),
}
# traced as calls of ours, whose shape rule asks for nothing
PADDING |= {own: PADDING[overload] for own, overload in IN_TORCH.items() if overload in PADDING}

"""Write the statements of a bag: where it begins and ends, and the load that adds up its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from strop.errors import UnsupportedError
from strop.ir.affine import Strided, merge, strided
from strop.ir.dims import Expr
from strop.ir.graph import Node
from strop.ir.ops import compute_dtype
from strop.lowering.axes import ONE
from strop.lowering.positions import ZERO, NodeIndex

if TYPE_CHECKING:
    from strop.lowering.values import Values


@dataclass(frozen=True, slots=True)
class BagDraft:
    """Hold what a load of a bag reads beside the table: ``loops.Bag`` with values for params."""

    table: Node
    kind: str
    ids: Node
    at: Expr
    count: Expr
    stride: Expr
    size: Expr
    padding: int | None
    weights: Node | None = None
    weights_at: Expr = ZERO


def bag_of(values: Values, node: Node, index: NodeIndex, guard: str | None) -> str:
    """Emit one element of a bag, and return its name. Where ``guard`` is false the bag is empty."""
    table, ids, _, *weights = node.inputs
    view, listed = _view(table), _view(ids)
    rows = merge(view.dims[0])
    if len(rows) > 1:
        raise UnsupportedError(f"{table}: looked up along a dim of several strides")
    first, length = _extent(values, node, index, guard)
    access = values.access(view.offset, [(index[1], view.dims[1])])
    if access.lookups:
        raise UnsupportedError(f"{node} is read where a value says")
    factor = _view(weights[0]) if weights else None
    draft = BagDraft(
        view.base,
        node.attrs["kind"],
        listed.base,
        listed.offset,
        ids.numel,
        rows[0][1] if rows else ZERO,
        table.shape[0],
        node.attrs["padding"],
        factor.base if factor else None,
        factor.offset if factor else ZERO,
    )
    dtype = compute_dtype(node.dtype)
    return values.drafts.emit("bag", (first, length), dtype, access, draft)


def _view(node: Node) -> Strided:
    view = strided(node)
    if view is None:
        raise UnsupportedError(f"{node} is not affine over its base")
    return view


def _extent(values: Values, node: Node, index: NodeIndex, guard: str | None) -> tuple[str, str]:
    """Return the first id of a bag and how many it has, both within what there is. Offsets that
    begin elsewhere than at 0, decrease, or go beyond the last id are faults, as in eager; those of
    a part of all ids (``is_part``) may begin anywhere."""
    write, ids, offsets = values.drafts, node.inputs[1], node.inputs[2]
    count, place = ids.numel, index[0]
    begin = write.convert(values.value(offsets, (place,), guard), torch.int64)
    if node.attrs["ends"]:
        end = values.value(offsets, (place.moved(ONE),), guard)
        end = write.convert(end, torch.int64)
    else:
        last = node.shape[0] - ONE
        position, limit = write.position(place), _number(values, last)
        is_inner = write.emit("apply", (position, limit), torch.bool, detail="ne")
        inner = write.both(is_inner, guard)
        found = write.convert(values.value(offsets, (place.moved(ONE),), inner), torch.int64)
        sides = (is_inner, found, _number(values, count))
        end = write.emit("apply", sides, torch.int64, detail="where")
        if guard:
            end = write.emit("apply", (guard, end, begin), torch.int64, detail="where")
    start = None if node.attrs.get("is_part") else _start(values, index, begin)
    begin = write.emit("place", (begin,), torch.int64, detail=(count + ONE, False))
    end = write.emit("place", (end,), torch.int64, detail=(count + ONE, False))
    length = write.binary("sub", end, begin, torch.int64)
    length = write.emit("place", (length,), torch.int64, detail=(count + ONE, False))
    first = begin if start is None else write.binary("add", begin, start, torch.int64)
    return first, length


def _start(values: Values, index: NodeIndex, begin: str) -> str:
    """Return 0, checked: where the first of all bags begins."""
    write, zero = values.drafts, _number(values, ZERO)
    is_first = write.emit("apply", (write.position(index[0]), zero), torch.bool, detail="eq")
    start = write.emit("apply", (is_first, begin, zero), torch.int64, detail="where")
    return write.emit("place", (start,), torch.int64, detail=(ONE, False))


def _number(values: Values, size: Expr) -> str:
    return values.drafts.literal(size.value if size.is_const else size, torch.int64)

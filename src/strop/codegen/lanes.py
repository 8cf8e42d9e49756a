"""Make lanes of an inner axis where a reduction keeps none, before such a kernel is printed."""

from __future__ import annotations

from dataclasses import replace

from strop.codegen.triton_text import ALIGNED, next_power_of_two
from strop.ir.dims import const
from strop.ir.loops import Axis, Index, Load, LoopKernel, Position, Stmt, Store

LEAST_LANES, MOST_LANES = 64, 2048  # 128 bytes of fp16; what a tile of 4 warps has room for
MOST_IDLE = 4  # lanes: a quarter of a tile


def with_lanes(kernel: LoopKernel) -> LoopKernel:
    """Make lanes of the innermost axis of a kernel that keeps none, or of a part of it, where its
    size is known.

    What differs between outer axes alone, such as the places of looked-up rows, is then one number
    for each row of a tile, and rows begin at whole vectors wherever a slab does.
    """
    *outer, axis = kernel.rows or (Axis("one", const(1)),)
    if kernel.num_cols != const(1) or not any(axis.reduced for axis in outer):
        return kernel
    size = axis.size.value if axis.size.is_const else 0
    widths = range(ALIGNED, min(size, MOST_LANES) + 1, ALIGNED)
    lanes = max((n for n in widths if size % n == 0 and not _is_idle(n)), default=0)
    if lanes < LEAST_LANES:
        return kernel
    if lanes < size:
        part = replace(axis, name=f"{axis.name}_part", size=const(size // lanes))
        outer, axis = [*outer, part], replace(axis, size=const(lanes))
        kernel = replace(kernel, body=tuple(_with_part(s, part, axis) for s in kernel.body))
    return replace(kernel, rows=tuple(outer), cols=(axis,))


def _is_idle(lanes: int) -> bool:
    """Tell whether too many lanes of a tile would have no col."""
    tile = next_power_of_two(lanes)
    return (tile - lanes) * MOST_IDLE > tile


def _with_part(stmt: Stmt, part: Axis, axis: Axis) -> Stmt:
    """Walk an axis as parts of it."""
    if not isinstance(stmt, Load | Store | Position):
        return stmt
    strides = dict(stmt.index.strides)
    if axis.name not in strides:
        return stmt
    strides[part.name] = strides[axis.name] * axis.size
    return replace(stmt, index=Index(stmt.index.offset, tuple(strides.items())))

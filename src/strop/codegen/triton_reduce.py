"""Print Triton text of reductions: over a tile in registers, and over a loop with per-lane states.

A state is a tuple of blocks: (value,) for sum, prod, amax and amin, (mean, M2) for moments, where
M2 is the sum of squares around the mean. States of moments are merged by Chan's rule, so no step
ever subtracts two large sums. Within a loop a sum in fp32 also carries what rounding has taken from
it (Kahan): loops wait for memory, and hundreds of additions in a row would cost digits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strop.codegen.triton_text import TYPES, Printer, Tile, TileValue, number
from strop.ir.loops import Load, LoopKernel, Reduce, Stmt, Store, outs_of, spaces

# Reductions that Triton does not have: its tl.max and tl.min drop NaN.
HELPERS = {
    "prod": ("times", "a * b"),
    "amax": ("larger", "tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)"),
    "amin": ("smaller", "tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)"),
}


def identity(kind: str, dtype: torch.dtype) -> str:
    """Return the value that changes nothing."""
    if kind in ("sum", "moments"):
        return "0.0" if dtype.is_floating_point else "0"
    if kind == "prod":
        return "1.0" if dtype.is_floating_point else "1"
    if dtype.is_floating_point:
        return number(float("-inf" if kind == "amax" else "inf"))
    if dtype == torch.bool:
        return "False" if kind == "amax" else "True"
    limits = torch.iinfo(dtype)
    return str(limits.min if kind == "amax" else limits.max)


def across(kind: str, block: str, axis: int) -> str:
    """Print one reduction of a block along an axis, which stays with size 1."""
    if kind in HELPERS:
        return f"tl.reduce({block}, {axis}, {HELPERS[kind][0]}, keep_dims=True)"
    return f"tl.sum({block}, axis={axis}, keep_dims=True)"


def state_names(stmt: Reduce, stage: str = "") -> tuple[str, ...]:
    """Return names of the blocks of a state; a stage tells states of different shapes apart."""
    first = stmt.outs[0] + stage
    return (f"{first}_mean", f"{first}_m2") if stmt.kind == "moments" else (f"{first}_{stmt.kind}",)


def operand(printer: Printer, stmt: Reduce, tile: Tile) -> str:
    """Return the argument in the type of the reduction, spread over the whole tile."""
    value = printer.values[stmt.arg]
    text = value.text if value.dtype == stmt.dtype else f"{value.text}.to({TYPES[stmt.dtype]})"
    full = frozenset(tile.shape)
    return text if value.dims == full else f"tl.broadcast_to({text}, {tile.block(full)})"


def in_registers(
    printer: Printer, stmt: Reduce, operands: Sequence[tuple[str, str]], count: str
) -> None:
    """Reduce the blocks that together hold each row: mean first, then squares.

    ``operands``: the text of each block, and its mask if it has one.
    """
    dims = frozenset("r")
    empty = identity(stmt.kind, stmt.dtype)

    def masked(text: str, mask: str) -> str:
        return f"tl.where({mask}, {text}, {empty})" if mask else text

    def total(kind: str, blocks: Sequence[str]) -> str:
        """Join blocks lane by lane, so that programs meet once."""
        together = blocks[0]
        for place, block in enumerate(blocks[1:]):
            last = place == len(blocks) - 2
            name = f"{stmt.outs[0]}_{kind}{'' if last else place}"
            printer.out.add(f"{name} = {combine(kind, together, block)}")
            together = name
        return across(kind, together, 1)

    blocks = [masked(x, mask) for x, mask in operands]
    if stmt.kind != "moments":
        printer.define(stmt.outs[0], total(stmt.kind, blocks), dims, stmt.dtype)
        return
    mean, var = stmt.outs
    text = printer.quotient(total("sum", blocks), count, stmt.dtype)
    printer.define(mean, text, dims, stmt.dtype)
    squares = []
    for place, (x, mask) in enumerate(operands):
        diff = f"{mean}_diff{place or ''}"
        printer.out.add(f"{diff} = {masked(f'{x} - {mean}', mask)}")
        squares.append(f"{diff} * {diff}")
    mean_squares = total("squares", squares) if len(squares) > 1 else across("sum", squares[0], 1)
    printer.define(var, printer.quotient(mean_squares, count, stmt.dtype), dims, stmt.dtype)


def in_block(printer: Printer, stmt: Reduce, tile: Tile, count: str) -> None:
    """Reduce a whole tile to one number: mean first, then squares."""
    x = operand(printer, stmt, tile)
    mask = " & ".join(tile.mask(tile.shape))

    def masked(text: str) -> str:
        return f"tl.where({mask}, {text}, {identity(stmt.kind, stmt.dtype)})"

    def total(text: str) -> str:
        if stmt.kind in HELPERS:
            return f"tl.reduce(tl.reshape({text}, [ROWS * COLS]), 0, {HELPERS[stmt.kind][0]})"
        return f"tl.sum({text})"

    if stmt.kind != "moments":
        printer.define(stmt.outs[0], total(masked(x)), frozenset(), stmt.dtype)
        return
    mean, var = stmt.outs
    text = printer.quotient(total(masked(x)), count, stmt.dtype)
    printer.define(mean, text, frozenset(), stmt.dtype)
    printer.out.add(f"{mean}_diff = {masked(f'{x} - {mean}')}")
    squares = total(f"{mean}_diff * {mean}_diff")
    printer.define(var, printer.quotient(squares, count, stmt.dtype), frozenset(), stmt.dtype)


def combine(kind: str, left: str, right: str) -> str:
    """Combine two blocks of one-value states into one."""
    return f"{HELPERS[kind][0]}({left}, {right})" if kind in HELPERS else f"{left} + {right}"


def start(printer: Printer, stmt: Reduce, tile: Tile, stage: str = "") -> None:
    """Print the running blocks before a loop."""
    block = tile.block(tile.shape)
    for name in state_names(stmt, stage):
        first = identity(stmt.kind, stmt.dtype)
        printer.out.add(f"{name} = tl.full({block}, {first}, {TYPES[stmt.dtype]})")
    if is_compensated(stmt) and not stage:
        lost = f"{state_names(stmt)[0]}_lost"
        printer.out.add(f"{lost} = tl.full({block}, 0.0, {TYPES[stmt.dtype]})")


def is_compensated(stmt: Reduce) -> bool:
    return stmt.kind == "sum" and stmt.dtype == torch.float32


def settle(printer: Printer, stmt: Reduce) -> None:
    """Print, after a loop, the step that gives back once what rounding has taken."""
    if is_compensated(stmt):
        (name,) = state_names(stmt)
        printer.out.add(f"{name} -= {name}_lost")


def _add_compensated(printer: Printer, name: str, x: str) -> None:
    add = printer.out.add
    add(f"{name}_next = {x} - {name}_lost")
    add(f"{name}_new = {name} + {name}_next")
    add(f"{name}_lost = ({name}_new - {name}) - {name}_next")
    add(f'{name}_lost = tl.where(tl.abs({name}_lost) < float("inf"), {name}_lost, 0.0)')
    add(f"{name} = {name}_new")


def step_weight(printer: Printer, stmts: list[Reduce], base: str, size: str) -> None:
    """Print the weight of one loop step in a running mean: 1 / (steps so far)."""
    dtypes = {stmt.dtype for stmt in stmts if stmt.kind == "moments"}
    if dtypes:
        printer.out.add(f"step = {base} // {size} + 1")
    for dtype in sorted(dtypes, key=str):
        printer.out.add(f"weight{_bits(dtype)} = 1.0 / step.to({TYPES[dtype]})")


def _bits(dtype: torch.dtype) -> str:
    return "64" if dtype == torch.float64 else ""


def update(printer: Printer, stmt: Reduce, tile: Tile) -> None:
    """Take one tile into the running blocks; every lane has seen as many steps as the others."""
    x = operand(printer, stmt, tile)
    mask = " & ".join(tile.mask(tile.shape))
    names = state_names(stmt)

    def masked(text: str) -> str:
        return f"tl.where({mask}, {text}, {identity(stmt.kind, stmt.dtype)})" if mask else text

    add = printer.out.add
    if stmt.kind == "moments":
        (mean, m2), weight = names, f"weight{_bits(stmt.dtype)}"
        add(f"{stmt.outs[0]}_diff = {masked(f'{x} - {mean}')}")
        add(f"{mean} += {stmt.outs[0]}_diff * {weight}")
        add(f"{m2} += {stmt.outs[0]}_diff * {stmt.outs[0]}_diff * (1.0 - {weight})")
    elif is_compensated(stmt):
        _add_compensated(printer, names[0], masked(x))
    else:
        add(f"{names[0]} = {combine(stmt.kind, names[0], masked(x))}")


def fold(
    printer: Printer, stmt: Reduce, axis: int, count: str, total: str, stage: str = ""
) -> None:
    """Merge a block of states along an axis. ``count``: elements behind each state."""
    add = printer.out.add
    names = state_names(stmt, stage)
    if stmt.kind != "moments":
        add(f"{names[0]} = {across(stmt.kind, names[0], axis)}")
        return
    mean, m2 = names
    weighted = across("sum", f"{mean} * {count}", axis)
    add(f"{mean}_all = {printer.quotient(weighted, total, stmt.dtype)}")
    add(f"{mean}_diff = {mean} - {mean}_all")
    squares = f"{m2} + {count} * {mean}_diff * {mean}_diff"
    add(f"{m2} = {across('sum', squares, axis)}")
    add(f"{mean} = {mean}_all")


def finish(
    printer: Printer, stmt: Reduce, total: str, dims: frozenset[str], stage: str = ""
) -> None:
    """Print the results from a state that stands for everything."""
    names = state_names(stmt, stage)
    printer.values[stmt.outs[0]] = TileValue(names[0], dims, stmt.dtype)
    if stmt.kind == "moments":
        text = printer.quotient(names[1], total, stmt.dtype)
        printer.define(stmt.outs[1], text, dims, stmt.dtype)


def places_last(kernel: LoopKernel) -> list[Stmt]:
    """Return the body of a loop over reduced rows; what a step can load at once comes before it
    waits for a place that is looked up."""
    body = list(kernel.body)
    if any(isinstance(stmt, Load) and stmt.lookups for stmt in body):
        body.sort(key=lambda s: not isinstance(s, Load) or bool(s.guard or s.lookups))
    return body


def without_reduced(kernel: LoopKernel) -> list[Stmt]:
    """Return statements of the body that are the same for all reduced rows."""
    space, reduced = spaces(kernel), {axis.name for axis in kernel.rows if axis.reduced}
    return [
        stmt
        for stmt in kernel.body
        if not isinstance(stmt, Reduce | Store)
        and not any(space[out] & reduced for out in outs_of(stmt))
    ]

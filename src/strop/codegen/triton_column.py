"""Print the COLUMN schedule: reductions over many rows by programs that split them between each
other.

Every program owns one slab of rows and keeps a running state in each lane, so that its loads are
contiguous whatever the groups are. Where none is kept, an inner axis of known size is lanes
(``lanes``); else all axes are one line, whose slabs begin at whole cache lines. The program then
folds its lanes to the kept cols and leaves the result in scratch. The program that arrives last
merges all slabs in a fixed order and runs the tail: deterministic, no atomics on floats, and no
program ever waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from strop.codegen.effort import effort_of
from strop.codegen.lanes import with_lanes
from strop.codegen.triton_reduce import (
    combine,
    finish,
    fold,
    identity,
    places_last,
    settle,
    start,
    state_names,
    step_weight,
    update,
    without_reduced,
)
from strop.codegen.triton_text import (
    ALIGNED,
    NO_LIMIT,
    TYPES,
    Flat,
    Form,
    Printer,
    Tile,
    next_power_of_two,
)
from strop.errors import UnsupportedError
from strop.ir.dims import Expr, const, product, symbol
from strop.ir.loops import (
    MAX_LANES,
    Axis,
    Index,
    Load,
    LoopKernel,
    Reduce,
    Stmt,
    args_of,
    outs_of,
)
from strop.ir.source import Effort, Scratch, Split

STAGED_BYTES = 16 * 1024  # above this a pipeline, which holds two tiles more, is not worth its room
MAX_ELEMENTS = 32  # of a tile, for each thread
# This is the ceiling for a thread. Without one ptxas aims at an occupancy of its own choice and
# spills for it: 8 bytes in 6 kernels that then used 72 to 96 registers.
MAX_REGISTERS = 255


@dataclass(frozen=True, slots=True)
class Tiling:
    """Hold the sizes of a tiling. ``tile_bytes``: what the loads of a tile read together.
    ``stages``: of the software pipeline; with one tile at a time the loop waits for memory.
    ``steps``: of the loop, below which a slab is not worth a program. ``merge_elements`` and
    ``merged``: of states that are merged at once, in all and of programs."""

    tile_bytes: int
    num_warps: int
    stages: int
    steps: int
    merge_elements: int
    merged: int


# Statistics of groups between convolutions, us of a block (on an H100; see the log of 2026-11-24):
# 2 x 64 x 64 x 640 took 117.9 by the tiling of others, by its own 104.7; 64 x 64 x 320
# beside another picture 49.2 and 43.5. Merged at once, 66 programs need no second pass of 64.
# A tile behind several loads has few rows, which is what more stages are for.
TILING = Tiling(8 << 10, 4, 3, 8, 4 << 10, 64)
TILING_OF_GROUPS = Tiling(16 << 10, 8, 3, 4, 8 << 10, 256)
TILING_OF_GROUPS_OF_SEVERAL = Tiling(8 << 10, 8, 5, 8, 8 << 10, 256)
# A single kept number leaves no cols to share, so programs take two steps each, and a MB keeps half
# of an H100's multiprocessors busy. Their states are single numbers, and all are merged at once:
# each pass over some of them is a trip to memory.
TILING_OF_ONE = Tiling(8 << 10, 4, 3, 2, 2 << 10, 1024)
# A load of a looked-up place waits for the place, step by step. A pipeline would copy places to
# shared memory before it can know where the next loads are, so it has more in each step.
TILING_OF_LOOKUPS = Tiling(16 << 10, 8, 1, 1, 2 << 10, 1024)
ALIGNED_SLAB = 64  # elements: slabs of one line begin where 128 bytes of fp16 do
BLOCKED_COLS = 256  # of a tile when the cols are not known
# A tile has so many cols when all are kept: 128 bytes of fp16 a row, and enough programs without
# cutting few rows into slabs, which costs a second pass. With 256 columns in one tile the last
# program merges few states at once, each time a trip to memory: two sums over 8 x 256 x 56 x 56
# took 50 us on an H200, and 17 so (the log of 2026-12-01 on sums over pictures).
NARROW_COLS = 64
# Only the cols make programs where the reduced rows are few, for each of some others: a mean of
# 7x7 pixels took 3.1 us on an H100 in 32 programs of 64 cols, and Inductor's 2.3 in 64 of 32.
FEW_ROWS, FEW_ROWS_COLS = 64, 32
MOST_STEPS = 24  # of statistics of groups, above which two programs share a multiprocessor


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    grid: Expr
    num_warps: int
    scratch: tuple[tuple[str, Scratch], ...]
    split: Split
    effort: Effort


class _Column:
    def __init__(self, printer: Printer, most: int | None) -> None:
        kernel = printer.kernel = with_lanes(printer.kernel)
        self.printer, self.has_few_rows = printer, most is not None
        self.add = printer.out.add
        self.parallel = tuple(axis for axis in kernel.rows if not axis.reduced)
        self.rows = tuple(axis for axis in kernel.rows if axis.reduced)
        self.kept = tuple(axis for axis in kernel.cols if not axis.reduced)
        self.lanes = tuple(axis for axis in kernel.cols if axis.reduced)
        self.num_rows = product(axis.size for axis in self.rows)
        self.num_parallel = product(axis.size for axis in self.parallel)
        self.num_kept = product(axis.size for axis in self.kept)
        self.per_kept = product(axis.size for axis in self.lanes)
        self.reductions = [stmt for stmt in kernel.body if isinstance(stmt, Reduce)]
        self.moments = any(stmt.kind == "moments" for stmt in self.reductions)
        self.is_line = kernel.num_cols == const(1)
        self.looks_up = any(isinstance(stmt, Load) and stmt.lookups for stmt in kernel.body)
        self.tiling = self._tiling()
        self.cols = self._cols_tile()
        self.col_tiles = (kernel.num_cols + (self.cols - 1)) // self.cols
        most = MAX_ELEMENTS * 32 * self.tiling.num_warps
        elements = min(most, self.tiling.tile_bytes // max(self._load_bytes(), 1))
        self.tile_rows = 1 << max((elements // self.cols).bit_length() - 1, 0)
        tile_bytes = self.tile_rows * self.cols * self._load_bytes()
        self.is_pipelined = self.tiling.stages > 1 and tile_bytes <= STAGED_BYTES
        self.par = Flat("par", self.parallel, "", wide=True)

    def _cols_tile(self) -> int:
        num_cols = self.printer.kernel.num_cols
        if num_cols.is_const and num_cols.value <= (MAX_LANES if self.lanes else BLOCKED_COLS):
            whole = next_power_of_two(num_cols.value)
            return whole if self.lanes or self.has_few_rows else min(whole, NARROW_COLS)
        if num_cols.is_const and not self.lanes:
            return FEW_ROWS_COLS if self.has_few_rows else NARROW_COLS
        if self.lanes:
            raise UnsupportedError(
                f"{self.printer.kernel.name}: {num_cols} cols, some of them reduced, do not fit "
                f"in one tile of {MAX_LANES}"
            )
        return BLOCKED_COLS

    def _loads(self) -> list[Load]:
        """Return the loop's loads of what is read from memory for each element of the tile. A
        group's statistics or a token's number, which many neighbours share, come from the
        cache."""
        kernel = self.printer.kernel
        reduced = {axis.name for axis in self.rows}
        along = {axis.name for axis in (self.rows if self.is_line else kernel.cols)[-1:]}
        return [
            stmt
            for stmt in kernel.body
            if isinstance(stmt, Load)
            and (stmt.lookups or stmt.index.axes & reduced)
            and along <= stmt.index.axes
        ]

    def _load_bytes(self) -> int:
        """Return the bytes that are loaded for one element of the tile."""
        return sum(self.printer.kernel.params[load.param].dtype.itemsize for load in self._loads())

    def _tiling(self) -> Tiling:
        if self.num_kept == const(1):
            return TILING_OF_LOOKUPS if self.looks_up else TILING_OF_ONE
        if not self.lanes:
            return TILING
        return TILING_OF_GROUPS_OF_SEVERAL if len(self._loads()) > 1 else TILING_OF_GROUPS

    @property
    def is_blocked(self) -> bool:
        return self.col_tiles != const(1)

    def text(self, size: Expr | int) -> str:
        return self.printer.scalars.text(size)

    def buffer(self, stem: str, dtype: torch.dtype) -> str:
        return stem if dtype == torch.float32 else f"{stem}_{TYPES[dtype][3:]}"

    def dtypes(self) -> list[torch.dtype]:
        return sorted({stmt.dtype for stmt in self.reductions}, key=str)

    def slots(self, dtype: torch.dtype, stage: str = "") -> list[tuple[Reduce, str]]:
        """Return the state blocks that one scratch buffer holds, in order."""
        return [
            (stmt, name)
            for stmt in self.reductions
            if stmt.dtype == dtype
            for name in state_names(stmt, stage)
        ]

    def scratch(self) -> tuple[tuple[str, Scratch], ...]:
        symbolic = self.printer.scalars.symbolic
        owners = symbolic(self.num_parallel) * symbol("splits")
        buffers = []
        for dtype in self.dtypes():
            numel = owners * symbolic(self.num_kept) * len(self.slots(dtype))
            buffers.append((self.buffer("partials", dtype), Scratch(dtype, numel)))
        groups = symbolic(self.num_parallel) * symbolic(self.col_tiles)
        buffers.append(("arrivals", Scratch(torch.int32, groups, zeroed=True)))
        return tuple(buffers)


def forms(kernel: LoopKernel) -> Iterator[Form]:
    """Yield the form for few rows, where their number is not known, or that of one line for as many
    elements as are whole vectors."""
    rows = product(axis.size for axis in kernel.rows if axis.reduced)
    is_wide = kernel.num_cols.is_const and kernel.num_cols.value > BLOCKED_COLS
    is_for_each = any(not axis.reduced for axis in kernel.rows)
    if is_wide and is_for_each and not rows.is_const and not any(a.reduced for a in kernel.cols):
        yield Form(kernel, rows, FEW_ROWS)
    is_line = kernel.num_cols == const(1) and len(kernel.rows) == 1
    if is_line and not rows.is_const and _is_odd(rows):
        eighths = replace(kernel.rows[0], size=symbol("eighths") * ALIGNED)
        meaning = {"eighths": rows // ALIGNED}
        yield Form(replace(kernel, rows=(eighths,)), rows, NO_LIMIT, ALIGNED, meaning)


def column(printer: Printer, most: int | None = None) -> ColumnPlan:
    """Print the kernel, for at most so many reduced rows, and say how it is launched."""
    plan = _Column(printer, most)
    printer.constants.update({"ROWS": plan.tile_rows, "COLS": plan.cols})
    _slab(plan)
    _sweep(plan)
    _publish(plan)
    _finish(plan)
    symbolic = printer.scalars.symbolic
    groups = symbolic(plan.num_parallel) * symbolic(plan.col_tiles)
    most = MOST_STEPS * plan.tile_rows if plan.lanes else 0
    least = plan.tiling.steps * plan.tile_rows
    rows = symbolic(plan.num_rows)
    if plan.num_kept == const(1):  # what counts is elements
        rows, least, most = rows * plan.per_kept, least * plan.per_kept.value, 0
    split = Split(rows, groups, least, most)
    grid = groups * symbol("splits")
    return ColumnPlan(grid, plan.tiling.num_warps, plan.scratch(), split, _effort(plan))


def _effort(plan: _Column) -> Effort:
    """Describe a program's loop. Elements that lie anywhere are not copied ahead of it."""
    runs_ahead = plan.is_pipelined and not (plan.is_line and _is_odd(plan.num_rows))
    sweep = plan.printer.scalars.symbolic(plan.num_rows)
    elements = plan.tile_rows * plan.cols
    ahead = plan.tiling.stages - 1 if runs_ahead else 1
    return effort_of(plan.printer.kernel, elements, sweep, plan.tile_rows, ahead)


def _is_odd(size: Expr) -> bool:
    return not size.is_multiple_of(ALIGNED)


def _slab(plan: _Column) -> None:
    """Print which rows and cols this program owns."""
    add, rows = plan.add, plan.text(plan.num_rows)
    add("program = tl.program_id(0)")
    add("split = program % splits")
    add("group = program // splits")
    if plan.is_blocked:
        tiles = plan.text(plan.col_tiles)
        add(f"par = group // {tiles}")
        add(f"col = group % {tiles} * COLS + tl.arange(0, COLS)[None, :]")
    else:
        add("par = group")
        add("col = tl.arange(0, COLS)[None, :]")
    slab = f"({rows} + splits - 1) // splits"
    if plan.is_line:
        slab = f"({slab} + {ALIGNED_SLAB - 1}) // {ALIGNED_SLAB} * {ALIGNED_SLAB}"
    add(f"slab = {slab}")
    add("begin = split * slab")
    add(f"end = tl.minimum(begin + slab, {rows})")


def _sweep(plan: _Column) -> None:
    """Print the loop over the slab: side outputs and running states."""
    printer, kernel = plan.printer, plan.printer.kernel
    masks = {"r": "row_mask"}
    if not kernel.num_cols.is_multiple_of(plan.cols):
        plan.add(f"col_mask = col < {plan.text(kernel.num_cols)}")
        masks["c"] = "col_mask"
    row, col = Flat("row", plan.rows, "r", wide=True), Flat("col", kernel.cols, "c")
    tile = Tile((plan.par, row, col), {"r": "ROWS", "c": "COLS"}, masks)
    printer.ids(plan.par, kernel.body + kernel.tail)
    printer.ids(col, kernel.body)
    hoisted = without_reduced(kernel)
    for stmt in hoisted:
        printer.statement(stmt, tile)
    for reduction in plan.reductions:
        start(printer, reduction, tile)
    loop = f"tl.range(begin, end, ROWS, num_stages={plan.tiling.stages})"
    with printer.out.block(
        f"for first in {loop if plan.is_pipelined else 'range(begin, end, ROWS)'}:"
    ):
        plan.add("row = first + tl.arange(0, ROWS)[:, None]")
        plan.add("row_mask = row < end")
        printer.ids(row, kernel.body)
        step_weight(printer, plan.reductions, "(first - begin)", "ROWS")
        for stmt in places_last(kernel):
            if isinstance(stmt, Reduce):
                update(printer, stmt, tile)
            elif stmt not in hoisted:
                printer.statement(stmt, tile)
    plan.add("length = tl.maximum(end - begin, 0)")
    if plan.moments:
        plan.add("seen = (length - tl.arange(0, ROWS)[:, None] + ROWS - 1) // ROWS")
    for reduction in plan.reductions:
        settle(printer, reduction)
        fold(printer, reduction, 0, "seen", "tl.maximum(length, 1)")


def _publish(plan: _Column) -> None:
    """Fold lanes to kept cols and leave the slab's states in scratch.

    Groups of any width become the rows of a block by a gather within the program.
    """
    if not plan.lanes:
        with plan.printer.out.block("if splits > 1:"):
            _store_partials(plan, "", "col", "col_mask" if _has_col_mask(plan) else "")
        return
    printer, add = plan.printer, plan.add
    num_kept, per_kept = plan.num_kept.value, plan.per_kept.value
    printer.constants["KEPT"] = next_power_of_two(num_kept)
    if num_kept == 1:
        _publish_one(plan)
        return
    printer.constants["LANES"] = next_power_of_two(per_kept)
    add("own = tl.arange(0, KEPT)[:, None]")
    add("lane = tl.arange(0, LANES)[None, :]")
    add(f"is_lane = (own < {num_kept}) & (lane < {per_kept})")
    if plan.moments:
        add("lane_count = tl.where(is_lane, length, 0)")
    index = _lane_index(plan.kept + plan.lanes, printer.kernel.cols)
    flats = (Flat("own", plan.kept, "r"), Flat("lane", plan.lanes, "c"))
    for flat in flats:
        printer.ids_of(flat, [index])
    terms, _ = printer.terms(index, Tile(flats, {"r": "KEPT", "c": "LANES"}, {}))
    add(f"place = tl.where(is_lane, {' + '.join(terms) or 'own + lane'}, 0)")
    add("place = tl.reshape(place, [KEPT * LANES])")
    for stmt in plan.reductions:
        empty = identity(stmt.kind, stmt.dtype)
        for lanes, own in zip(state_names(stmt), state_names(stmt, "_own"), strict=True):
            add(f"{own} = tl.gather(tl.reshape({lanes}, [COLS]), place, 0)")
            add(f"{own} = tl.where(is_lane, tl.reshape({own}, [KEPT, LANES]), {empty})")
        fold(printer, stmt, 1, "lane_count", f"tl.maximum(length * {per_kept}, 1)", "_own")
    is_padded = num_kept != next_power_of_two(num_kept)
    _store_partials(plan, "_own", "own", f"own < {num_kept}" if is_padded else "")


def _publish_one(plan: _Column) -> None:
    """Fold all lanes to one number."""
    if plan.moments:
        masked = "tl.where(col_mask, length, 0)" if _has_col_mask(plan) else "length"
        plan.add(f"lane_count = {masked}")
    for stmt in plan.reductions:
        total = f"tl.maximum(length * {plan.text(plan.per_kept)}, 1)"
        fold(plan.printer, stmt, 1, "lane_count", total)
    plan.add("own = tl.arange(0, KEPT)[:, None]")
    _store_partials(plan, "", "own", "")


def _has_col_mask(plan: _Column) -> bool:
    return not plan.printer.kernel.num_cols.is_multiple_of(plan.cols)


def _lane_index(axes: tuple[Axis, ...], cols: tuple[Axis, ...]) -> Index:
    """Return where a (kept, reduced) pair of ids lies among the flattened cols."""
    strides, stride = {}, const(1)
    for axis in reversed(cols):
        strides[axis.name] = stride
        stride = stride * axis.size
    return Index(const(0), tuple((axis.name, strides[axis.name]) for axis in axes))


def _store_partials(plan: _Column, stage: str, at: str, mask: str) -> None:
    kept, tail = plan.text(plan.num_kept), f", mask={mask}" if mask else ""
    for dtype in plan.dtypes():
        slots, partials = plan.slots(dtype, stage), plan.buffer("partials", dtype)
        plan.add(
            f"own_{partials} = {partials} + (par * splits + split) * {_times(len(slots), kept)}"
        )
        for slot, (_, name) in enumerate(slots):
            plan.add(f"tl.store(own_{partials} + {_times(slot, kept)} + {at}, {name}{tail})")


def _times(n: int, size: str) -> str:
    return str(n * int(size)) if size.isdigit() else f"{n} * {size}"


def _finish(plan: _Column) -> None:
    """Print how the program that arrives last merges the slabs and runs the tail."""
    add, block = plan.add, plan.printer.out.block
    arrive = 'tl.atomic_add(arrivals + group, 1, sem="acq_rel", scope="gpu")'
    if plan.lanes:
        add("tl.debug_barrier()")
        add(f"arrived = {arrive}")
    else:
        add("is_last = splits == 1")
        with block("if splits > 1:"):
            add("tl.debug_barrier()")
            add(f"is_last = {arrive} == splits - 1")
    with block("if arrived == splits - 1:" if plan.lanes else "if is_last:"):
        add("tl.store(arrivals + group, 0)")
        if plan.lanes:
            kept_tile = next_power_of_two(plan.num_kept.value)
            masked = kept_tile != plan.num_kept.value
            add("kept = tl.arange(0, KEPT)[None, :]")
        else:
            kept_tile, masked = plan.cols, _has_col_mask(plan)
            plan.printer.constants["KEPT"] = plan.cols
            add("kept = col")
        merged = max(plan.tiling.merge_elements // kept_tile, 1)
        plan.printer.constants["SPLITS"] = min(merged, plan.tiling.merged)
        if masked:
            add(f"kept_mask = kept < {plan.text(plan.num_kept)}")
        _merge(plan, masked)
        _tail(plan, masked)


def _merge(plan: _Column, masked: bool) -> None:
    """Print the merge of the states of all slabs into one. A program that is alone with its cols
    has it already, which saves a trip to memory and back."""
    printer, add = plan.printer, plan.add
    tile = Tile((), {"r": "1", "c": "KEPT"}, {})
    for stmt in plan.reductions:
        start(printer, stmt, tile, "_total")
    if plan.lanes:
        _merge_slabs(plan, masked)
    else:
        with printer.out.block("if splits > 1:"):
            _merge_slabs(plan, masked)
        with printer.out.block("else:"):
            for stmt in plan.reductions:
                names = zip(state_names(stmt, "_total"), state_names(stmt), strict=True)
                for total, own in names:
                    add(f"{total} = {own}")
    count = plan.text(plan.num_rows * plan.per_kept) if plan.moments else ""
    for stmt in plan.reductions:
        finish(printer, stmt, count, frozenset("c"), "_total")


def _merge_slabs(plan: _Column, masked: bool) -> None:
    """Print the merge of a few slabs at a time, always in the same order."""
    printer, add = plan.printer, plan.add
    if plan.moments:
        add("total_count = tl.full([1, KEPT], 0, tl.int32)")
    with printer.out.block("for at in range(0, splits, SPLITS):"):
        _parts(plan, masked)
        for stmt in plan.reductions:
            for which, name in enumerate(state_names(stmt, "_part")):
                add(f"{name} = {_part(plan, stmt, which)}")
        for stmt in plan.reductions:
            fold(printer, stmt, 0, "count", "tl.maximum(part_count, 1)", "_part")
            _merge_state(plan, stmt)
        if plan.moments:
            add("total_count = merged_count")


def _merge_state(plan: _Column, stmt: Reduce) -> None:
    """Print Chan's rule for two states of moments, or the plain operation for the others."""
    part, total = state_names(stmt, "_part"), state_names(stmt, "_total")
    if stmt.kind != "moments":
        plan.add(f"{total[0]} = {combine(stmt.kind, total[0], part[0])}")
        return
    delta, share = f"{stmt.outs[0]}_delta", f"{stmt.outs[0]}_share"
    plan.add(f"{delta} = {part[0]} - {total[0]}")
    plan.add(f"{share} = {delta} * part_count / tl.maximum(merged_count, 1)")
    plan.add(f"{total[0]} += {share}")
    plan.add(f"{total[1]} += {part[1]} + {delta} * {share} * total_count")


def _parts(plan: _Column, masked: bool) -> None:
    """Print the ids of a few slabs, and how many elements each of them saw."""
    add, rows = plan.add, plan.text(plan.num_rows)
    add("part = at + tl.arange(0, SPLITS)[:, None]")
    add("part_mask = " + ("(part < splits) & kept_mask" if masked else "part < splits"))
    kept = plan.text(plan.num_kept)
    for dtype in plan.dtypes():
        partials, slots = plan.buffer("partials", dtype), len(plan.slots(dtype))
        state = f"(par * splits + part) * {_times(slots, kept)}"
        add(f"every_{partials} = {partials} + {state} + kept")
    if plan.moments:
        seen = f"tl.minimum(tl.maximum({rows} - part * slab, 0), slab)"
        add(f"count = tl.where(part < splits, {seen} * {plan.text(plan.per_kept)}, 0)")
        add("part_count = tl.sum(count, axis=0, keep_dims=True)")
        add("merged_count = total_count + part_count")


def _part(plan: _Column, stmt: Reduce, which: int) -> str:
    """Load one state block of several slabs. It comes past the L1 cache, because other programs
    wrote it."""
    slots = plan.slots(stmt.dtype, "_total")
    slot = slots.index((stmt, state_names(stmt, "_total")[which]))
    at = f"every_{plan.buffer('partials', stmt.dtype)} + {_times(slot, plan.text(plan.num_kept))}"
    other = identity(stmt.kind, stmt.dtype)
    return f'tl.load({at}, mask=part_mask, other={other}, cache_modifier=".cg")'


def _tail(plan: _Column, masked: bool) -> None:
    printer, kernel = plan.printer, plan.printer.kernel
    kept = Flat("kept", plan.kept, "c")
    tile = Tile((plan.par, kept), {"r": "1", "c": "KEPT"}, {"c": "kept_mask"} if masked else {})
    again = _needed_again(plan)
    printer.ids(kept, (*again, *kernel.tail))
    for stmt in again:
        printer.statement(stmt, tile, prefix="tail_")
    for stmt in kernel.tail:
        printer.statement(stmt, tile)


def _needed_again(plan: _Column) -> list[Stmt]:
    """Return statements of the body that the tail uses: they are printed again for the tail's
    tile."""
    kernel = plan.printer.kernel
    reduced = {out for stmt in plan.reductions for out in stmt.outs}
    needed = {arg for stmt in kernel.tail for arg in args_of(stmt)} - reduced
    chosen: list[Stmt] = []
    for stmt in reversed(kernel.body):
        if not isinstance(stmt, Reduce) and needed & set(outs_of(stmt)):
            chosen.append(stmt)
            needed |= set(args_of(stmt))
    return chosen[::-1]

"""Print ROW and COLUMN reductions in C++.

Sums of floats run in fp64 under ``omp simd``, so that they are exact but for their last rounding.
Softmax's, of positive numbers in a row buffer, take eight of them together in fp32 first.
Moments are sums of x - x0 and of their squares, x0 being the first element: n elements among which
x0 is have it at most sqrt(n) deviations from their mean, so the squares lose log2(n) of 53 bits.
A ROW kernel sweeps its row once for each reduction level. A COLUMN kernel keeps one accumulator a
col through a chunk of rows, folds the reduced cols, and merges the chunks in order. With one col
only, a reduction of everything, a chunk is swept like a row instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from strop.codegen import cpp_kept_rows, nest
from strop.codegen.cpp_loops import HEAVY_FROM, Loops
from strop.codegen.cpp_text import OMP_REDUCTIONS, TYPES, combine, identity, scalar_type
from strop.ir.dims import product
from strop.ir.loops import Apply, Index, Load, Reduce, Stmt, Store, outs_of
from strop.ir.ops import compute_dtype
from strop.ir.source import Scratch

CHUNK_ROWS = (32, 1024)  # fewest and most reduced rows in a chunk of a COLUMN kernel
NUM_CHUNKS = 32  # chunks wanted for each reduction of a COLUMN kernel
LANE_CHUNK_ROWS = (4096, 65536)  # the same where a chunk is swept like a row
# Numbers added at once, a register in fp64: g++ would take two, whose end is most of a short row.
SUM_LANES, _FLOAT_SUM = 8, ("sum", "double")
TOGETHER = 8  # rows whose moments a COLUMN kernel adds up in registers


def total_type(stmt: Reduce) -> str:
    """Return the type that a reduction runs in."""
    is_sum = stmt.kind in ("sum", "prod", "moments", "powers") and stmt.dtype.is_floating_point
    return "double" if is_sum else scalar_type(stmt.dtype)


@dataclass(frozen=True, slots=True)
class Part:
    """Print one running result of a sweep over a row.

    Moments have two, each the sum of an expression: "mean" (x - x0) and "squares" ((x - x0)^2).
    """

    stmt: Reduce
    stage: str  # "all" for other reductions

    @property
    def out(self) -> str:
        return self.stmt.outs[1 if self.stage == "squares" else 0]

    @property
    def kind(self) -> str:
        return {"moments": "sum", "powers": "sum", "top": "amax"}.get(
            self.stmt.kind, self.stmt.kind
        )

    @property
    def scalar(self) -> str:
        return total_type(self.stmt)

    @property
    def finds_nan(self) -> bool:
        """Tell whether extremes are found as if there were no NaN, which takes one instruction,
        while a flag tells of NaN."""
        return self.stmt.kind in ("amax", "amin") and self.stmt.dtype.is_floating_point

    @property
    def clause(self) -> str:
        nan = f" reduction(|:nan_{self.out})" if self.finds_nan else ""
        return f" reduction({OMP_REDUCTIONS[self.kind]}:total_{self.out}){nan}"

    def declare(self) -> list[str]:
        text = f"{self.scalar} total_{self.out} = {identity(self.kind, self.scalar)};"
        return [text, f"int nan_{self.out} = 0;"] if self.finds_nan else [text]

    def step(self) -> list[str]:
        value, total = self.stmt.arg, f"total_{self.out}"
        if self.finds_nan or self.stmt.kind == "top":
            order = ">" if self.kind == "amax" else "<"
            best = f"{total} = {value} {order} {total} ? {value} : {total};"
            return [best, f"nan_{self.out} |= {value} != {value};"] if self.finds_nan else [best]
        if self.stage in ("mean", "squares"):
            value = f"({value} - first_{self.stmt.outs[0]})"
        if self.stage == "squares":
            value = f"{value} * {value}"
        return [combine(self.kind, self.scalar, total, value)]

    @property
    def total(self) -> str:
        """Return what the sweep has found."""
        total = f"total_{self.out}"
        return f"sp::or_nan(!nan_{self.out}, {total})" if self.finds_nan else total

    def result(self, count: str) -> list[str]:
        total, mean = self.total, self.stmt.outs[0]
        if self.stage == "mean":
            total = f"first_{mean} + {total} / {count}"
        elif self.stage == "squares":
            off = f"total_{mean} / {count}"
            total = f"sp::max({total} / {count} - {off} * ({off}), 0.0)"  # NaN stays
        scalar, results = scalar_type(self.stmt.dtype), [(self.out, total)]
        if self.stmt.kind == "powers":
            results.append((self.stmt.outs[1], f"1 / {total}"))
        return [f"const {scalar} {n} = static_cast<{scalar}>({value});" for n, value in results]


def parts_of(reduces: Iterable[Reduce]) -> list[Part]:
    return [
        Part(stmt, stage)
        for stmt in reduces
        for stage in (("mean", "squares") if stmt.kind == "moments" else ("all",))
    ]


def moments_of(reduces: Iterable[Reduce]) -> list[Reduce]:
    return [stmt for stmt in reduces if stmt.kind == "moments"]


def declare_firsts(loops: Loops, moments: Sequence[Reduce]) -> None:
    for stmt in moments:
        loops.out(f"double first_{stmt.outs[0]} = 0;")


def set_firsts(loops: Loops, moments: Sequence[Reduce]) -> None:
    for stmt in moments:
        loops.out(f"first_{stmt.outs[0]} = {stmt.arg};")


class RowSweeps:
    """Print the sweeps over the cols of one row."""

    def __init__(self, loops: Loops) -> None:
        self.loops = loops
        self.plan = nest.plan_sweeps(loops.kernel, loops.outside, loops.col_stores())
        first = len(loops.staged)
        self.kept = {value: f"t{first + i}" for i, value in enumerate(self.plan.kept)}
        self.result_row = self._result_row()

    def _result_row(self) -> Store | None:
        """Return the store of the last sweep whose row holds the kept value until then, which saves
        the caches a third row; the store of that very value, if there is one.

        Where a result is an argument that is written in place, its element is gone by then. It is
        loaded at the place of the store if at all (``mutation``), so nothing may be loaded there.
        """
        loops, sweeps = self.loops, self.plan.sweeps
        keeping = next((n for n, sweep in enumerate(sweeps) if sweep.keeps), len(sweeps))
        later = {
            stmt.index
            for sweep in sweeps[keeping + 1 :]
            for stmt in sweep.stmts
            if isinstance(stmt, Load)
        }
        kept = next(
            (s.dtype for s in loops.kernel.body if isinstance(s, Apply) and s.out in self.kept),
            None,
        )
        if len(self.kept) != 1 or kept is None or compute_dtype(kept) is not kept:
            return None
        stores = [s for s in loops.kernel.body if isinstance(s, Store)]
        fit = [
            s
            for s in sweeps[-1].stores
            if loops.is_flat
            and nest.lane_stride(s.index, loops.kernel.cols) == nest.ONE
            and loops.kernel.params[s.param].dtype == kept
            and s.index not in later
            and sum(other.param == s.param for other in stores) == 1
        ]
        return min(fit, key=lambda s: s.value not in self.kept, default=None)

    def _is_done(self, store: Store) -> bool:
        """Tell whether the sweep that keeps a value has stored it where the result is."""
        return store is self.result_row and store.value in self.kept

    def declare_buffers(self) -> None:
        if self.result_row is not None:
            return
        for stmt in self.loops.kernel.body:
            for out in set(outs_of(stmt)) & set(self.kept):
                assert not isinstance(stmt, Store)
                self.loops.row_buffer(self.kept[out], scalar_type(stmt.dtype))

    def print_row(self) -> None:
        self.find_result_row()
        for place in range(len(self.plan.sweeps)):
            self.print_sweep(place)

    def find_result_row(self) -> None:
        if (row := self.result_row) is not None:
            scalar, (name,) = TYPES[self.loops.kernel.params[row.param].dtype], self.kept.values()
            start = self._row_start(row.index)
            self.loops.out(f"{scalar}* const {name} = p{row.param} + {start};")

    def print_sweep(self, place: int) -> None:
        """Print a sweep, and the values of the row that can be computed behind it."""
        sweeps, sweep = self.plan.sweeps, self.plan.sweeps[place]
        if place == 0:
            self._row_values(0)
        if sweep.reduces or sweep.cut or not all(map(self._is_done, sweep.stores)):
            self._sweep(sweep)
        if place + 1 == len(sweeps) or sweeps[place + 1].level > sweep.level:
            self._row_values(sweep.level + 1)

    def _row_values(self, level: int) -> None:
        """Print the row values that need ``level`` reductions in sequence."""

        def level_of(stmt: Stmt) -> int:
            names = (stmt.value,) if isinstance(stmt, Store) else outs_of(stmt)
            return max(self.plan.levels[name] for name in names)

        self.loops.row_values(s for s in self.loops.kernel.body if level_of(s) == level)

    def _sweep(self, sweep: nest.Sweep) -> None:
        out, size = self.loops.out, self.loops.scalars(self.loops.kernel.num_cols)
        if row := self._row_for_top(sweep):
            (stmt,) = sweep.reduces
            out(f"const float {stmt.outs[0]} = sp::largest({row}, {size});")
            return
        kernel, is_in_a_row = self.loops.kernel, cpp_kept_rows.is_in_a_row
        buffered = [s for s in sweep.reduces if is_in_a_row(s, sweep.keeps, kernel)]
        others = [s for s in sweep.reduces if s not in buffered]
        self._firsts(sweep, moments_of(others))
        parts = parts_of(others)
        for part in parts:
            out.all(part.declare())
        *outer, innermost = self.loops.col_loops()
        with self.loops.loops(outer):
            self._innermost(sweep, parts, *innermost)
        for stmt in buffered:
            out.all(cpp_kept_rows.totals(stmt, f"{self.kept[stmt.arg]}, {size}"))
        for part in parts_of(sweep.reduces):
            out.all(part.result(size))

    def _row_for_top(self, sweep: nest.Sweep) -> str:
        """Return where the row begins if the sweep only looks for the top of one that lies in
        memory."""
        loops = self.loops
        kinds = [stmt.kind for stmt in sweep.reduces]
        if kinds != ["top"] or len(sweep.stmts) != 1 or sweep.stores or sweep.keeps or sweep.reads:
            return ""
        (load,) = sweep.stmts
        if (
            not isinstance(load, Load)
            or load.guard
            or load.lookups
            or load.out in loops.buffers
            or load.dtype != torch.float32
            or not loops.is_flat
            or loops.kernel.params[load.param].dtype != torch.float32
            or nest.lane_stride(load.index, loops.kernel.cols) != nest.ONE
        ):
            return ""
        return f"p{load.param} + {self._row_start(load.index)}"

    def _row_start(self, index: Index) -> str:
        strides = (term for term in index.strides if term[0] not in self.loops.col_names)
        return self.loops.element(Index(index.offset, tuple(strides)))

    def _firsts(self, sweep: nest.Sweep, moments: Sequence[Reduce]) -> None:
        """Print the first element of each of these, if there is one."""
        loops = self.loops
        if not moments:
            return
        declare_firsts(loops, moments)
        roots = [stmt.arg for stmt in moments]
        known = loops.outside.union(value for value, _ in sweep.reads)
        with loops.loops(
            [(name, f"sp::min<int64_t>({size}, 1)") for name, size in loops.col_loops()]
        ):
            self._read(sweep, nest.needs(loops.kernel.body, roots, known))
            loops.statements(nest.closure(loops.kernel.body, roots, known))
            set_firsts(loops, moments)

    def _read(self, sweep: nest.Sweep, wanted: set[str] | None = None) -> None:
        for value, dtype in sweep.reads:
            if wanted is None or value in wanted:
                at = f"{self.kept[value]}[{self.loops.lane}]"
                self.loops.out(f"const {scalar_type(dtype)} {value} = {at};")

    def _innermost(self, sweep: nest.Sweep, parts: list[Part], name: str, size: str) -> None:
        out, lane = self.loops.out, self.loops.lane
        clauses = "".join(part.clause for part in parts)
        self.loops.simd(clauses + (f" simdlen({SUM_LANES})" if self._only_sums(sweep) else ""))
        with out.loop(name, size):
            self._read(sweep)
            for stmt in sweep.stmts:
                self.loops.statement(stmt)
                for value in set(outs_of(stmt)) & set(sweep.keeps):
                    out(f"{self.kept[value]}[{lane}] = {value};")
            for part in parts:
                out.all(part.step())
            self.loops.statements(s for s in sweep.stores if not self._is_done(s))

    def _only_sums(self, sweep: nest.Sweep) -> bool:
        """Say whether a sweep does little else than to add up floats."""
        has_more = self.loops.threaded_from == HEAVY_FROM or sweep.stores or sweep.keeps
        return not has_more and {(s.kind, total_type(s)) for s in sweep.reduces} == {_FLOAT_SUM}


class ColumnReduction:
    """Print accumulators for each col, partial results for each chunk, and their merge."""

    chunk_rows = CHUNK_ROWS

    def __init__(self, loops: Loops) -> None:
        self.loops = loops
        kernel = loops.kernel
        self.reduces = tuple(stmt for stmt in kernel.body if isinstance(stmt, Reduce))
        self.kept = tuple(axis for axis in kernel.cols if not axis.reduced)
        self.folded = tuple(axis for axis in kernel.cols if axis.reduced)
        self.num_rows = product(axis.size for axis in loops.inner_rows)
        self.num_kept = product(axis.size for axis in self.kept)
        self.num_folded = loops.scalars(product(axis.size for axis in self.folded))
        self.partials = {out: self._partial(s) for s in self.reduces for out in s.outs}

    def _partial(self, stmt: Reduce) -> str:
        """Declare scratch for one number per chunk and kept col."""
        loops = self.loops
        symbol = loops.scalars.symbol
        # ceil(rows / step) <= NUM_CHUNKS + 1 unless step is at its upper bound
        chunks = symbol(self.num_rows) // self.chunk_rows[1] + (NUM_CHUNKS + 1)
        outer = product(axis.size for axis in loops.outer_rows)
        numel = symbol(outer) * symbol(self.num_kept) * chunks
        is_exact = total_type(stmt) != "double"
        dtype = compute_dtype(stmt.dtype) if is_exact else torch.float64
        loops.scratch.append(Scratch(dtype, numel))
        return f"p{len(loops.kernel.params) + len(loops.scratch) - 1}"

    def step(self) -> str:
        """Return the rows of a chunk: sizes alone decide."""
        least, most = self.chunk_rows
        rows = self.num_rows
        if rows.is_const:
            return str(min(max(-(-rows.value // NUM_CHUNKS), least), most))
        wanted = f"({self.loops.scalars(rows)} + {NUM_CHUNKS - 1}) / {NUM_CHUNKS}"
        return f"sp::limit<int64_t>({wanted}, {least}, {most})"

    # ---- in a task -------------------------------------------------------------------------

    def print_task(self) -> None:
        loops, out, size = self.loops, self.loops.out, TOGETHER
        self.start()
        if not self._can_take_several():
            with loops.rows():
                loops.row_values(loops.kernel.body)
                with loops.cols():
                    self._row()
        else:
            loops.row_values(loops.kernel.body)
            out("int64_t top = begin;")
            with out.block(f"for (; top + {size} <= end; top += {size})"), loops.cols():
                self._rows(size)
            with out.loop("row", "end", "top"):
                loops.decode("row", loops.inner_rows)
                with loops.cols():
                    self._row()
        self.fold()

    def _can_take_several(self) -> bool:
        """Tell whether rows may be the innermost loop, which saves moments a trip through memory.

        What is the same in a whole row, and the divisions that find the place on several row axes,
        would be done for each col.
        """
        loops = self.loops
        row = loops.inner_rows[0].name if len(loops.inner_rows) == 1 else ""
        if not row or not loops.is_flat or any(row in s.index.axes for s in loops.staged):
            return False
        of_rows = [s for s in loops.kernel.body if not loops.varies_over(s) & loops.col_names]
        return bool(moments_of(self.reduces)) and not any(
            row in loops.varies_over(s) for s in of_rows if not isinstance(s, Reduce)
        )

    def start(self) -> None:
        """Print the accumulators for each col. Moments are relative to the first row of the
        task."""
        loops, moments = self.loops, moments_of(self.reduces)
        for stmt in self.reduces:
            for name in self._accumulators(stmt):
                loops.row_buffer(name, total_type(stmt))
        with loops.rows("begin + 1") if moments else nullcontext():
            if moments:
                loops.row_values(loops.kernel.body, stores=False)
            with loops.cols():
                loops.col_values(stmt.arg for stmt in moments)
                for stmt in self.reduces:
                    first, *rest = self._accumulators(stmt)
                    start = stmt.arg if rest else identity(stmt.kind, total_type(stmt))
                    loops.out(f"{first}[{loops.lane}] = {start};")
                    for name in rest:
                        loops.out(f"{name}[{loops.lane}] = 0;")

    def _accumulators(self, stmt: Reduce) -> list[str]:
        names = ("first", "sum", "squares") if stmt.kind == "moments" else ("lanes",)
        return [f"{name}_{stmt.outs[0]}" for name in names]

    def _elements(self) -> None:
        """Print the values of one row and col, and store what is stored of them."""
        stores = self.loops.col_stores()
        args = [stmt.arg for stmt in self.reduces]
        self.loops.col_values([*args, *(store.value for store in stores)])
        self.loops.statements(stores)

    def _row(self) -> None:
        self._elements()
        at = f"[{self.loops.lane}]"
        for stmt in self.reduces:
            name = stmt.outs[0]
            self._add(stmt, f"first_{name}{at}", f"sum_{name}{at}", f"squares_{name}{at}")

    def _rows(self, size: int) -> None:
        """Print one col of ``size`` rows, with the moments in registers."""
        loops, out, at = self.loops, self.loops.out, f"[{self.loops.lane}]"
        names = [stmt.outs[0] for stmt in moments_of(self.reduces)]
        for name in names:
            out(f"const double base_{name} = first_{name}{at};")
            out(f"double part_{name} = 0, spread_{name} = 0;")
        out(f"#pragma GCC unroll {size}")
        with out.loop("row", f"top + {size}", "top"):
            loops.decode("row", loops.inner_rows)
            self._elements()
            for stmt in self.reduces:
                name = stmt.outs[0]
                self._add(stmt, f"base_{name}", f"part_{name}", f"spread_{name}")
        for name in names:
            out(f"sum_{name}{at} += part_{name};")
            out(f"squares_{name}{at} += spread_{name};")

    def _add(self, stmt: Reduce, first: str, total: str, squares: str) -> None:
        out, scalar, name = self.loops.out, total_type(stmt), stmt.outs[0]
        if stmt.kind != "moments":
            out(combine(stmt.kind, scalar, f"lanes_{name}[{self.loops.lane}]", stmt.arg))
            return
        out(f"const {scalar} delta_{name} = {stmt.arg} - {first};")
        out(f"{total} += delta_{name};")
        out(f"{squares} += delta_{name} * delta_{name};")

    def fold(self) -> None:
        """Print the end of a task, which folds one accumulator per col to one partial result per
        kept col."""
        loops = self.loops
        loops.by_axes = True
        if any(stmt.kind == "moments" for stmt in self.reduces):
            loops.out("const double count = static_cast<double>(end - begin);")
            loops.out("const double inverse = 1 / count;")
        with loops.loops(loops.axis_loops(self.kept)):
            cell = f"task * {loops.scalars(self.num_kept)} + {self._cell()}"
            for stmt in self.reduces:
                if stmt.kind == "moments":
                    self._fold_moments(stmt, cell)
                else:
                    self._fold_lanes(stmt, cell)
        loops.by_axes = False

    def _cell(self) -> str:
        """Return the flattened kept col."""
        sizes = [axis.size for axis in self.kept]
        terms = []
        for place, axis in enumerate(self.kept):
            step = self.loops.scalars(product(sizes[place + 1 :]))
            terms.append(axis.name if step == "1" else f"{axis.name} * {step}")
        return " + ".join(terms) or "0"

    def _fold_lanes(self, stmt: Reduce, cell: str) -> None:
        loops, out, name = self.loops, self.loops.out, stmt.outs[0]
        scalar = total_type(stmt)
        out(f"{scalar} part_{name} = {identity(stmt.kind, scalar)};")
        with loops.loops(loops.axis_loops(self.folded)):
            out(combine(stmt.kind, scalar, f"part_{name}", f"lanes_{name}[{loops.lane}]"))
        out(f"{self.partials[name]}[{cell}] = part_{name};")

    def _fold_moments(self, stmt: Reduce, cell: str) -> None:
        """Fold the moments of cols of a chunk, which have equal counts: the mean of means, then
        squares about it."""
        loops, out = self.loops, self.loops.out
        mean, squares = stmt.outs
        lane = f"[{loops.lane}]"
        of_lane = f"first_{mean}{lane} + sum_{mean}{lane} * inverse"
        out(f"double mean_{mean} = 0;")
        with loops.loops(loops.axis_loops(self.folded)):
            out(f"mean_{mean} += {of_lane};")
        out(f"mean_{mean} /= {self.num_folded};")
        out(f"double spread_{mean} = 0;")
        with loops.loops(loops.axis_loops(self.folded)):
            out(f"const double shift_{mean} = {of_lane} - mean_{mean};")
            within = f"squares_{mean}{lane} - sum_{mean}{lane} * sum_{mean}{lane} * inverse"
            out(f"spread_{mean} += {within} + count * shift_{mean} * shift_{mean};")
        out(f"{self.partials[mean]}[{cell}] = mean_{mean};")
        out(f"{self.partials[squares]}[{cell}] = spread_{mean};")

    # ---- after all tasks -------------------------------------------------------------------

    def merge(self) -> None:
        """Print the merge of chunks in order, then the tail, for each parallel row and kept col."""
        loops, out = self.loops, self.loops.out
        outer = product(axis.size for axis in loops.outer_rows)
        cells, kept = loops.scalars(outer * self.num_kept), loops.scalars(self.num_kept)
        loops.by_axes = True
        with loops.parallel("cell", cells, f"{cells} * chunks"):
            loops.decode("cell", loops.outer_rows + self.kept)
            place = f"cell / {kept} * chunks * {kept} + cell % {kept}"
            out(
                f"const int64_t start = {place};"
                if loops.outer_rows
                else "const int64_t start = cell;"
            )
            for stmt in self.reduces:
                if stmt.kind == "moments":
                    self._merge_moments(stmt, f"start + chunk * {kept}")
                else:
                    self._merge_parts(stmt, f"start + chunk * {kept}")
            self._tail()
        loops.by_axes = False

    def _merge_parts(self, stmt: Reduce, at: str) -> None:
        out, name, scalar = self.loops.out, stmt.outs[0], total_type(stmt)
        out(f"{scalar} total_{name} = {identity(stmt.kind, scalar)};")
        with out.loop("chunk", "chunks"):
            out(combine(stmt.kind, scalar, f"total_{name}", f"{self.partials[name]}[{at}]"))
        out(f"const {scalar_type(stmt.dtype)} {name} = total_{name};")

    def _merge_moments(self, stmt: Reduce, at: str) -> None:
        out, rows = self.loops.out, self.loops.scalars(self.num_rows)
        (mean, var), scalar = stmt.outs, scalar_type(stmt.dtype)
        length = f"const double length = sp::min<int64_t>(step, {rows} - chunk * step);"
        out(f"double mean_{mean} = 0;")
        with out.loop("chunk", "chunks"):
            out(length)
            out(f"mean_{mean} += length * {self.partials[mean]}[{at}];")
        out(f"mean_{mean} /= {rows};")
        out(f"double spread_{mean} = 0;")
        with out.loop("chunk", "chunks"):
            out(length)
            out(f"const double shift = {self.partials[mean]}[{at}] - mean_{mean};")
            between = f"length * {self.num_folded} * shift * shift"
            out(f"spread_{mean} += {self.partials[var]}[{at}] + {between};")
        out(f"const {scalar} {mean} = static_cast<{scalar}>(mean_{mean});")
        total = f"(static_cast<double>({rows}) * {self.num_folded})"
        out(f"const {scalar} {var} = static_cast<{scalar}>(spread_{mean} / {total});")

    def _tail(self) -> None:
        kernel = self.loops.kernel
        known = self.loops.printed | {out for stmt in self.reduces for out in stmt.outs}
        stores = [stmt for stmt in kernel.tail if isinstance(stmt, Store)]
        roots = (store.value for store in stores)
        self.loops.statements(nest.closure(kernel.body + kernel.tail, roots, frozenset(known)))
        self.loops.statements(stores)


class WholeReduction(ColumnReduction):
    """Print the same with one col only: a chunk of rows is swept like a row."""

    chunk_rows = LANE_CHUNK_ROWS

    def print_task(self) -> None:
        loops, out, parts = self.loops, self.loops.out, parts_of(self.reduces)
        stores = [stmt for stmt in loops.kernel.body if isinstance(stmt, Store)]
        moments = moments_of(self.reduces)
        out(f"const int64_t {loops.kernel.cols[0].name} = 0;")
        if moments:
            declare_firsts(loops, moments)
            with out.loop("row", "sp::min<int64_t>(begin + 1, end)", "begin"):
                self._element([stmt.arg for stmt in moments])
                set_firsts(loops, moments)
        for part in parts:
            out.all(part.declare())
        loops.simd("".join(part.clause for part in parts))
        with out.loop("row", "end", "begin"):
            self._element([*(s.arg for s in self.reduces), *(s.value for s in stores)])
            for part in parts:
                out.all(part.step())
            loops.statements(stores)
        for part in parts:
            self._store_partial(part)

    def _element(self, roots: Sequence[str]) -> None:
        loops = self.loops
        loops.decode("row", loops.inner_rows)
        loops.statements(nest.closure(loops.kernel.body, roots, frozenset(loops.printed)))

    def _store_partial(self, part: Part) -> None:
        mean, total = part.stmt.outs[0], part.total
        if part.stage == "mean":
            total = f"first_{mean} + {total} / (end - begin)"
        elif part.stage == "squares":
            total = f"{total} - total_{mean} * total_{mean} / (end - begin)"
        self.loops.out(f"{self.partials[part.out]}[task] = {total};")

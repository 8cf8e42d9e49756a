"""Print the skeleton that all C++ kernels share: tasks, rows, cols, and statements inside them.

Rows are cut into *tasks*: one point of the outer row axes times a chunk of the inner ones. Tasks
run in parallel, the rows of a task in order, their cols under ``omp simd``. Chunks depend on
sizes only, so results do not depend on the number of threads.

Cols run as one axis, ``lane``, where the indices allow. Loads that do not fit (a value for each
group of channels) are *staged*: copied in lane order to a row buffer, once a task if they can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from strop.codegen import cpp_bags, nest
from strop.codegen.cpp_places import shared_lookups
from strop.codegen.cpp_text import TYPES, CppScalars, Text, apply_text, number, scalar_type, times
from strop.ir.dims import Expr, product
from strop.ir.loops import (
    Apply,
    Axis,
    CheckIndex,
    Index,
    Literal,
    Load,
    LoopKernel,
    OfPair,
    Position,
    Reduce,
    Schedule,
    Stmt,
    Store,
    args_of,
    bags_of,
    has_places,
    outs_of,
    spaces,
)
from strop.ir.ops import OPS, compute_dtype
from strop.ir.source import BOUNDS_CHECK, Scratch

# Elements below which threads cost more than they save, half a microsecond if they are awake:
# both take about four microseconds of one core.
THREADED_FROM, HEAVY_FROM = 32768, 16384
CODES_AN_ELEMENT = 64  # that are multiplied in the time of other work on an element
STACK_ROW = 4096  # longest row buffer on the stack, in elements


class Loops:
    """Prints statements of one (simplified) kernel, and the loops around them."""

    def __init__(self, kernel: LoopKernel, *, is_part: bool = False) -> None:
        self.kernel, self.is_part = kernel, is_part
        self.out = Text()
        self.scalars = CppScalars()
        self.has_places = has_places(kernel)
        self.scratch: list[Scratch] = [BOUNDS_CHECK] if self.has_places else []
        loaded = {stmt.out for stmt in kernel.body if isinstance(stmt, Load)}
        checks = [stmt for stmt in kernel.body if isinstance(stmt, CheckIndex)]
        self.made_places = frozenset(c.out for c in checks if c.value not in loaded)
        self.space = spaces(kernel)
        self.col_names = frozenset(axis.name for axis in kernel.cols)
        self.outside = frozenset(v for v, axes in self.space.items() if not axes & self.col_names)
        staged = nest.irregular(kernel) if len(kernel.cols) > 1 else ()
        self.is_flat = staged is not None  # all cols run as one axis
        self.staged = staged or ()
        bags = bags_of(kernel.body)
        self.bags = tuple(s for s in bags if self.is_flat and self.outside.issuperset(args_of(s)))
        self.buffers = {stmt.out: f"t{i}" for i, stmt in enumerate((*self.staged, *self.bags))}
        self.is_tiled = self.is_flat and not (self.staged or bags) and nest.is_transposing(kernel)
        self.num_outer = self._count_outer_rows()
        numbered = enumerate(kernel.params)
        self.panels = {n: param.panel for n, param in numbered if param.panel is not None}
        self.guarded = _guarded(kernel)
        self.by_axes = False  # inside loops over single col axes
        self.printed: set[str] = set()  # values of the whole kernel
        self.shared = shared_lookups(self)  # whose places are computed once a task
        self.places: dict[str, str] = {}  # their buffers, once they are filled
        applied = (stmt for stmt in kernel.body if isinstance(stmt, Apply))
        is_heavy = any(OPS[stmt.op].is_heavy for stmt in applied)
        self.threaded_from = HEAVY_FROM if is_heavy else THREADED_FROM

    def _count_outer_rows(self) -> int:
        """Count the row axes that split tasks: the parallel ones of COLUMN, else those of staged
        values.

        A tile of a transposing kernel is cut from the last row axis alone.
        """
        rows = self.kernel.rows
        if self.kernel.schedule is Schedule.COLUMN:
            return sum(not axis.reduced for axis in rows)
        if self.is_tiled:
            return len(rows) - 1
        used = frozenset[str]().union(*(s.index.axes for s in self.staged))
        if rows and rows[-1].name in used:
            return 0  # copied again for each row anyway
        return max((i + 1 for i, axis in enumerate(rows) if axis.name in used), default=0)

    # ---- tasks and rows --------------------------------------------------------------------

    @property
    def inner_rows(self) -> tuple[Axis, ...]:
        return self.kernel.rows[self.num_outer :]

    @property
    def outer_rows(self) -> tuple[Axis, ...]:
        return self.kernel.rows[: self.num_outer]

    @contextmanager
    def tasks(self) -> Iterator[None]:
        """Print one task: a chunk of ``step`` inner rows. The caller declares ``step``."""
        size = self.scalars(product(axis.size for axis in self.inner_rows))
        outer = product(axis.size for axis in self.outer_rows)
        self.out(f"const int64_t chunks = ({size} + step - 1) / step;")
        with self.parallel("task", times("chunks", self.scalars(outer)), self.work()):
            self.decode("task / chunks", self.outer_rows)
            chunk = "task % chunks" if self.outer_rows else "task"
            self.out(f"const int64_t begin = {chunk} * step;")
            self.out(f"const int64_t end = sp::min<int64_t>(begin + step, {size});")
            for stmt in self.staged:
                self.row_buffer(self.buffers[stmt.out], scalar_type(stmt.dtype))
            self._fill(stmt for stmt in self.staged if not self._is_inner(stmt))
            yield

    @contextmanager
    def rows(self, end: str = "end") -> Iterator[None]:
        """Print a loop over the rows of a task, in order. Several axes count on from row to row:
        quotients of 64 bits would take longer than the elements of a short row."""
        counted = self.inner_rows if len(self.inner_rows) > 1 else ()
        with self.out.block("") if counted else nullcontext():
            self.decode("begin", counted, kind="int64_t")
            with self.out.loop("row", end, "begin"):
                self.decode("row", () if counted else self.inner_rows)
                for number in self.panels:
                    place = f"sums{number} + (row - begin) * width{number}"
                    self.out(f"const int32_t* const row{number} = {place};")
                self._fill(stmt for stmt in self.staged if self._is_inner(stmt))
                yield
                self._count_on(counted)

    @contextmanager
    def parallel(self, name: str, count: str, work: str) -> Iterator[None]:
        self.out(f"#pragma omp parallel for schedule(static) if ({work} > {self.threaded_from})")
        with self.out.loop(name, count), self.faults():
            yield

    @contextmanager
    def faults(self) -> Iterator[None]:
        """Count lookups outside of a tensor here and, in the end, report that there were some."""
        if self.has_places:
            self.out("int64_t faults = 0;")
        if self.made_places:
            self.out("const int32_t none = sp::unseen_zero();")
        yield
        if self.has_places:
            self.out(f"if (faults) sp::report(p{len(self.kernel.params)});")

    def simd(self, clauses: str = "") -> None:
        self.out("#pragma omp simd" + clauses + (" reduction(|:faults)" if self.has_places else ""))

    def work(self) -> str:
        """Return the text of how many elements there are, or how much work there is instead."""
        elements = self.scalars(self.kernel.num_rows * self.kernel.num_cols)
        depth = sum(panel.depth for panel in self.panels.values())
        return f"{elements} * {1 + depth // CODES_AN_ELEMENT}" if depth else elements

    def _is_inner(self, stmt: Load | Position) -> bool:
        return any(axis.name in stmt.index.axes for axis in self.inner_rows)

    def _count_on(self, axes: Sequence[Axis]) -> None:
        """Print the step of axes from one row to the next, the innermost first."""
        if not axes:
            return
        *outer, axis = axes
        if not outer:
            self.out(f"++{axis.name};")
            return
        with self.out.block(f"if (++{axis.name} == {self.scalars(axis.size)})"):
            self.out(f"{axis.name} = 0;")
            self._count_on(outer)

    def decode(self, flat: str, axes: Sequence[Axis], kind: str = "const int64_t") -> None:
        """Recover axes from their flattened position."""
        for place, axis in enumerate(axes):
            inner = product(a.size for a in axes[place + 1 :])
            text = flat if inner == nest.ONE else f"{flat} / {self.scalars(inner)}"
            if place:
                text += f" % {self.scalars(axis.size)}"  # / and % bind alike, left first
            self.out(f"{kind} {axis.name} = {text};")

    # ---- cols ------------------------------------------------------------------------------

    @property
    def lane(self) -> str:
        """Return the place of the current col in a row buffer."""
        if len(self.kernel.cols) == 1:
            return self.kernel.cols[0].name
        return "lane" if self.is_flat and not self.by_axes else self.lane_at_axes()

    def lane_at_axes(self) -> str:
        sizes = [axis.size for axis in self.kernel.cols]
        steps = (self.scalars(product(sizes[i + 1 :])) for i in range(len(sizes)))
        return " + ".join(
            times(a.name, step) for a, step in zip(self.kernel.cols, steps, strict=True)
        )

    def col_loops(self) -> list[tuple[str, str]]:
        """Return (name, size) of each loop over the cols, the innermost last."""
        if self.is_flat:
            return [(self.lane, self.scalars(self.kernel.num_cols))]
        return self.axis_loops(self.kernel.cols)

    def axis_loops(self, axes: Iterable[Axis]) -> list[tuple[str, str]]:
        return [(axis.name, self.scalars(axis.size)) for axis in axes]

    @contextmanager
    def loops(self, loops: Sequence[tuple[str, str]]) -> Iterator[None]:
        if not loops:
            yield
            return
        with self.out.loop(*loops[0]), self.loops(loops[1:]):
            yield

    @contextmanager
    def cols(self, begin: str = "0", end: str = "") -> Iterator[None]:
        """Print a loop over all cols, or over a part of the innermost loop."""
        *outer, (name, size) = self.col_loops()
        with self.loops(outer):
            self.simd()
            with self.out.loop(name, end or size, begin):
                yield

    def row_buffer(self, name: str, scalar: str) -> None:
        """Print memory for one value at each col."""
        size = self.kernel.num_cols
        if size.is_const and size.value <= STACK_ROW:
            self.out(f"alignas(64) {scalar} {name}[{size.value}];")
        else:
            self.out(f"const sp::Row<{scalar}> {name}_memory({self.scalars(size)});")
            self.out(f"{scalar}* const {name} = {name}_memory.get();")

    def _fill(self, stmts: Iterable[Load | Position]) -> None:
        self.by_axes = True
        for stmt in stmts:
            with self.loops(self.axis_loops(self.kernel.cols)):
                value = self._load(stmt) if isinstance(stmt, Load) else self.element(stmt.index)
                self.out(f"{self.buffers[stmt.out]}[{self.lane_at_axes()}] = {value};")
        self.by_axes = False

    def fill_bags(self) -> None:
        """Add up the rows of bags, for one row."""
        self.by_axes = True
        for stmt in self.bags:
            name = self.buffers[stmt.out]
            self.row_buffer(name, scalar_type(stmt.dtype))
            with self.out.block(""):
                cpp_bags.print_row(self, stmt, name)
        self.by_axes = False

    # ---- statements ------------------------------------------------------------------------

    def varies_over(self, stmt: Stmt) -> frozenset[str]:
        if isinstance(stmt, Store):
            return self.space[stmt.value] | stmt.index.axes
        return frozenset[str]().union(*(self.space[out] for out in outs_of(stmt)))

    def uniform_values(self) -> None:
        """Print values that are the same everywhere, before all loops."""
        reduced = {out for s in self.kernel.body if isinstance(s, Reduce) for out in s.outs}
        for stmt in self.kernel.body:
            if isinstance(stmt, Store | Reduce) or self.varies_over(stmt):
                continue
            needs = nest.closure(self.kernel.body, outs_of(stmt), frozenset())
            if reduced.isdisjoint(out for need in needs for out in outs_of(need)):
                self.statement(stmt)
                self.printed.update(outs_of(stmt))

    def row_values(self, stmts: Iterable[Stmt], *, stores: bool = True) -> None:
        """Print the statements that do not vary over cols."""
        for stmt in stmts:
            if isinstance(stmt, Reduce) or self.varies_over(stmt) & self.col_names:
                continue
            is_store = isinstance(stmt, Store)
            if stores if is_store else self.printed.isdisjoint(outs_of(stmt)):
                self.statement(stmt)

    def col_stores(self) -> tuple[Store, ...]:
        stores = (stmt for stmt in self.kernel.body if isinstance(stmt, Store))
        return tuple(stmt for stmt in stores if self.varies_over(stmt) & self.col_names)

    def col_values(self, roots: Iterable[str]) -> None:
        """Print the statements that vary over cols and lead to ``roots``."""
        self.statements(nest.closure(self._body, roots, self.outside))

    @property
    def _body(self) -> list[Stmt]:
        """Return the statements, of which lookups ask for no place that is known."""
        if not self.places:
            return list(self.kernel.body)
        loads = {stmt.out: stmt for stmt in self.shared}
        placed = {name: replace(loads[name], lookups=()) for name in self.places}
        named = {out: stmt for stmt in self.kernel.body for out in outs_of(stmt)} | placed
        ordered = (named[outs_of(stmt)[0]] if outs_of(stmt) else stmt for stmt in self.kernel.body)
        return list(ordered)

    def statements(self, stmts: Iterable[Stmt]) -> None:
        for stmt in stmts:
            self.statement(stmt)

    def statement(self, stmt: Stmt) -> None:
        if isinstance(stmt, Store):
            dtype, at = TYPES[self.kernel.params[stmt.param].dtype], self.element(stmt.index)
            self.out(f"p{stmt.param}[{at}] = sp::narrow<{dtype}>({stmt.value});")
        elif isinstance(stmt, CheckIndex):
            self._place(stmt)
        else:
            assert not isinstance(stmt, Reduce), "reductions are printed by their schedule"
            assert not isinstance(stmt, OfPair), "only Triton's kernels have pairs"
            self.out(f"const {scalar_type(stmt.dtype)} {stmt.out} = {self._value(stmt)};")

    def _value(self, stmt: Load | Literal | Position | Apply) -> str:
        if stmt.out in self.buffers and not self.by_axes:
            return f"{self.buffers[stmt.out]}[{self.lane}]"
        if isinstance(stmt, Load) and stmt.bag is not None:
            return cpp_bags.element_text(self, stmt)
        if isinstance(stmt, Load):
            return self._load(stmt)
        if isinstance(stmt, Position):
            return self.element(stmt.index)
        if isinstance(stmt, Apply):
            can_choose = stmt.op == "where" and self.guarded.isdisjoint(stmt.args)
            return f"sp::choose({', '.join(stmt.args)})" if can_choose else apply_text(stmt)
        if isinstance(stmt.value, Expr):
            return f"static_cast<{scalar_type(stmt.dtype)}>({self.scalars(stmt.value)})"
        return number(stmt.value, stmt.dtype)

    def _load(self, stmt: Load) -> str:
        if stmt.param in self.panels:
            is_alone = not stmt.index.axes & self.col_names  # a row of one sum
            return f"row{stmt.param}[{0 if is_alone else self.lane}]"
        text = f"sp::widen(p{stmt.param}[{self._element(stmt)}])"
        if compute_dtype(self.kernel.params[stmt.param].dtype) != compute_dtype(stmt.dtype):
            text = f"static_cast<{scalar_type(stmt.dtype)}>({text})"
        return f"{stmt.guard} ? {text} : {number(0, stmt.dtype)}" if stmt.guard else text

    def _element(self, stmt: Load) -> str:
        """Return the text of an element: places have 32 bits, what they are multiplied by has
        64."""
        terms = [self.element(stmt.index)]
        if stmt.out in self.places:
            return f"{terms[0]} + {self.places[stmt.out]}[{self.lane}]"
        for place, stride in stmt.lookups:
            step = f"int64_t{{{stride.value}}}" if stride.is_const else self.scalars(stride)
            terms.append(place if stride == nest.ONE else f"{place} * {step}")
        return " + ".join(terms)

    def _place(self, stmt: CheckIndex) -> None:
        """Print a place, masked and in 32 bits: so g++ makes vectors of lookups (longer dims stay
        in eager)."""
        out, size = stmt.out, self.scalars(stmt.size)
        value = f"sp::wrapped({stmt.value}, {size})" if stmt.wraps else stmt.value
        self.out(f"const bool {out}_outside = sp::is_outside({value}, {size});")
        self.out(f"faults |= {out}_outside{f' & {stmt.guard}' if stmt.guard else ''};")
        place = f"static_cast<int32_t>({value})"
        place = f"({place} + none)" if out in self.made_places else place
        self.out(f"const int32_t {out} = {place} & ({out}_outside - 1);")

    def element(self, index: Index) -> str:
        """Return the text of an index, over ``lane`` where all cols run as one."""
        strides = index.strides
        if self.is_flat and not self.by_axes and len(self.kernel.cols) > 1:
            stride = nest.lane_stride(index, self.kernel.cols)
            assert stride is not None, f"{self.kernel.name}: {index} is not affine in the lane"
            strides = tuple(term for term in strides if term[0] not in self.col_names)
            strides += (("lane", stride),) if stride != nest.ZERO else ()
        text = " + ".join(times(axis, self.scalars(stride)) for axis, stride in strides)
        if index.offset == nest.ZERO and text:
            return text
        offset = self.scalars(index.offset)
        if not text:
            return offset
        return f"{text} - {offset[1:]}" if offset.startswith("-") else f"{text} + {offset}"


def _guarded(kernel: LoopKernel) -> frozenset[str]:
    """Return the values that come from guarded loads: they exist on one side of a choice only."""
    found: set[str] = set()
    for stmt in kernel.body + kernel.tail:
        is_guarded = isinstance(stmt, Load) and stmt.guard is not None
        if is_guarded or found.intersection(args_of(stmt)):
            found.update(outs_of(stmt))
    return frozenset(found)

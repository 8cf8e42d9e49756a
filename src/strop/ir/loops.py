"""Define loop IR: what one generated kernel does, before either code generator prints it.

A kernel is a two-level nest: ``rows`` (flattened, the outer level) x ``cols`` (flattened, the
inner level). Every value lives in one space, given by the axes it depends on: nothing, rows,
cols, or both. Statements are in topological order; names are ``v0``, ``v1``, ... .

schedule    rows                      cols                   reductions
POINTWISE   parallel                  parallel               none
ROW         parallel                  all reduced            over all cols, any number in sequence
COLUMN      parallel, then reduced    lanes, some reduced    over the reduced rows and cols,
                                                             all at one level

A reduction of everything is a COLUMN kernel with one lane: its rows are what gets split.

In a ROW kernel a statement may use the result of an earlier Reduce (a value in row space) and
cols again: the second sweep over the row. In a COLUMN kernel ``body`` runs once per (row, col)
and ends in the reductions, ``tail`` runs once per (parallel row, kept col) on their results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar, cast

import torch

from strop.ir.code_panel import CodePanel
from strop.ir.dims import Expr, const, product

ZERO = const(0)
MAX_LANES = 4096  # cols of a COLUMN kernel, where some of them are reduced: one tile holds them


class Schedule(Enum):
    POINTWISE = "pointwise"
    ROW = "row"
    COLUMN = "column"


@dataclass(frozen=True, slots=True)
class Axis:
    """Describe one loop: ``for name in range(size)``."""

    name: str
    size: Expr
    reduced: bool = False


@dataclass(frozen=True, slots=True)
class Index:
    """Stand for offset + sum(stride * axis), in elements. Axes with stride 0 are left out."""

    offset: Expr
    strides: tuple[tuple[str, Expr], ...]

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for axis, _ in self.strides)


@dataclass(frozen=True, slots=True)
class Param:
    """Describe a buffer that the kernel reads or writes. With a ``panel`` it holds codes, and loads
    read the sums of their products with a weight's."""

    dtype: torch.dtype
    is_output: bool
    panel: CodePanel | None = None


@dataclass(frozen=True, slots=True)
class Bag:
    """Say which rows a Load adds up: those of ``ids``, a param, from element ``at`` on.

    ``kind`` is "sum" or "amax", which keeps what is not larger, NaN too, as torch does; of no row
    both are 0. A row is ``stride`` elements behind the one before it, and there are ``size``; an id
    outside of them makes the kernel report a fault. There are ``count`` ids in all bags. Rows of
    the id ``padding`` are left out. ``weights`` is a param with a factor for each id, which begins
    at ``weights_at``.
    """

    kind: str
    ids: int
    at: Expr
    count: Expr
    stride: Expr
    size: Expr
    padding: int | None = None
    weights: int | None = None
    weights_at: Expr = ZERO

    @property
    def params(self) -> tuple[int, ...]:
        return (self.ids,) if self.weights is None else (self.ids, self.weights)


@dataclass(frozen=True, slots=True)
class Load:
    """Load out = params[param][index], widened to the compute type; 0 where ``guard`` is false.

    ``lookups`` are values that move the index: (int32 or int64 value, stride in elements) each.
    They are places of a Place, or in range by the way they were made. With ``bag`` they are the
    first id of a bag and how many it has, with stride 0, and out is what the bag's rows come to.
    """

    out: str
    param: int
    index: Index
    dtype: torch.dtype  # compute type of ``out``
    guard: str | None = None
    lookups: tuple[tuple[str, Expr], ...] = ()
    bag: Bag | None = None


@dataclass(frozen=True, slots=True)
class CheckIndex:
    """Take out = value (int64) as a place along a dim of ``size`` elements.

    With ``wraps`` a negative one counts from the end. One outside of the dim becomes 0 and, unless
    ``guard`` is false, makes the kernel report a fault.
    """

    out: str
    value: str
    size: Expr
    wraps: bool
    guard: str | None = None
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True, slots=True)
class Literal:
    """Set out = value. An Expr is a size, known at launch."""

    out: str
    value: int | float | bool | Expr
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Position:
    """Set out = index, as an integer: arange, and the conditions of cat."""

    out: str
    index: Index
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True, slots=True)
class Apply:
    """Compute out by a pointwise row of the operator table.

    Operands already have the types that the row asks for, except for ``cast``, whose operand is
    in any compute type. ``dtype`` is the logical result type: ``cast`` rounds to it (a cast to
    fp16 gives an fp32 value that fp16 can hold), every other row leaves its result unrounded in
    ``compute_dtype(dtype)``.
    """

    out: str
    op: str
    args: tuple[str, ...]
    dtype: torch.dtype
    attrs: tuple[tuple[str, int | float | bool | str], ...] = ()


@dataclass(frozen=True, slots=True)
class Reduce:
    """Compute outs as the reduction of ``arg`` over the reduced axes.

    kind "sum", "prod", "amax", "amin": one result, over nothing the identity. kind "moments":
    (mean, population variance) from deviations, never E[x^2] - E[x]^2. NaN propagates.
    """

    outs: tuple[str, ...]
    kind: str
    arg: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class OfPair:
    """Take out = what the pair of cols has in which each col lies: the ``value`` of its even or its
    odd col, or of both where they have the same. The last col axis has two elements.

    Lowering makes none: ``codegen.triton_pairs`` does, where both cols lie in one thread.
    """

    out: str
    take: str  # "even", "odd" or "both"
    value: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Store:
    """Store params[param][index] = value, rounded once to the dtype of the param."""

    param: int
    index: Index
    value: str


Stmt = Load | CheckIndex | Literal | Position | Apply | Reduce | OfPair | Store
S = TypeVar("S", bound=Stmt)


@dataclass(frozen=True)
class LoopKernel:
    """Describe one kernel. ``name`` is made from what it computes, so that equal kernels print
    equally."""

    name: str
    schedule: Schedule
    rows: tuple[Axis, ...]
    cols: tuple[Axis, ...]
    params: tuple[Param, ...]
    body: tuple[Stmt, ...]
    tail: tuple[Stmt, ...] = ()  # COLUMN only

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.schedule, self.rows, self.cols, self.params, self.body, self.tail))

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """Write as text what may be equal and yet another number: 0.0 and -0.0, 1 and True."""
        return tuple(
            repr(stmt.value if isinstance(stmt, Literal) else stmt.attrs)
            for stmt in self.body + self.tail
            if isinstance(stmt, Literal) or (isinstance(stmt, Apply) and stmt.attrs)
        )

    def __post_init__(self) -> None:
        assert self.cols, f"{self.name}: a kernel has at least one col axis"
        assert not self.tail or self.schedule is Schedule.COLUMN, self.name

    @property
    def num_rows(self) -> Expr:
        return product(axis.size for axis in self.rows)

    @property
    def num_cols(self) -> Expr:
        return product(axis.size for axis in self.cols)


def with_sizes(kernel: LoopKernel, sizes: Mapping[str, Expr]) -> LoopKernel:
    """Put other sizes in the place of these symbols."""

    def mapped(value: Any) -> Any:
        if isinstance(value, Expr):
            return value.substitute(sizes)
        if isinstance(value, tuple):
            return tuple(map(mapped, value))
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: mapped(getattr(value, f.name)) for f in fields(value)})
        return value

    return cast(LoopKernel, mapped(kernel))


def outs_of(stmt: Stmt) -> tuple[str, ...]:
    if isinstance(stmt, Store):
        return ()
    return stmt.outs if isinstance(stmt, Reduce) else (stmt.out,)


def args_of(stmt: Stmt) -> tuple[str, ...]:
    if isinstance(stmt, Apply):
        return stmt.args
    if isinstance(stmt, Reduce):
        return (stmt.arg,)
    if isinstance(stmt, Store | OfPair):
        return (stmt.value,)
    if isinstance(stmt, CheckIndex):
        return (stmt.value, stmt.guard) if stmt.guard else (stmt.value,)
    if not isinstance(stmt, Load):
        return ()
    names = tuple(name for name, _ in stmt.lookups)
    return (*names, stmt.guard) if stmt.guard else names


def with_args(stmt: S, names: Mapping[str, str]) -> S:
    """Put other names in the place of these values that a statement reads."""

    def new(name: str) -> str:
        return names.get(name, name)

    changes: dict[str, Any] = {}
    if isinstance(stmt, Apply):
        changes = {"args": tuple(map(new, stmt.args))}
    elif isinstance(stmt, Reduce):
        changes = {"arg": new(stmt.arg)}
    elif isinstance(stmt, Store | OfPair):
        changes = {"value": new(stmt.value)}
    elif isinstance(stmt, Load) and (stmt.guard or stmt.lookups):
        lookups = tuple((new(name), stride) for name, stride in stmt.lookups)
        changes = {"guard": stmt.guard and new(stmt.guard), "lookups": lookups}
    elif isinstance(stmt, CheckIndex):
        changes = {"value": new(stmt.value), "guard": stmt.guard and new(stmt.guard)}
    return replace(stmt, **changes)


def has_guards(kernel: LoopKernel) -> bool:
    """Tell whether some elements are loaded only where a condition holds, as pieces of a cat
    are."""
    return any(isinstance(stmt, Load) and stmt.guard for stmt in kernel.body)


def has_places(kernel: LoopKernel) -> bool:
    """Tell whether the kernel looks up places that may be out of range."""
    return any(isinstance(stmt, CheckIndex) for stmt in kernel.body + kernel.tail)


def bags_of(stmts: Iterable[Stmt]) -> tuple[Load, ...]:
    """Return the loads that add up rows."""
    return tuple(stmt for stmt in stmts if isinstance(stmt, Load) and stmt.bag is not None)


def indices_of(kernel: LoopKernel) -> Iterator[Index]:
    """Yield every affine index in the kernel."""
    for stmt in kernel.body + kernel.tail:
        if isinstance(stmt, Load | Position | Store):
            yield stmt.index


def spaces(kernel: LoopKernel) -> dict[str, frozenset[str]]:
    """Return for each value the axes that it varies over."""
    reduced = frozenset(a.name for a in kernel.rows + kernel.cols if a.reduced)
    space: dict[str, frozenset[str]] = {}
    for stmt in kernel.body + kernel.tail:
        own = stmt.index.axes if isinstance(stmt, Load | Position) else frozenset()
        for arg in args_of(stmt):
            own |= space[arg]
        if isinstance(stmt, Reduce):
            own -= reduced
        for out in outs_of(stmt):
            space[out] = own
    return space

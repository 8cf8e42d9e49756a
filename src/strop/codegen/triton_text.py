"""Print the pieces of Triton text that all schedules share: scalars, tiles, indices and
statements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from strop.codegen import triton_bfloat16, triton_division
from strop.codegen.triton_halves import halves
from strop.codegen.triton_lines import Lines
from strop.errors import CodegenError
from strop.ir.dims import Expr, const, product, symbol, to_expr
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
    Stmt,
    Store,
    args_of,
    outs_of,
    with_sizes,
)
from strop.ir.ops import CODES, OPS, compute_dtype
from strop.ir.source import is_within

TYPES: Mapping[torch.dtype, str] = {
    torch.bool: "tl.int1",
    torch.uint8: "tl.uint8",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}
LIMIT = 2**31
NO_LIMIT = 2**62
ALIGNED = 8  # elements: 16 bytes of fp16


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def power_of_two_in(n: int) -> int:
    """Return the largest power of two that divides ``n``."""
    return n & -n


def tiles(size: Expr, tile: int) -> Expr:
    """Return how many tiles cover ``size`` elements."""
    return (size + (tile - 1)) // tile


def fitting(size: Expr, tile: int) -> int:
    """Choose a tile no larger than a known size asks for."""
    return min(tile, next_power_of_two(size.value)) if size.is_const else tile


@dataclass(frozen=True, slots=True)
class Form:
    """Describe a kernel as it is printed for a ``size`` of at most ``most`` that is a multiple of
    ``multiple``. ``meaning``: what symbols of this form are in terms of those of the graph."""

    kernel: LoopKernel
    size: Expr
    most: int
    multiple: int = 1
    meaning: Mapping[str, Expr] = field(default_factory=dict)

    def fits(self, sizes: Mapping[str, int]) -> bool:
        return is_within(self.size.eval(sizes), self.most, self.multiple)


def of_whole_vectors(kernel: LoopKernel, size: Expr, mosts: Iterable[int]) -> Iterator[Form]:
    """Yield forms for a size that is a multiple of ``ALIGNED``, if it is a symbol of its own."""
    roots = tuple(size.roots)
    if len(roots) == 1 and size == symbol(roots[0]):
        (root,) = roots
        divided = with_sizes(kernel, {root: size * ALIGNED})
        meaning = {root: size // ALIGNED}
        yield from (Form(divided, size, most, ALIGNED, meaning) for most in mosts)


@dataclass
class TritonScalars:
    """Turn sizes into integer arguments, one for each distinct expression."""

    sizes: list[Expr] = field(default_factory=list)

    def text(self, size: Expr | int) -> str:
        size = to_expr(size)
        if size.is_const:
            return str(size.value)
        name, factor = self._argument(size)
        return name if factor == 1 else f"({name} * {factor})"

    def symbolic(self, size: Expr) -> Expr:
        """Return the same size, over the scalar names."""
        if size.is_const:
            return size
        name, factor = self._argument(size)
        return symbol(name) * factor

    def _argument(self, size: Expr) -> tuple[str, int]:
        """Return an argument and what to multiply it by.

        An argument is known to be a multiple of 16 or of nothing, so a smaller power of two stays
        in the text, where it still proves accesses to be aligned.
        """
        factor = 1 if size.is_multiple_of(16) else power_of_two_in(size.divisor)
        size = size // factor
        if size not in self.sizes:
            self.sizes.append(size)
        return f"s{self.sizes.index(size)}", factor

    @property
    def classes(self) -> tuple[int, ...]:
        return tuple(16 if size.is_multiple_of(16) else 1 for size in self.sizes)


@dataclass(frozen=True, slots=True)
class Flat:
    """Describe a flattened id and the axes that it stands for, outer to inner."""

    name: str
    axes: tuple[Axis, ...]
    dim: str = ""  # "r": varies down the tile, "c": across it, "": one id for the whole tile
    wide: bool = False  # offsets along it need 64 bits
    first: str = ""  # the id at which the tile starts,
    tile: int = 0  # and how many ids it has: runs that do not change within it are scalars


@dataclass(frozen=True, slots=True)
class AddressTerm:
    """Hold adjacent axes that an index walks with one stride: one term of its address."""

    name: str
    axes: tuple[Axis, ...]
    inner: Expr  # how many ids of the flat axis share one id of the run
    leading: bool
    stride: Expr
    dim: str


@dataclass(frozen=True, slots=True)
class Tile:
    """Hold what statements see: the flat ids, the block shape and the masks along its
    dimensions."""

    flats: tuple[Flat, ...]
    shape: Mapping[str, str]  # dim -> size, in order
    masks: Mapping[str, str]  # dim -> name of its mask, where one is needed
    spread: bool = False  # load vectors along the cols once for each row, see ``_load``
    leaves: str = ""  # a flag of the kernel: what it loads may leave the cache first
    half: Tile | None = None  # has each pair of cols once, see ``triton_halves``

    def block(self, dims: Iterable[str]) -> str:
        return (
            "[" + ", ".join(size if dim in dims else "1" for dim, size in self.shape.items()) + "]"
        )

    def mask(self, dims: Iterable[str]) -> list[str]:
        return [self.masks[dim] for dim in self.shape if dim in dims and dim in self.masks]


@dataclass(frozen=True, slots=True)
class TileValue:
    text: str
    dims: frozenset[str]
    dtype: torch.dtype


def runs(flat: Flat, index: Index) -> Iterator[AddressTerm]:
    """Yield the terms that ``index`` has along ``flat``: merged axes need no division at all."""
    strides = dict(index.strides)
    axes = [axis for axis in flat.axes if axis.size != const(1)]
    start = 0
    while start < len(axes):
        stride = strides.get(axes[start].name)
        end = start + 1
        if stride is not None:
            while (
                end < len(axes) and strides.get(axes[end].name, const(0)) * axes[end].size == stride
            ):
                stride = strides[axes[end].name]
                end += 1
            own, inner = tuple(axes[start:end]), product(a.size for a in axes[end:])
            whole = len(own) == len(axes)
            name = flat.name if whole else "_".join([flat.name, *(a.name for a in own)])
            uniform = flat.tile > 0 and inner.is_multiple_of(flat.tile)
            yield AddressTerm(name, own, inner, start == 0, stride, "" if uniform else flat.dim)
        start = end


def is_whole(kernel: LoopKernel, index: Index) -> bool:
    """Tell whether every element that the index reaches is reached once."""
    axes = (*kernel.rows, *kernel.cols)
    return all(axis.name in index.axes for axis in axes if axis.size != const(1))


@lru_cache(maxsize=512)
def is_transposing(kernel: LoopKernel) -> bool:
    """Tell whether some access is contiguous along the rows only."""
    row, col = Flat("row", kernel.rows), Flat("col", kernel.cols)
    for stmt in kernel.body:
        if isinstance(stmt, Load | Store):
            down = [run.stride for run in runs(row, stmt.index)]
            across = [run.stride for run in runs(col, stmt.index)]
            if const(1) in down and across and const(1) not in across:
                return True
    return False


@lru_cache(maxsize=512)
def rounds_to_codes(kernel: LoopKernel) -> bool:
    """Tell whether a statement rounds to whole numbers, or to eight bits."""
    return any(isinstance(s, Apply) and _is_rounding(s) for s in kernel.body + kernel.tail)


def _is_rounding(stmt: Apply) -> bool:
    if stmt.op != "cast":
        return OPS[stmt.op].rounds
    is_float = stmt.dtype.is_floating_point
    return stmt.dtype in CODES or not (is_float or stmt.dtype is torch.bool)


@dataclass
class Printer:
    """Prints the statements of one kernel, a tile at a time."""

    kernel: LoopKernel
    out: Lines = field(default_factory=Lines)
    scalars: TritonScalars = field(default_factory=TritonScalars)
    values: MutableMapping[str, TileValue] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
    program: str = "tl.program_id(0)"

    @property
    def is_exact(self) -> bool:
        """Tell whether fp32 leaves the kernel, or it rounds to few values. Half types hide what a
        division or an exponential loses, and a kernel that moves twice as many bytes has time for a
        better one. What lies between two codes goes to the other one by a quotient's last bit."""
        leaves_in_fp32 = any(p.is_output and p.dtype is torch.float32 for p in self.kernel.params)
        return leaves_in_fp32 or rounds_to_codes(self.kernel)

    def quotient(self, total: str, count: str, dtype: torch.dtype) -> str:
        """Return a reduction's sum over the number of its terms, which is an integer."""
        if dtype is not torch.float32 or not self.is_exact:
            return f"{total} / {count}"
        if count.isdigit():
            return triton_division.by_number(total, float(count))
        return triton_division.by_tensor(total, f"({count}).to(tl.float32)")

    def _known(self, name: str) -> float | None:
        """Return the number that a value is, if it is known when the kernel is printed."""
        for stmt in self.kernel.body:
            if isinstance(stmt, Literal) and stmt.out == name:
                return None if isinstance(stmt.value, Expr) else float(stmt.value)
        return None

    def _exact_quotient(self, stmt: Apply, args: Sequence[str]) -> str:
        """Divide as exactly as eager: Triton's own / is two ulps off, and all elements that share a
        divisor by the same two."""
        if stmt.op == "reciprocal":
            return f"tl.div_rn(1.0, {args[0]})"
        known = self._known(stmt.args[1])
        if known is None:
            return triton_division.by_tensor(*args)
        return triton_division.by_number(args[0], known)

    def mask(self, name: str, size: Expr, tile: int) -> dict[str, str]:
        """Return the mask of a tile dimension, printed, where tiles may stick out."""
        if size.is_multiple_of(tile):
            return {}
        self.out.add(f"{name}_mask = {name} < {self.scalars.text(size)}")
        return {name[0]: f"{name}_mask"}

    def ids(self, flat: Flat, stmts: Iterable[Stmt]) -> None:
        """Recover from a flat id the axis ids that these statements index with."""
        self.ids_of(flat, [s.index for s in stmts if isinstance(s, Load | Position | Store)])

    def ids_of(self, flat: Flat, indices: Iterable[Index]) -> None:
        seen = {flat.name}
        for index in indices:
            for run in runs(flat, index):
                if run.name not in seen:
                    seen.add(run.name)
                    self.out.add(f"{run.name} = {self._run_text(flat, run)}")

    def half(self, tile: Tile, flat: Flat, first: str) -> Tile | None:
        """Return half of a tile, where ``first`` is the number of its first pair and a sign, or
        nothing for the first tile; None where nothing is computed for pairs."""
        outs = halves(self.kernel)
        if not outs:
            return None
        pairs = replace(flat, name=f"half_{flat.name}", axes=flat.axes[:-1])
        self.out.add(f"{pairs.name} = {first}tl.arange(0, COLS // 2)[None, :]")
        masks = dict(tile.masks)
        if "c" in masks:
            size = product(axis.size for axis in pairs.axes)
            masks["c"] = f"{pairs.name}_mask"
            self.out.add(f"{masks['c']} = {pairs.name} < {self.scalars.text(size)}")
        self.ids(pairs, [stmt for stmt in self.kernel.body if not outs.isdisjoint(outs_of(stmt))])
        flats = tuple(pairs if each is flat else each for each in tile.flats)
        return replace(tile, flats=flats, shape={**tile.shape, "c": "COLS // 2"}, masks=masks)

    def _run_text(self, flat: Flat, run: AddressTerm) -> str:
        text = flat.name if run.dim else flat.first or flat.name
        if run.inner != const(1):
            text += f" // {self.scalars.text(run.inner)}"
        if not run.leading:
            text += f" % {self.scalars.text(product(axis.size for axis in run.axes))}"
        return text

    def terms(self, index: Index, tile: Tile) -> tuple[list[str], frozenset[str]]:
        """Return the summands of an index and the tile dimensions that it varies along."""
        found, dims = [], set()
        if index.offset != const(0):
            found.append(self.scalars.text(index.offset))
        for flat in tile.flats:
            for run in runs(flat, index):
                found.append(self._term(flat, run))
                dims.add(run.dim)
        return found, frozenset(dims - {""})

    def _term(self, flat: Flat, run: AddressTerm) -> str:
        size = product(axis.size for axis in run.axes)
        span = size * run.stride
        if span.is_const:
            wide = flat.wide or abs(span.value) >= LIMIT
        else:
            wide = flat.wide or run.stride != const(1)
        text = f"{run.name}.to(tl.int64)" if wide else run.name
        return text if run.stride == const(1) else f"{text} * {self.scalars.text(run.stride)}"

    def pointer(
        self,
        base: str,
        index: Index,
        tile: Tile,
        dims: frozenset[str],
        lookups: Sequence[tuple[str, Expr]] = (),
    ) -> tuple[str, str]:
        """Return (pointer, mask) of an access that must have at least these dimensions."""
        terms, own = self.terms(index, tile)
        for name, stride in lookups:
            value = self.values[name]
            place = value.text if value.dtype == torch.int64 else f"{value.text}.to(tl.int64)"
            terms.append(place if stride == const(1) else f"{place} * {self.scalars.text(stride)}")
            own |= self.values[name].dims
        text = " + ".join([base, *terms])
        if not dims <= own:
            text = f"tl.broadcast_to({text}, {tile.block(dims | own)})"
        return text, " & ".join(tile.mask(dims | own))

    def define(
        self, stmt_out: str, text: str, dims: frozenset[str], dtype: torch.dtype, prefix: str = ""
    ) -> None:
        name = prefix + stmt_out
        self.out.add(f"{name} = {text}")
        self.values[stmt_out] = TileValue(name, dims, dtype)

    def statement(self, stmt: Stmt, tile: Tile, prefix: str = "") -> None:
        """Print any statement but a Reduce, whose text depends on the schedule."""
        if tile.half is not None and not halves(self.kernel).isdisjoint(outs_of(stmt)):
            tile = tile.half
        if isinstance(stmt, Load):
            self._load(stmt, tile, prefix)
        elif isinstance(stmt, CheckIndex):
            self._place(stmt, tile, prefix)
        elif isinstance(stmt, Literal):
            self.define(stmt.out, self._literal(stmt), frozenset(), stmt.dtype, prefix)
        elif isinstance(stmt, Position):
            terms, dims = self.terms(stmt.index, tile)
            text = _position_text(terms, TYPES[stmt.dtype], bool(dims))
            self.define(stmt.out, text, dims, stmt.dtype, prefix)
        elif isinstance(stmt, Apply):
            args = [self.values[arg] for arg in stmt.args]
            dims = frozenset().union(*(arg.dims for arg in args))
            text = self._applied(stmt, args, dims, tile)
            self.define(stmt.out, text, dims, compute_dtype(stmt.dtype), prefix)
        elif isinstance(stmt, OfPair):
            value = self.values[stmt.value]
            is_whole = stmt.take == "both" and tile.half is None
            text = value.text if is_whole else f"of_{stmt.take}({value.text})"
            self.define(stmt.out, text, value.dims, value.dtype, prefix)
        elif isinstance(stmt, Store):
            value = self.values[stmt.value]
            pointer, mask = self.pointer(f"p{stmt.param}", stmt.index, tile, value.dims)
            self.out.add(f"tl.store({pointer}, {value.text}{', mask=' + mask if mask else ''})")
        else:
            raise CodegenError(f"{self.kernel.name}: {type(stmt).__name__} has no place here")

    def _applied(
        self, stmt: Apply, args: Sequence[TileValue], dims: frozenset[str], tile: Tile
    ) -> str:
        texts = [arg.text for arg in args]
        is_exact = not dims or (self.is_exact and stmt.dtype is torch.float32)
        if is_exact and compute_dtype(stmt.dtype) is torch.float32:
            # once a launch, or what leaves in fp32
            if stmt.op in ("div", "reciprocal"):
                return self._exact_quotient(stmt, texts)
            if stmt.op == "exp":
                # tl.exp is off by the rounding of x log2(e), of which a sine behind it makes much
                return f"libdevice.exp({texts[0]})"
        if self._is_rounded_in_twos(stmt, tile, args):
            return triton_bfloat16.rounded(texts[0])
        return apply_text(stmt, texts)

    def _load(self, stmt: Load, tile: Tile, prefix: str) -> None:
        guard = self.values[stmt.guard] if stmt.guard else None
        needed = guard.dims if guard else frozenset()
        needed = needed.union(*(self.values[name].dims for name, _ in stmt.lookups))
        dims = self.terms(stmt.index, tile)[1] | needed
        if tile.spread and dims == {"c"}:
            # Triton would give a long vector a layout of its own and convert it through shared
            # memory; read as a full block, from the cache, it has the layout of its users.
            dims = needed = frozenset(tile.shape)
        pointer, mask = self.pointer(f"p{stmt.param}", stmt.index, tile, needed, stmt.lookups)
        if guard:
            mask = f"{mask} & {guard.text}" if mask else guard.text
        args = pointer + (f", mask={mask}" if mask else "") + (", other=0" if guard else "")
        stored = self.kernel.params[stmt.param].dtype
        in_twos = self._is_widened_in_twos(stmt, tile)
        widen = "" if in_twos or stored == stmt.dtype else f".to({TYPES[stmt.dtype]})"
        if tile.leaves and not stmt.lookups and is_whole(self.kernel, stmt.index):
            with self.out.choice(f"if {tile.leaves}:"):
                first = f'tl.load({args}, eviction_policy="evict_first"){widen}'
                self.define(stmt.out, first, dims, stmt.dtype, prefix)
            with self.out.choice("else:"):
                self.define(stmt.out, f"tl.load({args}){widen}", dims, stmt.dtype, prefix)
        else:
            self.define(stmt.out, f"tl.load({args}){widen}", dims, stmt.dtype, prefix)
        if in_twos:
            # behind loads that follow, so that the compiler makes one choice of two for all
            name = prefix + stmt.out
            self.out.add_later(name, f"{name} = {triton_bfloat16.widened(name)}")

    def _is_rounded_in_twos(self, stmt: Apply, tile: Tile, args: Sequence[TileValue]) -> bool:
        """Tell whether a cast of fp32 to bf16 and back has neighbours in its thread."""
        is_rounded = stmt.op == "cast" and stmt.dtype is torch.bfloat16
        if not is_rounded or args[0].dtype is not torch.float32:
            return False
        is_along = list(tile.shape)[-1] in args[0].dims
        return is_along and stmt.out not in triton_bfloat16.narrow(self.kernel)

    def _is_widened_in_twos(self, stmt: Load, tile: Tile) -> bool:
        """Tell whether a load of bf16 has neighbours in its thread that lie side by side in
        memory."""
        is_half = self.kernel.params[stmt.param].dtype is torch.bfloat16
        if not is_half or stmt.dtype is not torch.float32 or is_transposing(self.kernel):
            return False
        if stmt.out in triton_bfloat16.narrow(self.kernel):
            return False
        last = list(tile.shape)[-1]
        cols = next((flat.axes for flat in tile.flats if flat.dim == last), ())
        return triton_bfloat16.lies_in_twos(stmt, cols, is_masked=last in tile.masks)

    def _place(self, stmt: CheckIndex, tile: Tile, prefix: str) -> None:
        """Print a place. One that is outside sets the flag, by whichever lane has it, and becomes
        0."""
        name, size, add = prefix + stmt.out, self.scalars.text(stmt.size), self.out.add
        place, dims = self.values[stmt.value].text, self.values[stmt.value].dims
        wanted, at = [f"({name}_inside == 0)"], dims
        if stmt.guard:
            guard = self.values[stmt.guard]
            wanted, at = [*wanted, guard.text], dims | guard.dims
        if stmt.wraps:
            add(f"{name}_wrapped = tl.where({place} < 0, {place} + {size}, {place})")
            place = f"{name}_wrapped"
        add(f"{name}_inside = ({place} >= 0) & ({place} < {size})")
        add(f"{name}_fault = {' & '.join([*wanted, *tile.mask(at)])}")
        add(f"tl.store(faults + {name}_fault.to(tl.int32) * 0, 1, mask={name}_fault)")
        self.define(stmt.out, f"tl.where({name}_inside, {place}, 0)", dims, stmt.dtype, prefix)

    def _literal(self, stmt: Literal) -> str:
        dtype = TYPES[stmt.dtype]
        value = stmt.value
        if isinstance(value, Expr):
            if not value.is_const:
                return f"{self.scalars.text(value)}.to({dtype})"
            value = value.value
        return f"tl.full([], {number(value)}, {dtype})"


# Functions that texts of the operator table call, printed above a kernel that has one.
#


def number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def _position_text(terms: list[str], dtype: str, is_block: bool) -> str:
    total = " + ".join(terms)
    if is_block:
        return f"({total}).to({dtype})" if " " in total else f"{total}.to({dtype})"
    return f"tl.full([], 0, {dtype})" + (f" + {total}" if total else "")


def apply_text(stmt: Apply, args: list[str]) -> str:
    """Return the operator table's expression for one pointwise statement."""
    row = OPS[stmt.op]
    wide = compute_dtype(stmt.dtype)
    if stmt.op == "cast":
        # from a negative number by way of a signed type, as ATen: unsigned conversion saturates
        signed = f"{args[0]}.to(tl.int64)" if stmt.dtype is torch.uint8 else args[0]
        rounded = f"{signed}.to({TYPES[stmt.dtype]})"
        return rounded if wide == stmt.dtype else f"{rounded}.to({TYPES[wide]})"
    attrs = {**row.attrs, **dict(stmt.attrs)}
    template = row.triton_half if row.triton_half and wide != stmt.dtype else row.triton
    if wide is torch.float64:
        template = template.replace(
            "tl.sqrt_rn(", "tl.sqrt("
        )  # exact, where the other is fp32 only
    if attrs.get("alpha") == 1:
        template = template.replace("{alpha} * ", "")
    numbers = {name: _attribute(value) for name, value in attrs.items()}
    return template.format(*args, type=TYPES[wide], bits=8 * wide.itemsize, **numbers)


def _attribute(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"({number(value)})" if value < 0 else number(value)


def loads_first(body: Sequence[Stmt]) -> list[Stmt]:
    """Order statements so that loads that wait for no reduction come first, with what they need,
    and stores as soon as their value is there. A reduction waits for all lanes while memory works:
    residual + LayerNorm 4096x320 takes 3.3 us, not 3.8. No store passes a load."""
    early: list[Stmt] = []
    rest: list[Stmt] = []
    late: set[str] = set()
    needed = _needed_by_loads(body)
    for stmt in body:
        if isinstance(stmt, Reduce) or not late.isdisjoint(args_of(stmt)):
            late.update(outs_of(stmt))
            rest.append(stmt)
        else:
            is_early = isinstance(stmt, Load) or not needed.isdisjoint(outs_of(stmt))
            (early if is_early else rest).append(stmt)
    if any(isinstance(stmt, Load) for stmt in rest):
        return [*early, *rest]
    stores = [stmt for stmt in rest if isinstance(stmt, Store)]
    ordered = [*early, *_stores_of(early, stores)]
    for stmt in rest:
        if not isinstance(stmt, Store):
            ordered += [stmt, *_stores_of([stmt], stores)]
    return ordered


def _needed_by_loads(body: Sequence[Stmt]) -> set[str]:
    needed: set[str] = set()
    for stmt in reversed(body):
        if isinstance(stmt, Load) or not needed.isdisjoint(outs_of(stmt)):
            needed.update(args_of(stmt))
    return needed


def _stores_of(stmts: Sequence[Stmt], stores: Sequence[Stmt]) -> list[Stmt]:
    outs = {out for stmt in stmts for out in outs_of(stmt)}
    return [store for store in stores if not outs.isdisjoint(args_of(store))]

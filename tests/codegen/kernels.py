"""Sample kernels built by hand, shared by the tests of both code generators.

Each function takes the storage dtype and returns a ``Sample``: the kernel, how many elements each
param holds, and the sizes to test it with. ``SAMPLES`` lists them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from strop.ir.dims import Env, Expr, const, product, symbol, to_expr
from strop.ir.loops import (
    Apply,
    Axis,
    CheckIndex,
    Index,
    Literal,
    Load,
    LoopKernel,
    Param,
    Position,
    Reduce,
    Schedule,
    Stmt,
    Store,
)
from strop.ir.ops import POINTWISE, Operands, Types, compute_dtype
from strop.ir.parts import shape_in_memory
from strop.lowering.lower import Lowered

F32, I64, BOOL = torch.float32, torch.int64, torch.bool


def numels_of(low: Lowered) -> tuple[Expr, ...]:
    """Elements of the memory of each param, from its offset on."""
    buffers = zip(low.buffers, low.offsets, strict=True)
    return tuple(product(shape_in_memory(node)) - offset for node, offset in buffers)


@dataclass(frozen=True)
class Sample:
    kernel: LoopKernel
    numels: tuple[Expr, ...]  # elements of each param
    envs: tuple[Env, ...]  # sizes to test with

    def tensors(self, env: Env, seed: int = 0, mean: float = 0.0) -> list[torch.Tensor]:
        """Random inputs (integers: 0 to 3) and outputs that are visibly not written yet."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        for param, numel in zip(self.kernel.params, self.numels, strict=True):
            size = numel.eval(env)
            if param.is_output:
                poison = math.nan if param.dtype.is_floating_point else 1
                found.append(torch.full((size,), poison).to(param.dtype))
            elif param.dtype.is_floating_point:
                noise = torch.randn(size, generator=generator, dtype=torch.float64)
                found.append((noise + mean).to(param.dtype))
            else:
                found.append(torch.randint(0, 4, (size,), generator=generator).to(param.dtype))
        return found


def index(offset: Expr | int = 0, **strides: Expr | int) -> Index:
    terms = [(axis, to_expr(stride)) for axis, stride in strides.items()]
    return Index(to_expr(offset), tuple(t for t in terms if t[1] != const(0)))


def axis(name: str, size: Expr | int, reduced: bool = False) -> Axis:
    return Axis(name, to_expr(size), reduced)


def reads(*dtypes: torch.dtype) -> tuple[Param, ...]:
    return tuple(Param(dtype, False) for dtype in dtypes)


def writes(*dtypes: torch.dtype) -> tuple[Param, ...]:
    return tuple(Param(dtype, True) for dtype in dtypes)


@dataclass
class Writer:
    """Appends statements and names their results v0, v1, ..."""

    compute: torch.dtype
    stmts: list[Stmt] = field(default_factory=list)
    count: int = 0

    def name(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def load(
        self,
        param: int,
        at: Index,
        dtype: torch.dtype | None = None,
        guard: str | None = None,
        lookups: tuple[tuple[str, Expr], ...] = (),
    ) -> str:
        out = self.name()
        self.stmts.append(Load(out, param, at, dtype or self.compute, guard, lookups))
        return out

    def place(
        self, value: str, size: Expr | int, wraps: bool = False, guard: str | None = None
    ) -> str:
        out = self.name()
        self.stmts.append(CheckIndex(out, value, to_expr(size), wraps, guard))
        return out

    def literal(self, value: float | Expr, dtype: torch.dtype | None = None) -> str:
        out = self.name()
        self.stmts.append(Literal(out, value, dtype or self.compute))
        return out

    def position(self, at: Index) -> str:
        out = self.name()
        self.stmts.append(Position(out, at))
        return out

    def apply(self, op: str, *args: str, dtype: torch.dtype | None = None, **attrs: float) -> str:
        if op in ("add", "sub", "rsub"):
            attrs.setdefault("alpha", 1)
        out = self.name()
        self.stmts.append(Apply(out, op, args, dtype or self.compute, tuple(attrs.items())))
        return out

    def reduce(self, kind: str, arg: str) -> tuple[str, ...]:
        outs = tuple(self.name() for _ in range(2 if kind == "moments" else 1))
        self.stmts.append(Reduce(outs, kind, arg, self.compute))
        return outs

    def store(self, param: int, at: Index, value: str) -> None:
        self.stmts.append(Store(param, at, value))

    def take(self) -> tuple[Stmt, ...]:
        """The statements so far; the next ones go to another list."""
        taken, self.stmts = tuple(self.stmts), []
        return taken


def envs(names: str, *values: Iterable[int]) -> tuple[Env, ...]:
    return tuple(dict(zip(names.split(), row, strict=True)) for row in values)


def _writer(dtype: torch.dtype) -> Writer:
    return Writer(compute_dtype(dtype))


def silu_flat(dtype: torch.dtype) -> Sample:
    n = symbol("n")
    w = _writer(dtype)
    w.store(1, index(i=1), w.apply("silu", w.load(0, index(i=1))))
    kernel = LoopKernel(
        "silu_flat",
        Schedule.POINTWISE,
        (),
        (axis("i", n),),
        reads(dtype) + writes(dtype),
        w.take(),
    )
    return Sample(kernel, (n, n), envs("n", [1], [7], [123], [100_003]))


def bias_residual(dtype: torch.dtype) -> Sample:
    m, c = symbol("m"), 320
    w = _writer(dtype)
    at = index(r=c, c=1)
    x = w.apply("add", w.load(0, at), w.load(1, index(c=1)))
    w.store(3, at, w.apply("add", w.load(2, at), x, alpha=0.7))
    kernel = LoopKernel(
        "bias_residual",
        Schedule.POINTWISE,
        (axis("r", m),),
        (axis("c", c),),
        reads(dtype, dtype, dtype) + writes(dtype),
        w.take(),
    )
    return Sample(kernel, (m * c, const(c), m * c, m * c), envs("m", [1], [7], [123]))


def geglu(dtype: torch.dtype) -> Sample:
    """(m, 2 * 320) -> (m, 320)"""
    m, c = symbol("m"), 320
    w = _writer(dtype)
    value, gate = w.load(0, index(r=2 * c, c=1)), w.load(0, index(c, r=2 * c, c=1))
    w.store(1, index(r=c, c=1), w.apply("mul", value, w.apply("gelu", gate)))
    kernel = LoopKernel(
        "geglu",
        Schedule.POINTWISE,
        (axis("r", m),),
        (axis("c", c),),
        reads(dtype) + writes(dtype),
        w.take(),
    )
    return Sample(kernel, (m * (2 * c), m * c), envs("m", [1], [7], [123]))


def layer_norm(dtype: torch.dtype, c: int = 320) -> Sample:
    """residual add, side store of the sum, LayerNorm with affine"""
    m = symbol("m")
    w = _writer(dtype)
    at, lane = index(r=c, c=1), index(c=1)
    x = w.apply("add", w.load(0, at), w.load(1, at))
    w.store(4, at, x)
    mean, var = w.reduce("moments", x)
    rstd = w.apply("rsqrt", w.apply("add", var, w.literal(1e-5)))
    y = w.apply("mul", w.apply("sub", x, mean), rstd)
    y = w.apply("add", w.apply("mul", y, w.load(2, lane)), w.load(3, lane))
    w.store(5, at, y)
    kernel = LoopKernel(
        "layer_norm",
        Schedule.ROW,
        (axis("r", m),),
        (axis("c", c, reduced=True),),
        reads(dtype, dtype, dtype, dtype) + writes(dtype, dtype),
        w.take(),
    )
    numels = (m * c, m * c, const(c), const(c), m * c, m * c)
    return Sample(kernel, numels, envs("m", [1], [7], [123]))


def softmax(dtype: torch.dtype) -> Sample:
    m, k = symbol("m"), symbol("k")
    w = _writer(dtype)
    at = index(r=k, c=1)
    x = w.load(0, at)
    (top,) = w.reduce("amax", x)
    e = w.apply("exp", w.apply("sub", x, top))
    (total,) = w.reduce("sum", e)
    w.store(1, at, w.apply("div", e, total))
    kernel = LoopKernel(
        "softmax",
        Schedule.ROW,
        (axis("r", m),),
        (axis("c", k, reduced=True),),
        reads(dtype) + writes(dtype),
        w.take(),
    )
    return Sample(kernel, (m * k, m * k), envs("m k", [1, 1], [7, 123], [3, 1000]))


def row_sum(dtype: torch.dtype) -> Sample:
    """sum and mean of each row; the mean divides by a size"""
    m, k = symbol("m"), symbol("k")
    stats = compute_dtype(dtype)
    w = _writer(dtype)
    (total,) = w.reduce("sum", w.load(0, index(r=k, c=1)))
    w.store(1, index(r=1), total)
    w.store(2, index(r=1), w.apply("div", total, w.literal(k)))
    kernel = LoopKernel(
        "row_sum",
        Schedule.ROW,
        (axis("r", m),),
        (axis("c", k, reduced=True),),
        reads(dtype) + writes(stats, stats),
        w.take(),
    )
    return Sample(kernel, (m * k, m, m), envs("m k", [1, 1], [7, 123], [3, 12345]))


def row_range(dtype: torch.dtype) -> Sample:
    """amax - amin of each row, over two col axes of a padded matrix"""
    m, k = symbol("m"), symbol("k")
    w = _writer(dtype)
    x = w.load(0, index(2, r=k * 8, g=k, c=1))
    (top,) = w.reduce("amax", x)
    (bottom,) = w.reduce("amin", x)
    w.store(1, index(r=1), w.apply("sub", top, bottom))
    kernel = LoopKernel(
        "row_range",
        Schedule.ROW,
        (axis("r", m),),
        (axis("g", 4, reduced=True), axis("c", k, reduced=True)),
        reads(dtype) + writes(dtype),
        w.take(),
    )
    return Sample(kernel, (m * k * 8 + 2, m), envs("m k", [1, 1], [7, 123], [3, 77]))


def column_sum(dtype: torch.dtype) -> Sample:
    """(m, c) -> (c,): the gradient of a bias"""
    m, c = symbol("m"), symbol("c")
    stats = compute_dtype(dtype)
    w = _writer(dtype)
    x = w.load(0, index(r=c, c=1))
    (total,) = w.reduce("sum", x)
    body = w.take()
    w.store(1, index(c=1), total)
    kernel = LoopKernel(
        "column_sum",
        Schedule.COLUMN,
        (axis("r", m, reduced=True),),
        (axis("c", c),),
        reads(dtype) + writes(stats),
        body,
        w.take(),
    )
    return Sample(kernel, (m * c, c), envs("m c", [1, 1], [7, 123], [1000, 320], [12345, 7]))


def column_extremes(dtype: torch.dtype) -> Sample:
    """amax and amin over rows and the inner lanes of each group, in one pass"""
    n, m = symbol("n"), symbol("m")
    w = _writer(dtype)
    x = w.load(0, index(n=m * 24, r=24, g=6, cg=1))
    (top,) = w.reduce("amax", x)
    (bottom,) = w.reduce("amin", w.apply("mul", x, x))
    body = w.take()
    w.store(1, index(n=4, g=1), top)
    w.store(2, index(n=4, g=1), bottom)
    kernel = LoopKernel(
        "column_extremes",
        Schedule.COLUMN,
        (axis("n", n), axis("r", m, reduced=True)),
        (axis("g", 4), axis("cg", 6, reduced=True)),
        reads(dtype) + writes(dtype, dtype),
        body,
        w.take(),
    )
    return Sample(kernel, (n * m * 24, n * 4, n * 4), envs("n m", [1, 1], [2, 7], [3, 1231]))


GROUPS, PER_GROUP = 32, 10
CHANNELS = GROUPS * PER_GROUP


def group_norm_stats(dtype: torch.dtype) -> Sample:
    """x + bias + temb of an NHWC tensor, stored, and mean and rstd of each group"""
    n, hw = symbol("n"), symbol("h") * symbol("w")
    stats = compute_dtype(dtype)
    w = _writer(dtype)
    at = index(n=hw * CHANNELS, hw=CHANNELS, g=PER_GROUP, cg=1)
    x = w.apply("add", w.load(0, at), w.load(1, index(g=PER_GROUP, cg=1)))
    x = w.apply("add", x, w.load(2, index(n=CHANNELS, g=PER_GROUP, cg=1)))
    w.store(3, at, x)
    mean, var = w.reduce("moments", x)
    body = w.take()
    rstd = w.apply("rsqrt", w.apply("add", var, w.literal(1e-5)))
    w.store(4, index(n=GROUPS, g=1), mean)
    w.store(5, index(n=GROUPS, g=1), rstd)
    kernel = LoopKernel(
        "group_norm_stats",
        Schedule.COLUMN,
        (axis("n", n), axis("hw", hw, reduced=True)),
        (axis("g", GROUPS), axis("cg", PER_GROUP, reduced=True)),
        reads(dtype, dtype, dtype) + writes(dtype, stats, stats),
        body,
        w.take(),
    )
    size = n * hw * CHANNELS
    numels = (size, const(CHANNELS), n * CHANNELS, size, n * GROUPS, n * GROUPS)
    return Sample(kernel, numels, envs("n h w", [1, 1, 1], [2, 3, 5], [3, 31, 33]))


def group_norm_silu(dtype: torch.dtype) -> Sample:
    """silu((x - mean) * rstd * weight + bias), NHWC"""
    n, hw = symbol("n"), symbol("h") * symbol("w")
    stats = compute_dtype(dtype)
    w = _writer(dtype)
    at, lane = index(n=hw * CHANNELS, hw=CHANNELS, g=PER_GROUP, cg=1), index(g=PER_GROUP, cg=1)
    group = index(n=GROUPS, g=1)
    x = w.apply("mul", w.apply("sub", w.load(0, at), w.load(1, group)), w.load(2, group))
    x = w.apply("add", w.apply("mul", x, w.load(3, lane)), w.load(4, lane))
    w.store(5, at, w.apply("silu", x))
    kernel = LoopKernel(
        "group_norm_silu",
        Schedule.POINTWISE,
        (axis("n", n), axis("hw", hw)),
        (axis("g", GROUPS), axis("cg", PER_GROUP)),
        reads(dtype, stats, stats, dtype, dtype) + writes(dtype),
        w.take(),
    )
    size, channels = n * hw * CHANNELS, const(CHANNELS)
    numels = (size, n * GROUPS, n * GROUPS, channels, channels, size)
    return Sample(kernel, numels, envs("n h w", [1, 1, 1], [2, 3, 5], [3, 31, 33]))


def cat_channels(dtype: torch.dtype) -> Sample:
    """(m, 40) and (m, 23) -> (m, 63)"""
    m, a, b = symbol("m"), 40, 23
    w = _writer(dtype)
    lane = w.position(index(c=1))
    split = w.literal(a, I64)
    first, second = (w.apply(op, lane, split, dtype=BOOL) for op in ("lt", "ge"))
    x = w.load(0, index(r=a, c=1), guard=first)
    y = w.load(1, index(-a, r=b, c=1), guard=second)
    w.store(2, index(r=a + b, c=1), w.apply("where", first, x, y))
    kernel = LoopKernel(
        "cat_channels",
        Schedule.POINTWISE,
        (axis("r", m),),
        (axis("c", a + b),),
        reads(dtype, dtype) + writes(dtype),
        w.take(),
    )
    return Sample(kernel, (m * a, m * b, m * (a + b)), envs("m", [1], [7], [123]))


def upsample_nearest(dtype: torch.dtype) -> Sample:
    """NHWC, factor 2"""
    n, h, w_, c = symbol("n"), symbol("h"), symbol("w"), 36
    w = _writer(dtype)
    x = w.load(0, index(n=h * w_ * c, h=w_ * c, w=c, c=1))
    w.store(
        1,
        index(n=h * w_ * (4 * c), h=w_ * (4 * c), i=w_ * (2 * c), w=2 * c, j=c, c=1),
        x,
    )
    kernel = LoopKernel(
        "upsample_nearest",
        Schedule.POINTWISE,
        (axis("n", n), axis("h", h), axis("i", 2), axis("w", w_), axis("j", 2)),
        (axis("c", c),),
        reads(dtype) + writes(dtype),
        w.take(),
    )
    size = n * h * w_ * c
    return Sample(kernel, (size, size * 4), envs("n h w", [1, 1, 1], [2, 3, 5], [1, 17, 9]))


def embeddings_norm(dtype: torch.dtype) -> Sample:
    """Rows of a table by token, rows of another by position, LayerNorm"""
    b, s, c = symbol("b"), symbol("s"), 320
    w = Writer(compute_dtype(dtype))
    token = w.place(w.load(0, index(b=s, s=1), I64), 4)
    x = w.load(1, index(c=1), lookups=((token, const(c)),))
    place = w.place(w.position(index(s=1)), s)
    x = w.apply("add", x, w.load(2, index(c=1), lookups=((place, const(c)),)))
    mean, var = w.reduce("moments", x)
    y = w.apply("sub", x, mean)
    w.store(3, index(b=s * c, s=c, c=1), w.apply("mul", y, w.apply("rsqrt", var)))
    kernel = LoopKernel(
        "embeddings_norm",
        Schedule.ROW,
        (axis("b", b), axis("s", s)),
        (axis("c", c, reduced=True),),
        reads(I64, dtype, dtype) + writes(dtype),
        w.take(),
    )
    numels = (b * s, const(4 * c), s * c, b * s * c)
    return Sample(kernel, numels, envs("b s", [1, 1], [2, 7], [3, 41]))


def gather_wrapped(dtype: torch.dtype) -> Sample:
    """x[n, i[n, c]] with indices from both ends, nothing where i is odd"""
    n, c = symbol("n"), symbol("c")
    w = _writer(dtype)
    i = w.load(1, index(n=c, c=1), I64)
    even = w.apply(
        "eq", w.apply("bitwise_and", i, w.literal(1, I64), dtype=I64), w.literal(0, I64), dtype=BOOL
    )
    wide = w.apply(
        "sub", w.apply("mul", i, w.literal(3, I64), dtype=I64), w.literal(6, I64), dtype=I64
    )
    at = w.place(wide, 6, wraps=True, guard=even)  # -6, -3, 0, 3
    other = w.place(w.apply("rsub", i, w.literal(2, I64), dtype=I64, alpha=1), 6, wraps=True)
    x = w.load(0, index(n=6), guard=even, lookups=((at, const(1)),))
    w.store(
        2, index(n=c, c=1), w.apply("add", x, w.load(0, index(n=6), lookups=((other, const(1)),)))
    )
    kernel = LoopKernel(
        "gather_wrapped",
        Schedule.POINTWISE,
        (axis("n", n),),
        (axis("c", c),),
        reads(dtype, I64) + writes(dtype),
        w.take(),
    )
    return Sample(kernel, (n * 6, n * c, n * c), envs("n c", [1, 1], [2, 7], [33, 129]))


def nchw_to_nhwc(dtype: torch.dtype) -> Sample:
    n, hw, c = symbol("n"), symbol("h") * symbol("w"), symbol("c")
    w = _writer(dtype)
    x = w.load(0, index(n=c * hw, c=hw, hw=1))
    w.store(1, index(n=c * hw, hw=c, c=1), x)
    kernel = LoopKernel(
        "nchw_to_nhwc",
        Schedule.POINTWISE,
        (axis("n", n), axis("hw", hw)),
        (axis("c", c),),
        reads(dtype) + writes(dtype),
        w.take(),
    )
    size = n * hw * c
    return Sample(kernel, (size, size), envs("n h w c", [1, 1, 1, 1], [2, 3, 5, 7], [1, 33, 9, 36]))


def timestep_embedding(dtype: torch.dtype) -> Sample:
    """cat(cos(t * f), sin(t * f)) with f = 10000 ** (-i / 160), from integer steps"""
    n, half = symbol("n"), 160
    compute = compute_dtype(dtype)
    w = _writer(dtype)
    t = w.apply("cast", w.load(0, index(n=1), I64), dtype=compute)
    i = w.apply("cast", w.position(index(i=1)), dtype=compute)
    f = w.apply("exp", w.apply("mul", i, w.literal(-math.log(10000) / half)))
    angle = w.apply("mul", t, f)
    first = w.apply("eq", w.position(index(p=1)), w.literal(0, I64), dtype=BOOL)
    y = w.apply("where", first, w.apply("cos", angle), w.apply("sin", angle))
    w.store(1, index(n=2 * half, p=half, i=1), y)
    kernel = LoopKernel(
        "timestep_embedding",
        Schedule.POINTWISE,
        (axis("n", n),),
        (axis("p", 2), axis("i", half)),
        reads(I64) + writes(dtype),
        w.take(),
    )
    return Sample(kernel, (n, n * (2 * half)), envs("n", [1], [7]))


def casts(dtype: torch.dtype) -> Sample:
    """a rounding to fp16 and one to bf16 in the middle, an integer and a bool output"""
    n = symbol("n")
    w = _writer(dtype)
    x = w.load(0, index(i=1))
    y = w.apply("cast", w.apply("mul", x, w.literal(3.1)), dtype=torch.float16)
    y = w.apply("cast", w.apply("add", y, w.literal(1.0, F32), dtype=F32), dtype=torch.bfloat16)
    z = w.apply("cast", y, dtype=w.compute)
    w.store(1, index(i=1), z)
    w.store(2, index(i=1), w.apply("cast", y, dtype=I64))
    w.store(3, index(i=1), w.apply("gt", z, w.literal(0.0), dtype=BOOL))
    kernel = LoopKernel(
        "casts",
        Schedule.POINTWISE,
        (),
        (axis("i", n),),
        reads(dtype) + writes(dtype, I64, BOOL),
        w.take(),
    )
    return Sample(kernel, (n, n, n, n), envs("n", [1], [7], [12345]))


def pointwise(
    op: str,
    args: Sequence[torch.dtype],
    out: torch.dtype,
    attrs: Mapping[str, float] | None = None,
) -> Sample:
    """One row of the operator table on flat operands; ``cast`` converts to ``out``."""
    n = symbol("n")
    w = Writer(compute_dtype(out))
    names = [w.load(k, index(i=1), compute_dtype(dtype)) for k, dtype in enumerate(args)]
    value = w.apply(op, *names, dtype=out, **dict(attrs or {}))
    w.store(len(args), index(i=1), value)
    kernel = LoopKernel(
        f"pointwise_{op}",
        Schedule.POINTWISE,
        (),
        (axis("i", n),),
        reads(*args) + writes(out),
        w.take(),
    )
    return Sample(kernel, (n,) * (len(args) + 1), envs("n", [1], [1000]))


def every_row(dtype: torch.dtype) -> LoopKernel:
    """All pointwise rows that compute in this type, each stored to a param of its own."""
    w = Writer(compute_dtype(dtype))
    flags = [w.load(k, index(i=1), BOOL) for k in range(3)]
    numbers = [w.load(3 + k, index(i=1)) for k in range(3)]
    outs: list[torch.dtype] = []
    for row in POINTWISE:
        if Types.of(dtype) not in row.types:
            continue
        args = (flags if row.operands is Operands.TRUTH else numbers)[: row.arity]
        if row.operands is Operands.SELECT:
            args = [flags[0], *numbers[:2]]
        is_test = row.operands in (Operands.PROMOTED, Operands.TRUTH)
        outs.append(BOOL if is_test else dtype)
        value = w.apply(row.name, *args, dtype=outs[-1], **row.attrs)
        w.store(5 + len(outs), index(i=1), value)
    params = reads(BOOL, BOOL, BOOL, dtype, dtype, dtype) + writes(*outs)
    return LoopKernel(
        "every_row", Schedule.POINTWISE, (), (axis("i", symbol("n")),), params, w.take()
    )


SAMPLES: Mapping[str, Callable[[torch.dtype], Sample]] = {
    build.__name__: build
    for build in (
        silu_flat,
        bias_residual,
        geglu,
        layer_norm,
        softmax,
        row_sum,
        row_range,
        column_sum,
        column_extremes,
        group_norm_stats,
        group_norm_silu,
        cat_channels,
        upsample_nearest,
        embeddings_norm,
        gather_wrapped,
        nchw_to_nhwc,
        timestep_embedding,
        casts,
    )
}

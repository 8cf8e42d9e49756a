"""The moves of a random program: each draws operands that it fits and adds a line.

Two kinds of care: numbers stay within what half types hold, and whatever is not continuous is
applied to exact values only, since two correct roundings may fall on different sides of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from strop.ir.dims import const, product
from tests.fuzz.placing import (
    cat,
    diagonal,
    flatten,
    pad,
    permute,
    pool,
    repeat,
    select,
    shuffle,
    slices,
    squeeze,
    stack,
    symbolic_slice,
    triangle,
    turned,
    unflatten,
    unsqueeze,
    upsample,
)
from tests.fuzz.programs import ONE
from tests.fuzz.rotating import regrouped, rotation, windows
from tests.fuzz.values import LARGEST, Draft, Value, broadcast, is_width, widest
from tests.fuzz.writing import complex_rotation, strided_write

# Python text -> the bound of the result from that of the operand
SMOOTH: dict[str, Callable[[float], float]] = {
    "torch.tanh({0})": lambda m: 1,
    "torch.sigmoid({0})": lambda m: 1,
    "F.silu({0})": lambda m: m,
    "F.gelu({0})": lambda m: m,
    "F.gelu({0}, approximate='tanh')": lambda m: m,
    "torch.sin({0})": lambda m: 1,
    "torch.cos({0})": lambda m: 1,
    "torch.erf({0})": lambda m: 1,
    "torch.sqrt({0}.abs() + 0.5)": lambda m: m**0.5 + 1,
    "{0} * {0}": lambda m: m * m,
    "torch.rsqrt({0} * {0} + 1)": lambda m: 1,
    "torch.log({0}.abs() + 1)": lambda m: m,
    "F.softplus({0})": lambda m: m + 1,
    "F.mish({0})": lambda m: m + 1,
    "F.elu({0})": lambda m: m + 1,
    "torch.exp(-{0}.abs())": lambda m: 1,
    "torch.reciprocal({0}.abs() + 1)": lambda m: 1,
    "1.5 - {0} * 0.5": lambda m: 2 + m,
    "{0} / 3": lambda m: m,
    "2 / ({0}.abs() + 2)": lambda m: 1,
    "torch.atan({0})": lambda m: 2,
    "F.logsigmoid({0})": lambda m: m + 1,
    "torch.lerp({0}, {0} * 2, 0.25)": lambda m: 2 * m,
    "torch.addcmul({0}, {0}, {0}, value=0.5)": lambda m: m + m * m,
    "torch.pow({0}, 3)": lambda m: m**3,
    "torch.nan_to_num({0})": lambda m: m,
}
EXACT: tuple[str, ...] = (  # an exact value stays one
    "-{0}",
    "{0}.abs()",
    "torch.relu({0})",
    "{0}.clamp(-2, 1)",
    "{0}.clamp_min(0)",
    "+{0}",
    "F.hardtanh({0})",
    "{0} * 1",
    "{0} / 1",
    "{0} + 0",
    "torch.where({0} > 0, {0}, -{0})",
    "{0}.masked_fill({0} < 1, 2)",
)
STEPS: dict[str, str] = {  # not continuous; the type of the result
    "{0}.floor()": "",
    "{0}.ceil()": "",
    "{0}.round()": "",
    "{0}.trunc()": "",
    "torch.sign({0})": "",
    "{0} > 0.5": "bool",
    "{0} <= 1": "bool",
    "{0} == 0": "bool",
    "{0} != 1": "bool",
    "{0}.to(i64)": "i64",
    "{0}.to(torch.bool)": "bool",
    "torch.logical_not({0})": "bool",
    "torch.isfinite({0})": "bool",
    "{0}.to(i32)": "i32",
    "torch.signbit({0})": "bool",
}
WHOLE: dict[str, Callable[[float], float]] = {  # of integers
    "{0} + 3": lambda m: m + 3,
    "{0} * 2 - 1": lambda m: 2 * m + 1,
    "{0} // 3": lambda m: m + 1,
    "{0} % 5": lambda m: 5,
    "{0} & 6": lambda m: m + 8,
    "{0} ^ 3": lambda m: m + 4,
    "~{0}": lambda m: m + 1,
    "{0}.clamp(0, 3)": lambda m: 3,
    "{0} >> 1": lambda m: m,
    "torch.div({0}, 2, rounding_mode='trunc')": lambda m: m,
}
PAIRS: dict[str, Callable[[float, float], float]] = {
    "{0} + {1}": lambda m, n: m + n,
    "{0} - {1}": lambda m, n: m + n,
    "{0} * {1}": lambda m, n: m * n,
    "{0} / ({1}.abs() + 1)": lambda m, n: m,
    "torch.add({0}, {1}, alpha=0.5)": lambda m, n: m + n,
    "torch.atan2({0}, {1}.abs() + 1)": lambda m, n: 2,
    "torch.hypot({0}, {1} + 9)": lambda m, n: m + n + 9,
}
CHOICES = ("torch.maximum({0}, {1})", "torch.minimum({0}, {1})")
COMPARISONS = ("{0} < {1}", "{0} >= {1}", "{0} == {1}", "{0} != {1}")
LOGIC = ("{0} & {1}", "{0} | {1}", "{0} ^ {1}")
PROMOTED = {("f16", "bf16"): "f32", ("bf16", "f16"): "f32"}
ORDER = ("bool", "u8", "i8", "i32", "i64", "f16", "bf16", "f32", "f64")


def is_float(v: Value) -> bool:
    return v.is_float


def promoted(x: Value, y: Value) -> str:
    """Of two values; one of rank 0 only decides between bool, integer and float."""
    first, second = x.dtype, y.dtype
    if x.rank and not y.rank and x.is_float >= y.is_float and (x.dtype != "bool"):
        return first if x.is_float or not y.is_float else second
    if y.rank and not x.rank and y.is_float >= x.is_float and (y.dtype != "bool"):
        return second
    return PROMOTED.get((first, second)) or max(first, second, key=ORDER.index)


# pointwise


def smooth(d: Draft) -> None:
    x, text = d.pick(is_float), d.one_of(list(SMOOTH))
    d.like(x, text.format(x.name), bound=SMOOTH[text](x.bound), is_exact=False)


def exactly(d: Draft) -> None:
    x = d.pick(lambda v: v.dtype in ("f16", "f32", "bf16", "i64", "i32"))
    # +x is x itself
    text = d.one_of(EXACT if x.is_float else [t for t in EXACT if "/" not in t])
    d.like(x, text.format(x.name), bound=max(x.bound, 2), root=x.root if text == "+{0}" else None)


def step(d: Draft) -> None:
    x, text = d.pick(lambda v: v.is_float and v.is_exact), d.one_of(list(STEPS))
    d.like(
        x,
        text.format(x.name),
        dtype=STEPS[text] or x.dtype,
        bound=x.bound + 1 if STEPS[text] != "bool" else 1,
    )


def whole(d: Draft) -> None:
    x, text = d.pick(lambda v: v.dtype in ("i64", "i32")), d.one_of(list(WHOLE))
    d.like(x, text.format(x.name), bound=WHOLE[text](x.bound))


def pair(d: Draft) -> None:
    x = d.pick(is_float)
    y, text = d.partner(x, lambda v: v.dtype != "bool"), d.one_of(list(PAIRS))
    shape = broadcast(x.shape, y.shape)
    assert shape is not None
    d.add(text.format(x.name, y.name), promoted(x, y), shape, PAIRS[text](x.bound, y.bound))


def choice(d: Draft) -> None:
    x = d.pick(lambda v: True)
    y, text = d.partner(x, lambda v: v.dtype == x.dtype), d.one_of(CHOICES)
    shape = broadcast(x.shape, y.shape)
    assert shape is not None
    d.add(
        text.format(x.name, y.name),
        x.dtype,
        shape,
        max(x.bound, y.bound),
        is_exact=x.is_exact and y.is_exact,
    )


def whole_pair(d: Draft) -> None:
    x = d.pick(lambda v: v.is_integer)
    # u8 and i8 make int16, which no value has
    both = {"u8": "i8", "i8": "u8"}
    y = d.partner(x, lambda v: v.is_integer and v.dtype != both.get(x.dtype))
    text = d.one_of(("{0} + {1}", "{0} * {1}", *LOGIC))
    shape = broadcast(x.shape, y.shape)
    assert shape is not None
    bound = max(x.bound * y.bound, x.bound + y.bound, 8)
    d.add(text.format(x.name, y.name), promoted(x, y), shape, bound, is_exact=True)


def comparison(d: Draft) -> None:
    x = d.pick(lambda v: v.is_exact)
    y, text = d.partner(x, lambda v: v.is_exact), d.one_of(COMPARISONS)
    shape = broadcast(x.shape, y.shape)
    assert shape is not None
    d.add(text.format(x.name, y.name), "bool", shape, 1, is_exact=True)


def logic(d: Draft) -> None:
    x = d.pick(lambda v: v.dtype == "bool")
    y, text = d.partner(x, lambda v: v.dtype == "bool"), d.one_of(LOGIC)
    shape = broadcast(x.shape, y.shape)
    assert shape is not None
    d.add(text.format(x.name, y.name), "bool", shape, 1, is_exact=True)


def where(d: Draft) -> None:
    m = d.pick(lambda v: v.dtype == "bool")
    x = d.partner(m, lambda v: True)
    y = d.partner(x, lambda v: v.dtype == x.dtype and broadcast(m.shape, v.shape) is not None)
    shape = broadcast(m.shape, broadcast(x.shape, y.shape) or ())
    if shape is None:
        return
    text = f"torch.where({m.name}, {x.name}, {y.name})"
    d.add(text, x.dtype, shape, max(x.bound, y.bound), is_exact=x.is_exact and y.is_exact)


def cast(d: Draft) -> None:
    x = d.pick(lambda v: v.bound <= 64 or v.is_float)
    to = d.one_of(("f32", "f16", "bf16", "f64"))
    root = x.root if to == x.dtype else None
    d.like(x, f"{x.name}.to({to})", dtype=to, is_exact=x.is_exact and x.bound <= 32, root=root)


# reductions


def reduce(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 0 and (v.is_float or v.is_exact))
    one, every = d.dim(x), set(range(x.rank))
    # one dim, two, those on both sides of one, or all
    dims = sorted(d.one_of(({one}, {one}, {one, d.dim(x)}, every - {one} or {one}, every)))
    keep = d.chance()
    shape = [ONE if i in dims else n for i, n in enumerate(x.shape) if keep or i not in dims]
    count = prod(widest(x.shape[i]) for i in dims)
    where = f"({', '.join(map(str, dims))},), keepdim={keep}"
    kind = d.one_of(_REDUCTIONS[x.dtype if x.dtype == "bool" else x.is_float])
    text, dtype, bound, exact = kind
    bound = {
        "sum": x.bound * count,
        "same": x.bound,
        "square": x.bound**2,
        "one": 1,
        "log": x.bound + 5,
    }[bound]
    d.add(
        text.format(x.name, where),
        dtype or x.dtype,
        shape,
        max(bound, 1),
        is_exact=exact and x.is_exact,
    )


def against_all(d: Draft) -> None:
    """A whole tensor decides about each element of one: flags, clamps, norms."""
    x = d.pick(lambda v: v.rank > 0 and v.is_float)
    y = d.pick(lambda v: v.rank > 0 and v.is_float)
    text = d.one_of(
        (
            "torch.where(torch.isinf({1}).any(), {0} - 1, {0})",
            "torch.where(({1} > 9).all(), {0} - 1, {0})",
            "{0} * {1}.mean().to({0}.dtype).tanh()",
            "{0} / ({1}.norm().to({0}.dtype) + 1)",
            "{0} + ({1} - {1}.amax()).exp().sum().to({0}.dtype).tanh()",
        )
    )
    d.like(x, text.format(x.name, y.name), bound=x.bound + 1, is_exact=False)


# text, type of the result, bound, whether exact values give exact ones
_FLOAT_REDUCTIONS = (
    ("{0}.sum({1})", "", "sum", False),
    ("{0}.mean({1})", "", "same", False),
    ("{0}.amax({1})", "", "same", True),
    ("{0}.amin({1})", "", "same", True),
    ("torch.var({0}, {1}, correction=0)", "", "square", False),
    ("sum(torch.var_mean({0}, {1}, correction=0))", "", "square", False),
    ("torch.logsumexp({0}, {1})", "", "log", False),
    ("torch.linalg.vector_norm({0}, 2, {1})", "", "sum", False),
)
_REDUCTIONS = {
    True: _FLOAT_REDUCTIONS,
    False: (("{0}.sum({1})", "i64", "sum", True), ("{0}.amax({1})", "", "same", True)),
    "bool": (
        ("{0}.any({1})", "bool", "one", True),
        ("{0}.all({1})", "bool", "one", True),
        ("{0}.sum({1})", "i64", "sum", True),
    ),
}


def along(d: Draft) -> None:
    """Softmaxes, and what torch computes along a dim."""
    x = d.pick(lambda v: v.rank > 0 and v.is_float)
    dim = d.dim(x)
    text, bound = d.one_of(
        (
            ("{0}.softmax({1})", 1.0),
            ("{0}.log_softmax({1})", 2 * x.bound + 5),
            ("{0}.cumsum({1})", x.bound * widest(x.shape[dim])),
            ("F.normalize({0}, dim={1})", 1.0),
            ("{0}.sort({1}).values", x.bound),
        )
    )
    d.like(x, text.format(x.name, dim), bound=bound, is_exact=False)


def norm(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 1 and v.is_float)
    last = x.shape[-1]
    if last.is_const and d.chance() and x.dtype == "f32":
        w = d.weight((last.value,))
        text = d.one_of(
            (f"F.layer_norm({{0}}, ({last},), {w}, {w})", f"F.rms_norm({{0}}, ({last},), {w})")
        )
    else:
        text = d.one_of(("F.layer_norm({0}, {0}.shape[-1:])", "F.rms_norm({0}, {0}.shape[-1:])"))
    d.like(x, text.format(x.name), bound=9, is_exact=False)


def group_norm(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 2 and v.is_float and v.shape[1].is_const)
    groups = d.one_of([g for g in (1, 2, 3, 4) if x.shape[1].is_multiple_of(g)])
    d.like(x, f"F.group_norm({x.name}, {groups})", bound=20, is_exact=False)


# what a library does


def linear(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 0 and v.dtype == "f32" and is_width(v.shape[-1]))
    inner, outer = x.shape[-1].value, d.one_of((4, 3, 1))
    w = d.weight((outer, inner))
    bias = f", {d.weight((outer,))}" if d.chance() else ""
    d.like(
        x,
        f"F.linear({x.name}, {w}{bias})",
        shape=[*x.shape[:-1], const(outer)],
        bound=x.bound * inner + 1,
        is_exact=False,
    )


def code_linear(d: Draft) -> None:
    """A product of int8 codes, of rows with a scale each, as quantised linears make it."""
    x = d.pick(lambda v: v.rank == 2 and v.is_float and v.is_exact and is_width(v.shape[-1]))
    inner, outer = x.shape[-1].value, d.one_of((5, 3, 1))
    codes = d.like(x, f"({x.name} * 8).round().clamp(-128, 127).to(i8)", dtype="i8", bound=128)
    weight = f"({d.weight((outer, inner))} * 8).to(i8)"
    shape = [x.shape[0], const(outer)]
    bound = 128 * 8 * inner
    text = f"torch._int_mm({codes.name}, {weight}.t())"
    sums = d.add(text, "i32", shape, bound, is_exact=True)
    scale = d.one_of(("0.0078125", f"({x.name}.abs().amax(-1, keepdim=True) + 1)"))
    d.add(
        f"{sums.name} * {scale}.to(f32)" if "(" in scale else f"{sums.name}.to(f32) * {scale}",
        "f32",
        shape,
        bound * (x.bound + 1),
        is_exact=False,
    )


def ragged_bag(d: Draft) -> None:
    """Bags of rows of a table, whose lengths are values; some have no row."""
    lengths = d.pick(lambda v: v.rank > 0 and v.dtype == "i64" and v.is_exact)
    ids = d.pick(lambda v: v.dtype == "i64" and v.is_exact)
    table, mode = d.weight((5, 3)), d.one_of(("sum", "mean", "max"))
    # torch does not survive a call without ids
    each, flat = (f"F.pad({v.name}.flatten().clamp(0, 4), (0, 1))" for v in (lengths, ids))
    begins = f"({each}.cumsum(0) - {each}).clamp(max={ids.name}.numel() + 1)"
    bags = [product(lengths.shape) + ONE, const(3)]
    text = f"F.embedding_bag({flat}, {table}, {begins}, mode='{mode}')"
    d.add(text, "f32", bags, LARGEST, is_exact=False)


def segments(d: Draft) -> None:
    """Sums of the elements that fall into each of a few segments, which values name."""
    x = d.pick(lambda v: v.rank > 0 and v.dtype == "f32" and v.is_exact)
    how = d.one_of(("index_add", "scatter_add"))
    where = f"{x.name}.flatten().to(i64).clamp(0, 3)"
    text = f"{x.name}.new_zeros(4).{how}(0, {where}, {x.name}.flatten())"
    d.add(text, "f32", [const(4)], x.bound * prod(map(widest, x.shape)), is_exact=False)


def matmul(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 1 and v.dtype == "f32")
    y = d.pick(
        lambda v: (
            v.rank == x.rank
            and v.dtype == "f32"
            and v.shape[:-2] == x.shape[:-2]
            and v.shape[-1] == x.shape[-1]
        )
    )
    d.add(
        f"{x.name} @ {y.name}.transpose(-1, -2)",
        "f32",
        [*x.shape[:-1], y.shape[-2]],
        x.bound * y.bound * widest(x.shape[-1]),
    )


def products_of_cats(d: Draft) -> None:
    """One value stands at the same place of two cats, whose other pieces are normed apart."""
    x = d.pick(lambda v: v.rank > 1 and v.dtype == "f32")
    y = d.pick(lambda v: v.shape == x.shape and v.dtype == x.dtype)
    one = f"F.rms_norm({y.name} * 0.5, {y.name}.shape[-1:])"
    other = f"F.rms_norm({y.name} + 1, {y.name}.shape[-1:])"
    pieces = d.one_of((f"{x.name}, {{0}}", f"{{0}}, {x.name}"))
    cats = [f"torch.cat([{pieces.format(own)}], -1)" for own in (one, other)]
    bound = max(x.bound, 9) ** 2 * 2 * widest(x.shape[-1])
    shape = [*x.shape[:-1], x.shape[-2]]
    d.add(f"{cats[0]} @ {cats[1]}.transpose(-1, -2)", "f32", shape, bound, is_exact=False)


def conv(d: Draft) -> None:
    x = d.pick(lambda v: v.rank == 4 and v.dtype == "f32" and is_width(v.shape[1]))
    channels, outer, size = x.shape[1].value, d.one_of((2, 4)), d.one_of((3, 1))
    w = d.weight((outer, channels, size, size))
    bias = d.weight((outer,)) if d.chance() else "None"
    text = f"F.conv2d({x.name}, {w}, {bias}, padding={size // 2})"
    shape = [x.shape[0], const(outer), *x.shape[2:]]
    d.like(x, text, shape=shape, bound=x.bound * channels * size**2 + 1, is_exact=False)


def lookup(d: Draft) -> None:
    x = d.pick(lambda v: v.dtype == "i64")
    table = d.weight((5, 3))
    d.add(
        f"F.embedding({x.name}.clamp(0, 4), {table})", "f32", [*x.shape, const(3)], 1, is_exact=True
    )


# mutation


def _target(d: Draft) -> Value:
    """Seldom an argument: modules that write into one run in eager."""
    into_argument = d.integer(0, 9) == 9
    return d.pick(lambda v: v.is_float and (v.root >= 0 or into_argument))


def in_place(d: Draft) -> None:
    x = _target(d)
    text, bound = d.one_of(
        (
            (".mul_(0.5)", x.bound),
            (".add_(1)", x.bound + 1),
            (".relu_()", x.bound),
            (".clamp_(-1, 1)", x.bound),
            (".tanh_()", 1.0),
        )
    )
    new = d.like(x, x.name + text, bound=max(bound, x.bound), root=x.root)
    d.overwritten(new, new.bound)


def in_place_pair(d: Draft) -> None:
    x = _target(d)
    y = d.pick(lambda v: v.is_float and broadcast(x.shape, v.shape) == x.shape)
    text = d.one_of((".add_({0})", ".sub_({0})", ".copy_({0})"))
    new = d.like(x, x.name + text.format(y.name), bound=x.bound + y.bound, root=x.root)
    d.overwritten(new, new.bound)


def nothing(d: Draft) -> None:
    """What other moves shrink to."""


Move = Callable[[Draft], None]
MOVES: tuple[Move, ...] = (
    nothing,
    smooth,
    smooth,
    exactly,
    step,
    whole,
    pair,
    pair,
    choice,
    whole_pair,
    comparison,
    logic,
    where,
    cast,
    reduce,
    reduce,
    reduce,
    against_all,
    along,
    norm,
    group_norm,
    permute,
    flatten,
    unflatten,
    slices,
    symbolic_slice,
    select,
    unsqueeze,
    squeeze,
    diagonal,
    turned,
    repeat,
    cat,
    cat,
    stack,
    pad,
    triangle,
    upsample,
    pool,
    shuffle,
    rotation,
    windows,
    regrouped,
    linear,
    matmul,
    products_of_cats,
    conv,
    lookup,
    code_linear,
    code_linear,
    ragged_bag,
    ragged_bag,
    segments,
    in_place,
    in_place_pair,
    strided_write,
    complex_rotation,
)
# what meets in one kernel: reductions, and values of the same kernel read at other places
STITCHED: tuple[Move, ...] = (
    nothing,
    smooth,
    pair,
    pair,
    pair,
    where,
    comparison,
    reduce,
    reduce,
    against_all,
    along,
    along,
    norm,
    turned,
    cat,
    cat,
    stack,
    pad,
    pad,
    slices,
    permute,
    flatten,
    unflatten,
    unsqueeze,
    repeat,
    triangle,
    diagonal,
    upsample,
    pool,
    symbolic_slice,
    strided_write,
    complex_rotation,
    rotation,
    rotation,
    windows,
    regrouped,
)
# what quantised and recommendation models are made of
CODED: tuple[Move, ...] = (
    nothing,
    code_linear,
    code_linear,
    ragged_bag,
    ragged_bag,
    segments,
    lookup,
    linear,
    norm,
    whole_pair,
    cast,
    pair,
    smooth,
    reduce,
    step,
    where,
    comparison,
    choice,
    cat,
)

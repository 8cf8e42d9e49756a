"""What PTX's arithmetic does to the 32 lanes of a warp, as numpy functions.

A part of ``ptx_machine``. Integers wrap; fp32 results are rounded once, fma's too but for ties of
its fp64 sum. ``.ftz`` flushes results, not operands; ``.approx`` is as good as numpy is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.kernels.ptx_instruction import (
    FULL,
    Array,
    Maker,
    Run,
    bits,
    dtype,
    lanes,
    merge,
    put,
    where,
)
from tests.kernels.ptx_text import (
    Imm,
    Operand,
    Pair,
    PtxError,
    Reg,
    Vector,
    width,
)


def _of(maker: Maker, count: int, function: Callable[..., Any], kind: str, result: str = "") -> Run:
    """A numpy function of ``count`` operands that takes ``out`` and ``where``."""
    into, *args = maker.args(count + 1)
    view, index = maker.dst(into, result or kind)
    sources = [maker.src(arg, kind) for arg in args]
    if count == 1:
        (a,) = sources
        return lambda w, m: function(a(w), out=w.views[view][index], where=where(m))
    a, b = sources
    return lambda w, m: function(a(w), b(w), out=w.views[view][index], where=where(m))


def _computed(
    maker: Maker, count: int, function: Callable[..., Any], kind: str, result: str = ""
) -> Run:
    """Any function of operands."""
    into, *args = maker.args(count + 1)
    view, index = maker.dst(into, result or kind)
    sources = [maker.src(arg, kind) for arg in args]
    return lambda w, m: put(w, view, index, m, function(*(s(w) for s in sources)))


_TINY = np.float32(2.0**-126)


def _flushed(function: Callable[..., Array]) -> Callable[..., Array]:
    def run(*args: Array) -> Array:
        found = function(*args)
        small = np.abs(found) < _TINY
        return np.where(small, np.copysign(np.float32(0), found), found)

    return run


def _fused(a: Array, b: Array, c: Array) -> Array:
    wide: Array = a.astype(np.float64) * b + c
    return wide.astype(np.float32)


def _shifted_left(a: Array, b: Array) -> Array:
    most = 8 * a.itemsize
    found: Array = a << np.minimum(b, most - 1).astype(a.dtype)
    return np.where(b >= most, a.dtype.type(0), found)


def _shifted_right(a: Array, b: Array) -> Array:
    most = 8 * a.itemsize
    found: Array = a >> np.minimum(b, most - 1).astype(a.dtype)
    return found if a.dtype.kind == "i" else np.where(b >= most, a.dtype.type(0), found)


_FLOATS: dict[str, tuple[int, Callable[..., Any]]] = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "mul": (2, np.multiply),
    "div": (2, np.divide),
    "max": (2, np.fmax),
    "min": (2, np.fmin),
    "neg": (1, np.negative),
    "abs": (1, np.abs),
    "copysign": (2, lambda a, b: np.copysign(b, a)),
    "fma": (3, _fused),
    "rcp": (1, lambda a: np.float32(1) / a),
    "sqrt": (1, np.sqrt),
    "ex2": (1, np.exp2),
    "rsqrt": (1, lambda a: np.float32(1) / np.sqrt(a)),
    "lg2": (1, np.log2),
    "tanh": (1, np.tanh),
}
_FLOAT_WORDS = ("rn", "ftz", "approx", "full", "NaN", "f32")
_NEEDS = {
    "fma": ("rn",),
    "rcp": ("rn", "approx"),
    "sqrt": ("rn", "approx"),
    "ex2": ("approx",),
    "div": ("rn", "approx", "full"),
    "rsqrt": ("approx",),
    "lg2": ("approx",),
    "tanh": ("approx",),
}


def _float(maker: Maker) -> Run:
    op, words = maker.words[0], maker.words[1:]
    maker.only(*_FLOAT_WORDS)
    count, function = _FLOATS[op]
    if op in _NEEDS and not set(_NEEDS[op]) & set(words):
        raise PtxError(f"one of {_NEEDS[op]} is wanted")
    if "NaN" in words:
        function = {"max": np.maximum, "min": np.minimum}[op]
    if "ftz" in words:
        return _computed(maker, count, _flushed(function), "f32")
    if isinstance(function, np.ufunc):
        return _of(maker, count, function, "f32")
    return _computed(maker, count, function, "f32")


_INTEGERS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "max": np.maximum,
    "min": np.minimum,
}


def _integer(maker: Maker) -> Run:
    op, kind = maker.words[0], maker.kind
    if op in ("mul", "mad"):
        return _multiply(maker)
    maker.only(kind)
    if op in ("neg", "abs"):
        return _of(maker, 1, np.negative if op == "neg" else np.abs, kind)
    if op in ("div", "rem"):
        return _divide(maker)
    return _of(maker, 2, _INTEGERS[op], kind)


def _multiply(maker: Maker) -> Run:
    op, part, kind = maker.words[0], maker.words[1], maker.kind
    maker.only("lo", "wide", kind)
    into, a, b, *more = maker.args(4 if op == "mad" else 3)
    bits_wide = width(kind) * (2 if part == "wide" else 1)
    result = kind[0] + str(bits_wide)
    if part not in ("lo", "wide"):
        raise PtxError(".lo or .wide is wanted")
    view, index = maker.dst(into, result)
    first, second, size = maker.src(a, kind), maker.src(b, kind), dtype(result)
    third = maker.src(more[0], result) if more else None

    def run(w: Any, m: int) -> None:
        found = first(w).astype(size) * second(w).astype(size)
        put(w, view, index, m, found if third is None else found + third(w))

    return run


def _divide(maker: Maker) -> Run:
    op, kind = maker.words[0], maker.kind
    into, a, b = maker.args(3)
    view, index = maker.dst(into, kind)
    first, second = maker.src(a, kind), maker.src(b, kind)
    rest = np.fmod if op == "rem" else None

    def run(w: Any, m: int) -> None:
        x, y = first(w), second(w)
        if bits(y == 0) & m:
            raise PtxError("division by zero")
        y = np.where(y == 0, y.dtype.type(1), y)
        if rest is not None:
            put(w, view, index, m, rest(x, y))
        else:
            put(w, view, index, m, (x - np.fmod(x, y)) // y)

    return run


def _logic(maker: Maker) -> Run:
    op, kind = maker.words[0], maker.kind
    maker.only(kind)
    if kind == "pred":
        return _logic_of_predicates(maker)
    if op == "not":
        return _of(maker, 1, np.invert, kind)
    functions = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    return _of(maker, 2, functions[op], kind)


_OF_MASKS: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}


def _logic_of_predicates(maker: Maker) -> Run:
    op = maker.words[0]
    into, a, *more = maker.args(2 if op == "not" else 3)
    index, first = maker.pred_dst(into), maker.pred(a)
    second = maker.pred(more[0]) if more else None
    function = _OF_MASKS["xor" if op == "not" else op]

    def run(w: Any, m: int) -> None:
        other = FULL if second is None else second(w)
        w.preds[index] = merge(w.preds[index], m, function(first(w), other))

    return run


def _shift(maker: Maker) -> Run:
    kind = maker.kind
    maker.only(kind)
    into, a, b = maker.args(3)
    view, index = maker.dst(into, kind)
    first, second = maker.src(a, kind), maker.src(b, "u32")
    function = _shifted_left if maker.words[0] == "shl" else _shifted_right
    return lambda w, m: put(w, view, index, m, function(first(w), second(w)))


_COMPARED: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _comparison(name: str, kind: str) -> Callable[[Array, Array], Array]:
    """Of floats, an ordered one is false of NaN and an unordered one true."""
    if kind[0] != "f":
        return _COMPARED[name]
    if name in ("num", "nan"):
        flip = name == "num"
        return lambda a, b: (np.isnan(a) | np.isnan(b)) ^ flip
    if name == "ne":
        return lambda a, b: (a < b) | (a > b)
    if name in _COMPARED:
        return _COMPARED[name]
    plain = _COMPARED[name.removesuffix("u")]
    return lambda a, b: plain(a, b) | np.isnan(a) | np.isnan(b)


def _setp(maker: Maker) -> Run:
    words, kind = maker.words[1:], maker.kind
    compare, joins = _comparison(words[0], kind), words[1] if len(words) == 3 else ""
    if len(words) not in (2, 3) or joins not in ("", "and", "or", "xor"):
        raise PtxError("form of setp not understood")
    into, a, b, *more = maker.args(4 if joins else 3)
    first, second = maker.src(a, kind), maker.src(b, kind)
    other = maker.pred(more[0]) if joins else None
    join = _OF_MASKS[joins or "and"]
    both = isinstance(into, Pair)
    index = maker.pred_dst(into.first if both else into)
    opposite = maker.pred_dst(into.second) if both else None

    def run(w: Any, m: int) -> None:
        found = bits(compare(first(w), second(w)))
        with_it = FULL if other is None else other(w)
        w.preds[index] = merge(w.preds[index], m, join(found, with_it))
        if opposite is not None:
            w.preds[opposite] = merge(w.preds[opposite], m, join(found ^ FULL, with_it))

    return run


def _selp(maker: Maker) -> Run:
    kind = maker.kind
    maker.only(kind)
    into, a, b, p = maker.args(4)
    view, index = maker.dst(into, kind)
    first, second, chosen = maker.src(a, kind), maker.src(b, kind), maker.pred(p)
    return lambda w, m: put(w, view, index, m, np.where(lanes(chosen(w)), first(w), second(w)))


def _mov(maker: Maker) -> Run:
    kind = maker.kind
    maker.only(kind)
    into, a = maker.args(2)
    if kind == "pred":
        index, given = maker.pred_dst(into), maker.pred(a)

        def run(w: Any, m: int) -> None:
            w.preds[index] = merge(w.preds[index], m, given(w))

        return run
    if isinstance(a, Vector):
        return _packed(maker, into, a)
    if isinstance(into, Vector):
        return _unpacked(maker, into, a)
    view, place = maker.dst(into, kind)
    source = maker.src(a, kind)
    return lambda w, m: put(w, view, place, m, source(w))


def _packed(maker: Maker, into: Operand, parts: Vector) -> Run:
    """The first part is the low one."""
    kind = maker.kind
    part = width(kind) // len(parts.items)
    view, index = maker.dst(into, kind)
    sources, size = [maker.src(each, f"b{part}") for each in parts.items], dtype(kind)

    def run(w: Any, m: int) -> None:
        found = sources[0](w).astype(size)
        for n, source in enumerate(sources[1:], 1):
            found |= source(w).astype(size) << size.type(n * part)
        put(w, view, index, m, found)

    return run


def _unpacked(maker: Maker, into: Vector, a: Operand) -> Run:
    kind = maker.kind
    part = width(kind) // len(into.items)
    source, size, small = maker.src(a, kind), dtype(kind), dtype(f"b{part}")
    targets = [
        (n, maker.dst(each, f"b{part}"))
        for n, each in enumerate(into.items)
        if isinstance(each, Reg)
    ]

    def run(w: Any, m: int) -> None:
        given = source(w).copy()
        for n, (view, index) in targets:
            put(w, view, index, m, (given >> size.type(n * part)).astype(small))

    return run


def half_bits(kind: str, x: Array) -> Array:
    """Rounds fp32 to nearest even, as bits."""
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    raw = x.view(np.uint32)
    near = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), near.astype(np.uint16))


def of_half(kind: str, raw: Array) -> Array:
    if kind == "f16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


_HALVES = ("f16", "bf16")
_INF = {"f16": 0x7C00, "bf16": 0x7F80}
_NAN = np.uint16(0x7FFF)  # that conversions make


def _cvt(maker: Maker) -> Run:
    *mods, to, of = maker.words[1:]
    if to in ("f16x2", "bf16x2"):
        return _cvt_pair(maker)
    into, a = maker.args(2)
    view, index = maker.dst(into, to)
    source, convert = maker.src(a, of), _conversion(mods, to, of)
    return lambda w, m: put(w, view, index, m, convert(source(w)))


def _conversion(mods: list[str], to: str, of: str) -> Callable[[Array], Array]:
    wanted = {"rn"} if to in (*_HALVES, "f32") and of != "f64" else set[str]()
    if to == "f32" and of in _HALVES:
        wanted = set()
    if to[0] in "us" and of == "f32":
        wanted = {"rzi", "rni", "rmi", "rpi"} & set(mods)
        if not wanted:
            raise PtxError("how to round is not said")
        rounds = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[wanted.pop()]
        limits = np.iinfo(dtype(to))
        return lambda x: np.clip(
            np.nan_to_num(rounds(x).astype(np.float64)), limits.min, limits.max
        ).astype(dtype(to))
    if set(mods) != wanted or "f64" in (to, of) or (to[0] in "us" and of in _HALVES):
        raise PtxError("conversion not known")
    if to in _HALVES:
        return lambda x: half_bits(to, x.astype(np.float32))
    if of in _HALVES:
        return lambda x: of_half(of, x)
    return lambda x: x.astype(dtype(to))


def _cvt_pair(maker: Maker) -> Run:
    """The first operand goes to the upper half. ``relu``: what is negative becomes 0, and NaN stays
    NaN (PTX ISA, section "Data Movement and Conversion Instructions: cvt")."""
    to = maker.words[-2]
    maker.only("rn", "relu", to, "f32")
    least = np.float32(0 if "relu" in maker.words else -np.inf)
    into, a, b = maker.args(3)
    view, index = maker.dst(into, "b32")
    high, low, kind = maker.src(a, "f32"), maker.src(b, "f32"), to.removesuffix("x2")

    def run(w: Any, m: int) -> None:
        parts = (half_bits(kind, np.maximum(each(w), least)) for each in (high, low))
        upper, lower = (np.where(raw & 0x7FFF > _INF[kind], _NAN, raw) for raw in parts)
        put(w, view, index, m, upper.astype(np.uint32) << np.uint32(16) | lower)

    return run


def _prmt(maker: Maker) -> Run:
    """Bytes of two registers, the first one's lowest first, by a digit each (PTX ISA, section
    "Data Movement and Conversion Instructions: prmt"). Signs are not repeated here."""
    maker.only("b32")
    into, a, b, chosen = maker.args(4)
    if not isinstance(chosen, Imm) or any(chosen.value >> 4 * n & 8 for n in range(4)):
        raise PtxError("a constant of four digits up to 7 is wanted")
    view, index = maker.dst(into, "b32")
    first, second, digits = maker.src(a, "b32"), maker.src(b, "b32"), int(chosen.value)

    def run(w: Any, m: int) -> None:
        both = first(w).astype(np.uint64) | second(w).astype(np.uint64) << np.uint64(32)
        found = np.zeros(both.shape, np.uint64)
        for n in range(4):
            byte = both >> np.uint64(8 * (digits >> 4 * n & 7)) & np.uint64(0xFF)
            found |= byte << np.uint64(8 * n)
        put(w, view, index, m, found.astype(np.uint32))

    return run


def _cvta(maker: Maker) -> Run:
    """A param's address, or one of global memory, is the same as a generic one."""
    maker.only("to", "param", "global", "u64")
    into, a = maker.args(2)
    view, index = maker.dst(into, "u64")
    source = maker.src(a, "u64")
    return lambda w, m: put(w, view, index, m, source(w))


def _typed(maker: Maker) -> Run:
    return _float(maker) if maker.kind[0] == "f" else _integer(maker)


MAKERS: dict[str, Callable[[Maker], Run]] = {
    **dict.fromkeys((*_FLOATS, "mul", "mad", "rem"), _typed),
    **dict.fromkeys(("and", "or", "xor", "not"), _logic),
    **dict.fromkeys(("shl", "shr"), _shift),
    "setp": _setp,
    "selp": _selp,
    "mov": _mov,
    "cvt": _cvt,
    "prmt": _prmt,
    "cvta": _cvta,
}

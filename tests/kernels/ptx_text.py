"""PTX read into instructions: the text of one entry, as our generators print it.

A part of ``ptx_machine``; the language is that of https://docs.nvidia.com/cuda/parallel-thread-execution/.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

LANES = 32


class PtxError(Exception):
    """What a kernel did wrong, or something of PTX that the machine does not know."""


@dataclass(frozen=True, slots=True)
class Reg:
    """``number`` is its own among all, ``index`` among those of its width; 1 bit: predicates."""

    name: str
    bits: int
    index: int
    number: int


@dataclass(frozen=True, slots=True)
class Imm:
    value: int | float


@dataclass(frozen=True, slots=True)
class Bits:
    """Of a float: ``0f3F800000``."""

    value: int
    bits: int


@dataclass(frozen=True, slots=True)
class Special:
    """%tid.x and others."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A param, or something in shared memory."""

    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    pass


@dataclass(frozen=True, slots=True)
class Not:
    of: Reg


@dataclass(frozen=True, slots=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two results: d|p."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Address:
    base: Operand
    offset: int
    coords: Vector | None = None


Operand = Reg | Imm | Bits | Special | Symbol | Sink | Not | Vector | Pair | Address


@dataclass(slots=True)
class Statement:
    """``@guard op.mods args``; the guard is flipped where it is @!."""

    text: str
    guard: Reg | None
    flipped: bool
    words: tuple[str, ...]  # of the op, without what stands behind ::
    args: tuple[Operand, ...]
    target: str = ""  # of a jump


@dataclass(slots=True)
class Param:
    name: str
    size: int  # in bytes
    offset: int


@dataclass(slots=True)
class Entry:
    name: str
    params: dict[str, Param]
    threads: int
    cluster: int
    registers: dict[str, Reg]
    shared: dict[str, int]  # offsets
    statics: int  # bytes of shared memory in front of what is asked for at a launch
    body: list[Statement]
    labels: dict[str, int] = field(default_factory=dict)


_WIDTHS = {
    "b8": 8,
    "u8": 8,
    "s8": 8,
    "b16": 16,
    "u16": 16,
    "s16": 16,
    "f16": 16,
    "bf16": 16,
    "b32": 32,
    "u32": 32,
    "s32": 32,
    "f32": 32,
    "b64": 64,
    "u64": 64,
    "s64": 64,
    "f64": 64,
    "pred": 1,
    "f16x2": 32,
    "bf16x2": 32,
}
_ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{(.*)\}\s*$", re.DOTALL)
_SHARED = re.compile(
    r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\w+)\s*(?:\[(\d*)\])?\s*;"
)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\w+)\s*(?:\[(\d+)\])?$")
_LABEL = re.compile(r"\s*([A-Za-z_$][\w$]*)\s*:(?!:)")


def width(kind: str) -> int:
    if kind not in _WIDTHS:
        raise PtxError(f"unknown type .{kind}")
    return _WIDTHS[kind]


def parse(text: str) -> Entry:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    if not (found := _ENTRY.search(text)):
        raise PtxError("no .visible .entry in the text")
    name, params, directives, body = found.groups()
    shared, statics = _shared(text[: found.start()] + body)
    threads = _directive(directives, "reqntid", 0)
    cluster = _directive(directives, "reqnctapercluster", 1)
    entry = Entry(name, _params(params), threads, cluster, {}, shared, statics, [])
    if not entry.threads or entry.threads % LANES:
        raise PtxError(f".reqntid {entry.threads}: warps are wanted, all of 32 threads")
    for statement in _SHARED.sub("", body).split(";"):
        _read(entry, statement.strip())
    return entry


def _directive(text: str, name: str, otherwise: int) -> int:
    found = re.search(rf"\.{name}\s+(\d+)((?:\s*,\s*\d+)*)", text)
    if found and set(re.findall(r"\d+", found[2])) - {"1"}:
        raise PtxError(f".{name} of more than one dim")
    return int(found[1]) if found else otherwise


def _params(text: str) -> dict[str, Param]:
    params, at = dict[str, Param](), 0
    for piece in filter(None, map(str.strip, text.split(","))):
        if not (found := _PARAM.match(piece)):
            raise PtxError(f"param not understood: {piece}")
        align, kind, name, count = found.groups()
        size = width(kind) // 8 * int(count or 1)
        unit = int(align or width(kind) // 8)
        at = -(-at // unit) * unit
        params[name] = Param(name, size, at)
        at += size
    return params


def _shared(text: str) -> tuple[dict[str, int], int]:
    places, at, behind = dict[str, int](), 0, list[tuple[str, int]]()
    for is_extern, align, kind, name, count in _SHARED.findall(text):
        unit = int(align or width(kind) // 8)
        if is_extern:
            behind.append((name, unit))
            continue
        at = -(-at // unit) * unit
        places[name] = at
        at += width(kind) // 8 * int(count or 1)
    for name, unit in behind:
        at = -(-at // unit) * unit
        places[name] = at
    return places, at


def _read(entry: Entry, text: str) -> None:
    while found := _LABEL.match(text):
        if found[1] in entry.labels:
            raise PtxError(f"label {found[1]} stands twice")
        entry.labels[found[1]] = len(entry.body)
        text = text[found.end() :].strip()
    if not text:
        return
    if text.startswith(".reg"):
        _declare(entry, text)
    elif text.startswith("."):
        raise PtxError(f"unknown directive: {text}")
    else:
        entry.body.append(_statement(entry, " ".join(text.split())))


def _declare(entry: Entry, text: str) -> None:
    _, kind, names = text.split(None, 2)
    bits = width(kind.removeprefix("."))
    for name in names.split(","):
        found = re.fullmatch(r"\s*(%[\w$]+)(?:<(\d+)>)?\s*", name)
        if not found:
            raise PtxError(f"register not understood: {name}")
        each = [found[1] + str(n) for n in range(int(found[2]))] if found[2] else [found[1]]
        for one in each:
            if one in entry.registers:
                raise PtxError(f"register {one} is declared twice")
            index = sum(r.bits == bits for r in entry.registers.values())
            entry.registers[one] = Reg(one, bits, index, len(entry.registers))


def _statement(entry: Entry, text: str) -> Statement:
    found = re.fullmatch(r"(?:@(!?)(%[\w$]+)\s+)?([\w.:]+)(?:\s+(.*))?", text)
    if not found:
        raise PtxError(f"not understood: {text}")
    flip, guard, op, rest = found.groups()
    words, pieces = tuple(op.split(".")), list(split(rest or ""))
    if guard and (guard not in entry.registers or entry.registers[guard].bits != 1):
        raise PtxError(f"{guard} is no predicate: {text}")
    reg = entry.registers[guard] if guard else None
    if words[0] == "bra":
        return Statement(text, reg, bool(flip), words, (), pieces[0])
    try:
        args = tuple(_operand(entry, piece) for piece in pieces)
    except PtxError as error:
        raise PtxError(f"{error}: {text}") from None
    return Statement(text, reg, bool(flip), words, args)


def split(text: str) -> Iterator[str]:
    """At commas outside of brackets."""
    depth, start = 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    if text[start:].strip():
        yield text[start:].strip()


def _operand(entry: Entry, text: str) -> Operand:
    if text[0] == "[":
        return _address(entry, text[1:-1].strip())
    if text[0] == "{":
        return Vector(tuple(_operand(entry, piece) for piece in split(text[1:-1])))
    if "|" in text:
        first, second = text.split("|")
        return Pair(_operand(entry, first.strip()), _operand(entry, second.strip()))
    if text == "_":
        return Sink()
    if text[0] == "!":
        of = _operand(entry, text[1:].strip())
        if isinstance(of, Reg) and of.bits == 1:
            return Not(of)
        raise PtxError(f"{text} is no predicate")
    if text[0] == "%":
        return entry.registers[text] if text in entry.registers else Special(text)
    if text in entry.params or text in entry.shared:
        return Symbol(text)
    return literal(text)


def _address(entry: Entry, text: str) -> Address:
    base, *more = split(text)
    coords = _operand(entry, more[0]) if more else None
    if coords is not None and not isinstance(coords, Vector):
        raise PtxError(f"address not understood: [{text}]")
    name, plus, offset = base.partition("+")
    return Address(_operand(entry, name.strip()), number(offset) if plus else 0, coords)


def literal(text: str) -> Imm | Bits:
    if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return Bits(int(found[1], 16), 32)
    if found := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
        return Bits(int(found[1], 16), 64)
    if re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?", text):
        return Bits(struct.unpack("<I", struct.pack("<f", float(text)))[0], 32)
    return Imm(number(text))


def number(text: str) -> int:
    text = text.strip().removesuffix("U")
    if not re.fullmatch(r"(?:0x[0-9a-fA-F]+|[-+*() \d])+", text) or not re.search(r"\d", text):
        raise PtxError(f"unknown name {text}")
    return int(eval(text, {"__builtins__": {}}))

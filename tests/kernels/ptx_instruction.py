"""One instruction of PTX, and what compiles it: operands as arrays of the 32 lanes of a warp.

A part of ``ptx_machine``. A mask is an integer, lane n its bit n; predicates are such masks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.kernels.ptx_text import (
    LANES,
    Bits,
    Imm,
    Not,
    Operand,
    PtxError,
    Reg,
    Special,
    Statement,
    Symbol,
    width,
)

FULL = (1 << LANES) - 1
Array = np.ndarray[Any, Any]
Read = Callable[[Any], Array]  # of a warp
Run = Callable[[Any, int], Any]  # of a warp and a mask

_NUMPY: dict[str, Any] = {"f32": np.float32, "f64": np.float64}
for _bits in (8, 16, 32, 64):
    _NUMPY |= {
        f"u{_bits}": np.dtype(f"u{_bits // 8}"),
        f"s{_bits}": np.dtype(f"i{_bits // 8}"),
        f"b{_bits}": np.dtype(f"u{_bits // 8}"),
    }
_NUMPY |= {"f16": np.uint16, "bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32}


def dtype(kind: str) -> Any:
    if kind not in _NUMPY:
        raise PtxError(f"type .{kind} is not supported here")
    return np.dtype(_NUMPY[kind])


def view_of(kind: str) -> str:
    """Among those of a warp's registers."""
    size = dtype(kind)
    return {"u": "u", "i": "s", "f": "f"}[size.kind] + str(8 * size.itemsize)


class _Lanes(dict[int, Array]):
    def __missing__(self, mask: int) -> Array:
        self[mask] = found = np.array([bool(mask >> n & 1) for n in range(LANES)])
        return found


_LANES = _Lanes()


def lanes(mask: int) -> Array:
    return _LANES[mask]


def where(mask: int) -> Any:
    return True if mask == FULL else _LANES[mask]


def bits(flags: Array) -> int:
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


@dataclass(slots=True, eq=False)
class Instruction:
    """``reads`` and ``writes`` are numbers of registers; ``touches`` are those among them that
    products use, too. Of an ``aligned`` one the lanes ``members`` run it together."""

    statement: Statement
    run: Run | None = None
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    touches: tuple[int, ...] = ()
    accumulators: tuple[Reg, ...] = ()  # of a product, and what of a is in registers
    fragments: tuple[Reg, ...] = ()
    uses: tuple[tuple[Reg, int], ...] = ()  # all of these, and as what
    calculate: Any = None
    members: int = 0
    target: int = -1
    is_end: bool = False


@dataclass(slots=True)
class Maker:
    """Compiles one statement: gathers the registers that it reads and writes."""

    statement: Statement
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    members: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        return self.statement.words

    @property
    def kind(self) -> str:
        return self.statement.words[-1]

    def args(self, *counts: int) -> tuple[Any, ...]:
        if len(self.statement.args) not in counts:
            raise PtxError(f"{len(self.statement.args)} operands, not {counts}")
        return self.statement.args

    def only(self, *allowed: str) -> None:
        """No modifier is silently left out."""
        for word in self.words[1:]:
            if word not in allowed:
                raise PtxError(f"unknown modifier .{word}")

    def src(self, operand: Operand, kind: str) -> Read:
        if isinstance(operand, Reg):
            index = self.reg(operand, width(kind)).index
            self.reads.append(operand.number)
            view = view_of(kind)
            return lambda w: w.views[view][index]
        if isinstance(operand, Special | Symbol):
            name, size = operand.name, dtype(kind)
            find = "special" if isinstance(operand, Special) else "symbol"
            return lambda w: getattr(w, find)(name, size)
        known = constant(operand, kind)
        return lambda w: known

    def dst(self, operand: Operand, kind: str) -> tuple[str, int]:
        if not isinstance(operand, Reg):
            raise PtxError("the result is no register")
        self.reg(operand, width(kind))
        self.writes.append(operand.number)
        return view_of(kind), operand.index

    def pred(self, operand: Operand) -> Callable[[Any], int]:
        """As a mask."""
        if isinstance(operand, Not):
            of = self.pred(operand.of)
            return lambda w: of(w) ^ FULL
        if not isinstance(operand, Reg) or operand.bits != 1:
            raise PtxError("no predicate")
        self.reads.append(operand.number)
        index = operand.index
        return lambda w: w.preds[index]

    def pred_dst(self, operand: Operand) -> int:
        if not isinstance(operand, Reg) or operand.bits != 1:
            raise PtxError("the result is no predicate")
        self.writes.append(operand.number)
        return operand.index

    @staticmethod
    def reg(operand: Reg, bits: int) -> Reg:
        if operand.bits != bits:
            raise PtxError(f"{operand.name} has {operand.bits} bits, not {bits}")
        return operand


def constant(operand: Operand, kind: str) -> Array:
    size = dtype(kind)
    if isinstance(operand, Bits):
        if operand.bits == 32 and kind == "f64":
            value: Any = struct.unpack("<f", struct.pack("<I", operand.value))[0]
            return np.full(LANES, value, np.float64)
        raw = np.full(LANES, operand.value, f"u{operand.bits // 8}")
        if raw.itemsize != size.itemsize:
            raise PtxError(f"a constant of {operand.bits} bits as .{kind}")
        return raw.view(size)
    if not isinstance(operand, Imm):
        raise PtxError("operand not understood")
    if size.kind == "f":
        raise PtxError("an integer where a float is wanted")
    unsigned = np.dtype(f"u{size.itemsize}")
    value = int(operand.value) & ((1 << 8 * size.itemsize) - 1)
    return np.full(LANES, value, unsigned).view(size)


def put(warp: Any, view: str, index: int, mask: int, value: Any) -> None:
    if mask == FULL:
        warp.views[view][index][:] = value
    else:
        np.copyto(warp.views[view][index], value, where=_LANES[mask])


def merge(old: int, mask: int, new: int) -> int:
    return (old & ~mask) | (new & mask)

"""Round fp32 to floats of 8 bits (e4m3) by arithmetic that every kernel does, as torch rounds."""

from __future__ import annotations

from functools import lru_cache

import torch

from strop.ir.graph import Builder, Node

I32, F32, BYTES = torch.int32, torch.float32, torch.uint8

# e4m3 by the bits of fp32: exponents differ by 120, and 20 bits of the mantissa are rounded off.
_MANTISSA, _LEAST_NORMAL, _TOO_LARGE, _INFINITE = 20, 121 << 23, 1087 << 20, 255 << 23
_LARGEST, _NAN = 0x7E, 0x7F
_REBIASED = (1 << 19) - 1 - (120 << 23)
_DENORMAL = 141 << 23  # 2^14, whose last bit is the least number of e4m3


@lru_cache(maxsize=1)
def _saturates() -> bool:
    """Tell whether this torch rounds what is too large to the largest number, and not to NaN."""
    return bool(torch.tensor(1e9).to(torch.float8_e4m3fn).float().isfinite())


def encoded(b: Builder, x: Node) -> Node:
    """Return fp32 rounded to e4m3, to even, as bytes, as torch does
    (``c10/util/Float8_e4m3fn.h``)."""
    bits = b.pointwise("bits_of_float", x, dtype=I32)
    size = _by(b, "bitwise_and", bits, 0x7FFFFFFF)
    odd = _by(b, "bitwise_and", _by(b, "shift_right", size, _MANTISSA), 1)
    raised = b.pointwise("add", _plus(b, size, _REBIASED), odd, dtype=I32, alpha=1)
    normal = _by(b, "shift_right", raised, _MANTISSA)
    number = b.pointwise("float_of_bits", size, dtype=F32)
    shifted = b.pointwise("bits_of_float", _plus(b, number, 2.0**14), dtype=I32)
    small = b.pointwise("sub", shifted, b.constant(_DENORMAL, I32), dtype=I32, alpha=1)
    code = _chosen(b, _less(b, size, _LEAST_NORMAL), small, normal)
    if _saturates():
        code = _by(b, "minimum", code, _LARGEST)
    limit = _INFINITE + 1 if _saturates() else _TOO_LARGE
    code = _chosen(b, _less(b, size, limit), code, b.constant(_NAN, I32))
    sign = _by(b, "bitwise_and", _by(b, "shift_right", bits, 24), 0x80)
    return b.cast(b.pointwise("bitwise_or", code, sign, dtype=I32), BYTES)


def _by(b: Builder, op: str, x: Node, number: int) -> Node:
    return b.pointwise(op, x, b.constant(number, I32), dtype=I32)


def _plus(b: Builder, x: Node, number: float) -> Node:
    return b.pointwise("add", x, b.constant(number, x.dtype), dtype=x.dtype, alpha=1)


def _less(b: Builder, x: Node, most: int) -> Node:
    return b.pointwise("lt", x, b.constant(most, I32), dtype=torch.bool)


def _chosen(b: Builder, condition: Node, x: Node, other: Node) -> Node:
    return b.pointwise("where", condition, x, other, dtype=I32)

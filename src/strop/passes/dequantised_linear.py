"""Multiply codes where a linear or a convolution multiplies values that are dequantised of codes,
as PT2E writes it.

    x = (c - z) s, of codes c, with one zero point z and one scale s for all of them
    W = (d - v) t, of int8 codes d, with a zero point v and a scale t for all or for each row

    sum of x W = s t (sum of c d - z sum of d - v (sum of c - K z))

The sums are whole numbers and exact. Eager dequantises both and adds products in fp32: this is
rounded once behind the sums, for the scales once each. Values that are rounded to a half on their
way into the linear, as by autocast, or dequantised in a half, are not rounded here. A z that is
known and zero points of rows of a weight belong to the product itself (``code_sums``). A
convolution takes both zero points off by itself: outside of a picture its values are 0, whose code
is z.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

import torch

from strop.ir.dims import const, product
from strop.ir.functions import HALVES
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.ir.ops import Kind
from strop.options import Options

_CODES = (torch.int8, torch.uint8)
_WHOLE = (*_CODES, torch.int16, torch.int32, torch.int64)
_F32, _I32 = torch.float32, torch.int32
_WIDE = (_F32, *HALVES)  # in which codes are dequantised
_TO_SIGNED = 128  # what unsigned codes are above signed ones
# 255 x 255 times as many is less than 2^31.
MOST_DEPTH = 1 << 15


@dataclass(frozen=True, slots=True)
class Codes:
    """Describe values (codes - zero) * scale. ``zero`` is whole, and None for 0; both are one
    number, or have one for each row of a weight."""

    codes: Node
    zero: Node | None
    scale: Node


def dequantised_linear(graph: Graph, options: Options) -> Graph:
    found = {node: _operands(node) for node in graph.nodes if _is_product(node)}
    if not any(isinstance(operands, tuple) for operands in found.values()):
        return graph

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if not isinstance(found.get(node), tuple):
            return None
        x, weight = map(codes_of, inputs[:2])
        assert x is not None
        assert weight is not None
        by_codes = _conv_by_codes if node.op == "conv2d" else _by_codes
        return by_codes(b, node, x, weight, inputs[2:])

    return rewrite(graph, rule)


def _is_product(node: Node) -> bool:
    return node.op in ("linear", "conv2d")


def left_in_floats(graph: Graph) -> Mapping[Node, str]:
    """Return the linears and convolutions of dequantised operands that stay as they are, with the
    reasons."""
    found = ((node, _operands(node)) for node in graph.nodes if _is_product(node))
    return {node: reason for node, reason in found if isinstance(reason, str) and reason}


def _operands(linear: Node) -> tuple[Codes, Codes] | str:
    """Return what a linear multiplies, if that is codes; else why not, or nothing where a linear
    has nothing to do with codes."""
    x, weight = (codes_of(operand) for operand in linear.inputs[:2])
    if weight is None:
        return ""
    if x is None:
        return _MOVED if _is_moved(linear.inputs[0]) else ""
    return _reason(linear, x, weight) or (x, weight)


_MOVED = "its values are moved between where they are dequantised and the linear"


def _is_moved(value: Node) -> bool:
    while value.kind is Kind.VIEW:
        value = value.inputs[0]
    return codes_of(value) is not None


def _reason(linear: Node, x: Codes, weight: Codes) -> str:
    if linear.dtype not in (_F32, *HALVES):
        return f"it computes in {str(linear.dtype).removeprefix('torch.')}"
    if weight.codes.op != "input" or weight.codes.dtype is not torch.int8:
        return "its weight is no argument of int8 codes"
    sizes = weight.codes.shape
    is_conv = linear.op == "conv2d"
    if len(sizes) != (4 if is_conv else 2) or not all(size.is_const for size in sizes):
        return "its weight has no known sizes"
    if product(sizes[1:]).value > MOST_DEPTH:
        return f"sums of more than {MOST_DEPTH} products of codes may leave int32"
    if is_conv and linear.attrs["groups"] != 1:
        return "it has several groups"
    if not (_is_one(x.scale) and (x.zero is None or _is_one(x.zero))):
        return "its values have several scales or zero points"
    for each in filter(None, (weight.scale, weight.zero)):
        if not _is_one(each) and each.shape != (sizes[0], *(const(1) for _ in sizes[1:])):
            return "scales or zero points of its weight are not those of rows"
    return _reason_of_zero(x) if is_conv else ""


def _reason_of_zero(x: Codes) -> str:
    """Say why the values of a convolution stay, which have codes where a picture ends."""
    if x.zero is None:
        return ""
    if x.zero.op != "constant":
        return "the zero point of its values is computed in each call"
    known = torch.iinfo(x.codes.dtype)
    is_code = known.min <= x.zero.attrs["value"] <= known.max
    return "" if is_code else "the zero point of its values is no code"


def _is_one(x: Node) -> bool:
    return x.numel == const(1)


def codes_of(value: Node) -> Codes | None:
    """Return the codes that a value is dequantised of, in its shape, or None."""
    while value.op == "reshape" or (value.op == "cast" and value.dtype in HALVES):
        value = value.inputs[0]
    if value.op != "mul" or value.dtype not in _WIDE:
        return None
    scaled, scale = value.inputs
    if scale.dtype is not _F32 or scaled.shape != value.shape:
        return None
    scaled = _unrounded(scaled)
    if scaled.op == "sub" and scaled.attrs.get("alpha", 1) == 1:
        wide, zero = scaled.inputs
    else:
        wide, zero = scaled, None
    codes = wide.inputs[0] if wide.op == "cast" and wide.dtype not in _CODES else wide
    if codes.dtype not in _CODES or codes.shape != value.shape:
        return None
    if zero is not None and (zero := _whole(zero)) is None:
        return None
    return Codes(codes, zero, scale)


def _unrounded(value: Node) -> Node:
    """Return what a value was before it was rounded to a half, and that alone."""
    found = value
    while found.op == "cast" and found.dtype in _WIDE and found.inputs[0].dtype in _WIDE:
        found = found.inputs[0]
    return found


def _whole(zero: Node) -> Node | None:
    """Return a zero point as the whole number that it is, or None."""
    if zero.op == "constant":
        return zero if float(zero.attrs["value"]).is_integer() else None
    while zero.op == "cast" and zero.inputs[0].dtype in _WHOLE:
        zero = zero.inputs[0]
    return zero if zero.dtype in _WHOLE else None


def _by_codes(b: Builder, node: Node, x: Codes, weight: Codes, bias: tuple[Node, ...]) -> Node:
    depth, columns = weight.codes.shape[1], weight.codes.shape[0]
    rows = product(node.shape[:-1])
    codes, zero = _signed(b, x)
    codes = b.reshape(codes, (rows, depth))
    number, zeros = (zero.attrs["value"] if _is_constant(zero) else 0), weight.zero
    # what the product takes off by itself, in no time where all of them are 0
    own = zeros is not None and not _is_one(zeros)
    read = [codes, weight.codes]
    if own and zeros is not None:
        read.append(b.reshape(b.cast(zeros, torch.int64), (columns,)))
    total = b.make("code_sums", read, (rows, columns), _I32, zero=number)
    if zero is not None and not _is_constant(zero):
        taken = b.pointwise("mul", _less_zeros(b, weight), zero, dtype=_I32)
        total = _less(b, total, b.reshape(taken, (1, columns)))
    if zeros is not None and not own:
        each = _sums(b, codes)
        if number:
            each = _less(b, each, b.constant(number * depth.value, _I32))
        one = b.cast(b.reshape(zeros, ()), _I32)
        total = _less(b, total, b.pointwise("mul", each, one, dtype=_I32))
    scale = _of_columns(b, weight.scale)
    scales = b.pointwise("mul", b.reshape(x.scale, ()), scale, dtype=_F32)
    # in the type of the linear, which rounds where it is stored, and not before what reads it here
    y = b.pointwise("mul", b.cast(total, _F32), scales, dtype=_F32 if bias else node.dtype)
    for added in bias:
        y = b.pointwise("add", y, b.cast(added, _F32), dtype=node.dtype, alpha=1)
    return b.reshape(y, node.shape)


def _conv_by_codes(b: Builder, node: Node, x: Codes, weight: Codes, bias: tuple[Node, ...]) -> Node:
    codes, zero = _signed(b, x)
    number = 0 if zero is None else zero.attrs["value"]
    columns = weight.codes.shape[0]
    read = [codes, weight.codes]
    if weight.zero is not None:
        zeros = b.reshape(
            b.cast(weight.zero, torch.int64), () if _is_one(weight.zero) else (columns,)
        )
        read.append(b.expand(b.view_as_rank(zeros, 1), (columns,)))
    total = b.make("code_conv2d", read, node.shape, _I32, zero=number, **node.attrs)
    rank = (1, columns, 1, 1)
    scale = b.reshape(weight.scale, () if _is_one(weight.scale) else rank)
    scales = b.pointwise("mul", b.reshape(x.scale, ()), scale, dtype=_F32)
    y = b.pointwise("mul", b.cast(total, _F32), scales, dtype=_F32)
    for added in bias:
        wide = b.reshape(b.cast(added, _F32), rank)
        y = b.pointwise("add", y, wide, dtype=_F32, alpha=1)
    return b.cast(y, node.dtype)


def _signed(b: Builder, x: Codes) -> tuple[Node, Node | None]:
    """Return codes in int8, and their zero point (), None for 0."""
    zero = None if x.zero is None else b.reshape(_number(b, x.zero), ())
    if x.codes.dtype is torch.int8:
        return x.codes, zero
    more = b.constant(_TO_SIGNED, _I32)
    codes = b.cast(_less(b, b.cast(x.codes, _I32), more), torch.int8)
    if zero is None:
        return codes, b.constant(-_TO_SIGNED, _I32)
    if zero.op != "constant":
        return codes, _less(b, zero, more)
    value = zero.attrs["value"] - _TO_SIGNED
    return codes, b.constant(value, _I32) if value else None


def _number(b: Builder, zero: Node) -> Node:
    if zero.op == "constant":
        return b.constant(int(zero.attrs["value"]), _I32)
    return b.cast(zero, _I32)


def _of_columns(b: Builder, x: Node) -> Node:
    """Return what each row of a weight has, or all have, as a row (1, N) or a number."""
    return b.reshape(x, () if _is_one(x) else (1, x.shape[0]))


def _less_zeros(b: Builder, weight: Codes) -> Node:
    """Return the sums (N, 1) of a weight's codes, less their zero points."""
    sums, depth = _sums(b, weight.codes), b.constant(weight.codes.shape[1].value, _I32)
    if weight.zero is None:
        return sums
    zeros = b.cast(weight.zero, _I32)
    if _is_one(weight.zero):
        zeros = b.reshape(zeros, ())
    return _less(b, sums, b.pointwise("mul", zeros, depth, dtype=_I32))


def _is_constant(zero: Node | None) -> TypeGuard[Node]:
    return zero is not None and zero.op == "constant"


def _sums(b: Builder, codes: Node) -> Node:
    """Return the sums (rows, 1) of codes."""
    return b.reduce("sum", b.cast(codes, _I32), (1,), _I32)


def _less(b: Builder, x: Node, y: Node) -> Node:
    return b.pointwise("sub", x, y, dtype=_I32, alpha=1)

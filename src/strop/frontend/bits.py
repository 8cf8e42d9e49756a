"""Read bytes as numbers of other types, and numbers of 8 bits, by arithmetic that kernels do.

Kernels load no floats of 8 bits: a weight of such a type is an input of bytes, whose views are
views of bytes, and a conversion decodes them, exactly, by the bits of fp16. A conversion to e4m3
makes bytes, rounded as torch rounds. What torch computes with any gets it in its own type again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.frontend.pointwise import apply
from strop.frontend.views import VIEWS
from strop.ir.e4m3 import encoded
from strop.ir.graph import Node, Ref
from strop.ir.ops import KERNEL_DTYPES, Kind

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
I32, F32 = torch.int32, torch.float32
BYTES = torch.uint8
FLOATS_OF_8_BITS = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_WORDS = frozenset((torch.int8, torch.uint8, torch.int16, torch.int32))


def _and(im: Importer, x: Node, mask: int) -> Node:
    return apply(im, "bitwise_and", x, mask, dtype=I32)


def _left(im: Importer, x: Node, count: int) -> Node:
    return apply(im, "shift_left", x, count, dtype=I32) if count else x


def _or(im: Importer, x: Node, y: Node) -> Node:
    return apply(im, "bitwise_or", x, y, dtype=I32)


def view_as(im: Importer, fx: FxNode, x: FxNode, dtype: torch.dtype) -> Node | None:
    """Import ``x.view(dtype)``, or None where torch has to do it: also for numbers whose bits are
    read again, as a kernel keeps no bits of a NaN."""
    if dtype.is_floating_point and _is_viewed_again(fx):
        return None
    node, given = im.node(x), x.meta["val"].dtype
    if given == dtype:
        return node
    if node.dtype not in _WORDS or dtype not in KERNEL_DTYPES:
        return None
    if dtype.itemsize == node.dtype.itemsize:
        return _number(im, im.builder.cast(node, I32), dtype)
    if node.dtype.itemsize != 1 or dtype.itemsize > 4:
        return None
    return _number(im, _joined(im, node, im.shape(fx), dtype.itemsize), dtype)


def _is_viewed_again(fx: FxNode) -> bool:
    """Tell whether a traced value, or a view of it, is looked at as another type."""
    ahead = [fx]
    while ahead:
        for user in ahead.pop().users:
            if user.target is aten.view.dtype:
                return True
            if user.target in VIEWS or user.target is operator.getitem:
                ahead.append(user)
    return False


def _joined(im: Importer, node: Node, shape: Any, width: int) -> Node:
    """Return so many bytes side by side as one int32, the first of which is the lowest."""
    b = im.builder
    apart = b.reshape(b.cast(node, BYTES), (*shape, width))
    word: Node | None = None
    for place in range(width):
        byte = b.reshape(b.slice(apart, len(shape), place, 1), shape)
        part = _left(im, b.cast(byte, I32), 8 * place)
        word = part if word is None else _or(im, word, part)
    assert word is not None
    return word


def _number(im: Importer, bits: Node, dtype: torch.dtype) -> Node | None:
    """Return what the low bits of an int32 are in another type."""
    if dtype in _WORDS:
        return im.builder.cast(bits, dtype)
    if dtype is torch.float16:
        return im.builder.pointwise("half_of_bits", bits, dtype=dtype)
    if dtype is torch.bfloat16:
        return im.builder.pointwise("float_of_bits", _left(im, bits, 16), dtype=dtype)
    return im.builder.pointwise("float_of_bits", bits, dtype=F32) if dtype is F32 else None


def bits_read(nodes: Iterable[FxNode]) -> bool:
    """Tell whether weights in floats of 8 bits can be read as bytes: nothing writes to such, and
    none is given back."""
    for fx in nodes:
        schema = getattr(fx.target, "_schema", None)
        is_watched = fx.op == "output" or (schema is not None and schema.is_mutable)
        if is_watched and any(map(is_short, fx.all_input_nodes)):
            return False
    return True


def is_short(fx: FxNode) -> bool:
    """Tell whether a traced value is a tensor of floats of 8 bits."""
    value = fx.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in FLOATS_OF_8_BITS


def are_bytes(im: Importer, fx: FxNode) -> bool:
    """Tell whether a traced tensor of floats of 8 bits is one of bytes in the graph."""
    node = im.values.get(fx)
    return is_short(fx) and isinstance(node, Node) and node.dtype is BYTES


def of_bytes(im: Importer, fx: FxNode) -> Node | None:
    """Import a view or a conversion of floats of 8 bits that are bytes, or a conversion to such, or
    return None."""
    given, value = fx.all_input_nodes, fx.meta["val"]
    if len(given) != 1:
        return None
    if _makes_bytes(im, fx):
        return encoded(im.builder, im.builder.cast(im.node(given[0]), F32))
    if not are_bytes(im, given[0]):
        return None
    x, dtype = given[0], value.dtype if isinstance(value, torch.Tensor) else None
    if fx.target in VIEWS and fx.target is not aten.as_strided.default:
        made: Node = VIEWS[fx.target](im, fx, *fx.args, **fx.kwargs)
        return made
    if fx.target is aten.view.dtype and dtype in (torch.int8, BYTES):
        return im.builder.cast(im.node(x), dtype)
    if fx.target is aten._to_copy.default and dtype in _FLOATS:
        return _decoded(im, im.node(x), x.meta["val"].dtype, dtype)
    return None


def _decoded(im: Importer, codes: Node, of: torch.dtype, dtype: torch.dtype) -> Node:
    """Return the numbers that bytes stand for. e5m2 is the upper half of fp16; e4m3 has a smaller
    exponent, and one NaN of either sign where fp16 has numbers."""
    b, bits = im.builder, im.builder.cast(codes, I32)
    if of is torch.float8_e5m2:
        return b.cast(b.pointwise("half_of_bits", _left(im, bits, 8), dtype=F32), dtype)
    sign, rest = _left(im, _and(im, bits, 0x80), 8), _and(im, bits, 0x7F)
    small = b.pointwise("half_of_bits", _or(im, sign, _left(im, rest, 7)), dtype=F32)
    numbers = apply(im, "mul", small, 256.0, dtype=F32)
    is_nan = b.pointwise("eq", rest, b.constant(0x7F, I32), dtype=torch.bool)
    return b.cast(apply(im, "where", is_nan, math.nan, numbers, dtype=F32), dtype)


def _makes_bytes(im: Importer, fx: FxNode) -> bool:
    """Tell whether a call rounds to e4m3, and all that reads it can read bytes."""
    if fx.target is not aten._to_copy.default or not im.reads_bytes:
        return False
    value, (given,) = fx.meta["val"], fx.all_input_nodes
    is_e4m3 = isinstance(value, torch.Tensor) and value.dtype is torch.float8_e4m3fn
    return is_e4m3 and given.meta["val"].dtype in _FLOATS - {torch.float64}


def in_own_type(im: Importer, node: Node, dtype: torch.dtype) -> Node:
    """Return bytes in their own type, for torch: views stay views, so that they lie as traced."""
    if node.kind is Kind.VIEW:
        inner = in_own_type(im, node.inputs[0], dtype)
        return im.builder.make(
            node.op, (inner,), node.shape, dtype, order=node.order, **dict(node.attrs)
        )
    result = (node.shape, dtype)
    return im.builder.make(
        "aten",
        (node,),
        *result,
        order=node.order,
        target="aten.view.dtype",
        args=(Ref(0), dtype),
        kwargs=(),
        outputs=(result,),
        single=True,
        tag="",
    )


BITS: dict[Any, Any] = {aten.view.dtype: view_as}

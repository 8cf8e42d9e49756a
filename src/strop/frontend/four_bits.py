"""Decode what bitsandbytes has quantised, by arithmetic that kernels do.

Its nf4 is a table of 16 numbers, the quantiles of a normal distribution, with a scale for each
block. A code finds its number by four choices, one a bit, instead of a look into memory. fp4 stays
with the library, whose tables for CPUs and for GPUs differ in their digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Node as FxNode

from strop.frontend.lookups import take
from strop.frontend.pointwise import apply
from strop.ir.dims import const, product
from strop.ir.graph import Node

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

I32, F32 = torch.int32, torch.float32
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def is_yet_to_be_packed(part: nn.Module) -> bool:
    """Tell whether a layer will put its weight into another order in its next call in eager: the
    library does so once, in the forward, for its own kernel on CPUs with AVX512 BF16."""
    if not vars(part).get("support_avx512bf16_for_cpu", False):  # asked of all parts in each call
        return False
    weight = part._parameters.get("weight")
    state = getattr(weight, "quant_state", None)
    if weight is None or state is None or weight.device.type != "cpu":
        return False
    return not getattr(state, "packing_format_for_cpu", False)


def _dequantize_4bit(
    im: Importer,
    fx: FxNode,
    codes: Any,
    absmax: Any,
    block: int,
    kind: str,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Node | None:
    """Import it, or return None where the library computes it: the last block is shorter, say. The
    first of two codes in a byte is the upper half."""
    b, node, scales = im.builder, im.node(codes), im.node(absmax)
    count = 2 * node.numel.value if node.numel.is_const else 0
    is_known = kind == "nf4" and node.dtype is torch.uint8 and scales.dtype is F32
    if not is_known or not count or count % block or scales.numel != const(count // block):
        return None
    if product(im.shape(fx)) != const(count):  # of an odd number the last half byte is none
        return None
    pairs = b.cast(b.reshape(node, (count // 2, 1)), I32)
    place = b.reshape(b.make("iota", (), (const(2),), I32, start=4, step=-4), (1, 2))
    code = apply(
        im, "bitwise_and", apply(im, "shift_right", pairs, place, dtype=I32), 15, dtype=I32
    )
    numbers = b.reshape(_chosen(im, code, NF4), (count // block, block))
    scaled = apply(im, "mul", numbers, b.reshape(scales, (count // block, 1)), dtype=F32)
    return b.reshape(b.cast(scaled, dtype), im.shape(fx))


def _chosen(im: Importer, code: Node, numbers: Sequence[float]) -> Node:
    """Return the number at each place: the highest bit says which half of them it is in."""
    bit = len(numbers) // 2
    is_upper = apply(im, "bitwise_and", code, bit, dtype=I32)
    chosen = im.builder.pointwise("ne", is_upper, im.builder.constant(0, I32), dtype=torch.bool)
    if bit == 1:
        return apply(im, "where", chosen, numbers[1], numbers[0], dtype=F32)
    halves = (_chosen(im, code, half) for half in (numbers[bit:], numbers[:bit]))
    return apply(im, "where", chosen, *halves, dtype=F32)


def _dequantize_blockwise(
    im: Importer, fx: FxNode, codes: Any, absmax: Any, table: Any, block: int, dtype: torch.dtype
) -> Node | None:
    """Import the scales of scales: a byte looks into a table of 256 numbers."""
    b, node = im.builder, im.node(codes)
    scales, numbers = im.node(absmax), im.node(table)
    are_known = node.dtype is torch.uint8 and scales.dtype is numbers.dtype is F32
    if not are_known or numbers.shape != (const(256),) or not node.numel.is_const:
        return None
    count = node.numel.value
    if not count or count % block or scales.numel != const(count // block):
        return None
    places = b.cast(b.reshape(node, (count // block, block)), I32)
    found = take(b, numbers, (places,), (None,), places.shape, "known")
    assert found is not None
    scaled = apply(im, "mul", found, b.reshape(scales, (count // block, 1)), dtype=F32)
    return b.reshape(b.cast(scaled, dtype), im.shape(fx))


# By name, as the operators are there once the library is.
_RULES: dict[str, Any] = {
    "bitsandbytes.dequantize_4bit.default": _dequantize_4bit,
    "bitsandbytes.dequantize_blockwise.default": _dequantize_blockwise,
}


def of_bitsandbytes(im: Importer, fx: FxNode) -> Node | None:
    """Import a call of the library, or return None."""
    rule = _RULES.get(str(fx.target)) if fx.op == "call_function" else None
    made: Node | None = rule(im, fx, *fx.args, **fx.kwargs) if rule else None
    return made

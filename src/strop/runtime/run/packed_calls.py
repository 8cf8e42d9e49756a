"""Call oneDNN's products with weights that are packed already.

They have a result of their own making. A step whose result has a place in the arena hands it on
where it is: a copy would take as long as packing saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from strop.kernels.packed.costs import CONV
from strop.kernels.packed.rows import WEIGHT
from strop.runtime.build.loader import KernelLoader
from strop.runtime.derived.packed_weights import (
    Fingerprint,
    PackedWeight,
)
from strop.runtime.run.sizes import Look

Call = Callable[[Sequence[Tensor]], Tensor]
_NO_ACTIVATION: tuple[Any, ...] = ("none", [], "")


@dataclass(frozen=True, slots=True)
class Product:
    """Say how a weight is packed, and what multiplies by it: ``call`` gets the inputs of the step,
    and the packed weight."""

    pack: Callable[[Tensor], Tensor]
    call: Callable[[Sequence[Tensor], Tensor], Tensor]

    def once(self, inputs: Sequence[Tensor]) -> Tensor:
        """Pack the weight for this call alone."""
        return self.call(inputs, self.pack(inputs[WEIGHT]))


def _pack_rows(rows: int, weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    return packed


def _linear(attrs: Mapping[str, Any], shape: Sequence[int]) -> Product:
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def call(inputs: Sequence[Tensor], packed: Tensor) -> Tensor:
        bias = inputs[2] if len(inputs) > 2 else None
        made: Tensor = multiply(inputs[0], packed, bias, *_NO_ACTIVATION)
        return made

    return Product(partial(_pack_rows, math.prod(shape[:-1])), call)


def _linear_add(attrs: Mapping[str, Any], shape: Sequence[int]) -> Product:
    multiply = torch.ops.mkldnn._linear_pointwise.binary

    def call(inputs: Sequence[Tensor], packed: Tensor) -> Tensor:
        x, _, addend, *bias = inputs
        made: Tensor = multiply(x, addend, packed, bias[0] if bias else None, "add")
        return made

    return Product(partial(_pack_rows, math.prod(shape[:-1])), call)


def _conv2d(attrs: Mapping[str, Any], shape: Sequence[int]) -> Product:
    padding, stride, dilation = (list(attrs[k]) for k in ("padding", "stride", "dilation"))
    places, groups = (padding, stride, dilation), attrs["groups"]
    convolve = torch.ops.mkldnn._convolution_pointwise.default

    def pack(weight: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(
            weight, *places, groups, list(shape)
        )
        return packed

    def call(inputs: Sequence[Tensor], packed: Tensor) -> Tensor:
        bias = inputs[2] if len(inputs) > 2 else None
        made: Tensor = convolve(inputs[0], packed, bias, *places, groups, *_NO_ACTIVATION)
        return made

    return Product(pack, call)


# By attributes, and by the sizes of the first operand, for which a weight is packed.
PRODUCTS: Mapping[str, Callable[[Mapping[str, Any], Sequence[int]], Product]] = {
    "linear": _linear,
    "linear_add": _linear_add,
    CONV: _conv2d,
}


# Where oneDNN's description of memory has bytes that nobody sets, between an int32 and an int64.
_UNSET = (4, 108, 316)


@lru_cache(4096)
def way_of(
    op: str, attrs: tuple[tuple[str, Any], ...], shape: tuple[int, ...], weight: Look
) -> bytes:
    """Return the blocks in which oneDNN wants a weight that looks so, for an operand of this shape.

    Most sizes share them. With those of another size some products are right and 80 times as slow:
    convolutions to 96 channels at 4x6 pixels."""
    sizes, strides, dtype = weight
    product = PRODUCTS[op](dict(attrs), shape)
    packed = product.pack(torch.empty_strided(sizes, strides, dtype=dtype))
    described: Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(packed)
    for first in _UNSET:
        described[first : first + 4] = 0
    return bytes(described.tolist())


def packed_call(
    product: Product, held: PackedWeight, weight: Tensor, kernels: KernelLoader
) -> Call:
    """Return the call of a step that reads this weight, as it is then."""
    fingerprint = Fingerprint(weight, kernels)

    def call(inputs: Sequence[Tensor]) -> Tensor:
        return product.call(inputs, held.of(weight, fingerprint))

    return call


def allocating(call: Callable[[Sequence[Tensor], Tensor], object], shape: tuple[int, ...]) -> Call:
    """Return a call that makes its result of a shape, of one that writes where it is told."""

    def make(inputs: Sequence[Tensor]) -> Tensor:
        out = inputs[0].new_empty(shape)
        call(inputs, out)
        return out

    return make

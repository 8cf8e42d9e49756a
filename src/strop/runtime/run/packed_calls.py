"""Call oneDNN's products with weights that are packed already.

They have a result of their own making. A step whose result has a place in the arena hands it on
where it is: a copy would take as long as packing saves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
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

Call = Callable[[Sequence[Tensor]], Tensor]
_NO_ACTIVATION: tuple[Any, ...] = ("none", [], "")


@dataclass(frozen=True, slots=True)
class Product:
    """Say how a weight is packed, and what multiplies by it: ``call`` gets the inputs of the step,
    and the packed weight. ``way`` tells apart what packs differently."""

    way: Hashable
    pack: Callable[[Tensor], Tensor]
    call: Callable[[Sequence[Tensor], Tensor], Tensor]

    def once(self, inputs: Sequence[Tensor]) -> Tensor:
        """Pack the weight for this call alone."""
        return self.call(inputs, self.pack(inputs[WEIGHT]))


def _pack_rows(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def _linear(attrs: Mapping[str, Any]) -> Product:
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def call(inputs: Sequence[Tensor], packed: Tensor) -> Tensor:
        bias = inputs[2] if len(inputs) > 2 else None
        made: Tensor = multiply(inputs[0], packed, bias, *_NO_ACTIVATION)
        return made

    return Product("rows", _pack_rows, call)


def _linear_add(attrs: Mapping[str, Any]) -> Product:
    multiply = torch.ops.mkldnn._linear_pointwise.binary

    def call(inputs: Sequence[Tensor], packed: Tensor) -> Tensor:
        x, _, addend, *bias = inputs
        made: Tensor = multiply(x, addend, packed, bias[0] if bias else None, "add")
        return made

    return Product("rows", _pack_rows, call)


def _conv2d(attrs: Mapping[str, Any]) -> Product:
    padding, stride, dilation = (list(attrs[k]) for k in ("padding", "stride", "dilation"))
    places, groups = (padding, stride, dilation), attrs["groups"]
    convolve = torch.ops.mkldnn._convolution_pointwise.default

    def pack(weight: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(weight, *places, groups)
        return packed

    def call(inputs: Sequence[Tensor], packed: Tensor) -> Tensor:
        bias = inputs[2] if len(inputs) > 2 else None
        made: Tensor = convolve(inputs[0], packed, bias, *places, groups, *_NO_ACTIVATION)
        return made

    return Product((*map(tuple, places), groups), pack, call)


PRODUCTS: Mapping[str, Callable[[Mapping[str, Any]], Product]] = {
    "linear": _linear,
    "linear_add": _linear_add,
    CONV: _conv2d,
}


def packed_call(
    product: Product, held: PackedWeight, weight: Tensor, kernels: KernelLoader
) -> Call:
    """Return the call of a step that reads this weight, as it is then."""
    fingerprint = Fingerprint(weight, kernels)

    def call(inputs: Sequence[Tensor]) -> Tensor:
        return product.call(inputs, held.of(weight, fingerprint))

    return call


def copying(call: Call) -> Callable[[Sequence[Tensor], Tensor], None]:
    """Return a call that writes where it is told."""

    def write(inputs: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(call(inputs))

    return write


def allocating(call: Callable[[Sequence[Tensor], Tensor], object], shape: tuple[int, ...]) -> Call:
    """Return a call that makes its result of a shape, of one that writes where it is told."""

    def make(inputs: Sequence[Tensor]) -> Tensor:
        out = inputs[0].new_empty(shape)
        call(inputs, out)
        return out

    return make

"""Stand in for bitsandbytes' linears with int8 weights (LLM.int8).

Such a linear quantises the rows of its input too, and multiplies codes. With a threshold it takes
columns of the input that hold a larger value out of that product and multiplies these in the
input's own type, with columns of the weight that are dequantised. It looks for them by their
numbers in each call, so that shapes depend on values. Here the columns are a mask, which has the
shape of a row.

The library holds codes and scales first in the weight and, once the layer has run, in its
``state``. They are read where its forward would take them, and no compiled call moves them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from strop.errors import CaptureError
from strop.frontend.differentiated import is_differentiated, is_transformed
from strop.frontend.library_operators import INT_MM, MIXED_PRODUCT
from strop.frontend.stable_text import qualified
from strop.ir.mixed_product import UNIT

LAYERS = frozenset(("bitsandbytes.nn.modules.Linear8bitLt",))
CODES, SCALES = "CB", "SCB"  # the library's names
# Where a stand-in has them. The second is also the name in checkpoints.
_HELD = {"weight": CODES, SCALES: SCALES}


class HeldCodes:
    """Look up what such a layer computes with, as a table. What the library has put there since is
    found."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __getitem__(self, name: str) -> Any:
        return _held(self.layer, _HELD[name]) if name in _HELD else self.layer._parameters[name]


def _held(layer: Any, name: str) -> Any:
    """Return the library's tensor of this name: as its forward, from the weight if that has it."""
    weight = layer._parameters["weight"]
    source = layer.state if getattr(weight, CODES, None) is None else weight
    return getattr(source, name, None)


def is_int8(layer: Any) -> bool:
    """Tell whether a layer is such a linear, with a weight that has been quantised."""
    if qualified(type(layer)) not in LAYERS or layer.state.has_fp16_weights:
        return False
    weight, codes, scales = layer.weight, _held(layer, CODES), _held(layer, SCALES)
    if not (type(codes) is type(scales) is Tensor and codes.shape == weight.shape):
        return False
    are_known = codes.dtype is torch.int8 and scales.dtype is torch.float32
    is_one_place = codes.device == scales.device == weight.device
    return are_known and is_one_place and scales.shape == codes.shape[:1]


def held_places(layer: Any) -> list[tuple[Any, str]]:
    """Return where such a layer holds tensors: a table and a key of each, as a stand-in has them in
    its own order."""
    table = HeldCodes(layer)
    return [(table, name) for name in ("weight", "bias", SCALES)]


def watched_settings(layer: Any) -> Iterator[tuple[Any, str]]:
    """Yield where such a layer holds what is no tensor and decides what it computes."""
    yield from ((vars(layer), "state"), (_Settings(layer), "threshold"))
    yield _Settings(layer), "has_fp16_weights"


class _Settings:
    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __getitem__(self, name: str) -> Any:
        return getattr(self.layer.state, name)


def make_up(layer: Any) -> str:
    """Write out what such a layer is but for its tensors: part of a program's key."""
    return f"{qualified(type(layer))} threshold {float(layer.state.threshold).hex()}"


def share_codes(layer: Any) -> None:
    """Let the weight of such a layer look at the codes that the layer computes with, as its forward
    does after each call. A copied layer has them twice until then, and what is loaded into the
    weight would be lost."""
    weight, codes = layer.weight, _held(layer, CODES)
    if weight.data_ptr() != codes.data_ptr():
        weight.data = codes


class Int8Linear(nn.Module):
    """Stand in for such a layer, in a trace."""

    weight: Tensor
    SCB: Tensor
    bias: Tensor | None

    def __init__(self, layer: Any) -> None:
        super().__init__()
        table = HeldCodes(layer)
        self._parameters |= {name: table[name] for name in ("weight", "bias")}
        self._buffers[SCALES] = table[SCALES]
        self.training, self.threshold = layer.training, float(layer.state.threshold)
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Compute y = x W^T + b for x (rows, K) or (batch, rows, K), to y of x's type."""
        if x.dim() not in (2, 3):
            raise CaptureError(
                f"an int8 linear of bitsandbytes gets {x.dim()} dims: the library takes 2 or 3"
            )
        if not x.is_floating_point():
            raise CaptureError(f"an int8 linear of bitsandbytes gets {x.dtype}")
        if is_transformed() or is_differentiated((x, self.bias)):
            raise CaptureError("a gradient goes through an int8 linear of bitsandbytes")
        if 0 in x.shape:
            return x.new_empty((*x.shape[:-1], self.out_features))
        rows = x.reshape(-1, x.shape[-1])
        y = self._product(rows)
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def _product(self, rows: Tensor) -> Tensor:
        half = rows.to(torch.float16)  # as the library, whatever the type is
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        if not self.threshold:
            codes, most = _codes_of(half, half.abs(), None)
            y = self._sums(codes).float() * (most * self.SCB) * UNIT**2
            return (y if bias is None else y + bias).to(rows.dtype)
        size = half.abs()
        is_larger = size >= self.threshold
        columns = is_larger.any(0)
        codes, most = _codes_of(half, torch.where(is_larger, 0, size), columns)
        y: Tensor = MIXED_PRODUCT(
            self._sums(codes), most, rows, columns, self.weight, self.SCB, bias
        )
        return y

    def _sums(self, codes: Tensor) -> Tensor:
        sums: Tensor = INT_MM(codes, self.weight.t())
        return sums


def _codes_of(half: Tensor, size: Tensor, left_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the codes of rows, which are 0 in columns that are left out, and the largest of the
    sizes in each row."""
    most = size.amax(1, keepdim=True).float()
    scale = torch.where(most > 0, 127 / most, 0)  # a row of zeros has codes of 0
    codes = torch.round(half * scale)
    codes = codes if left_out is None else torch.where(left_out, 0, codes)
    return codes.to(torch.int8), most

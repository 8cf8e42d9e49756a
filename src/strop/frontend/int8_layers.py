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

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from strop.errors import CaptureError
from strop.frontend.composed_tensors import Inside
from strop.frontend.differentiated import is_differentiated, is_transformed
from strop.frontend.library_operators import INT_MM, MIXED_PRODUCT
from strop.frontend.stable_text import qualified
from strop.ir.mixed_product import UNIT

LAYERS = frozenset(("bitsandbytes.nn.modules.Linear8bitLt",))
CODES, SCALES = "CB", "SCB"  # the library's names
_IN_HALVES = "has_fp16_weights"


def _source(layer: Any) -> Any:
    """Return what holds the codes and scales: as for the layer's forward, the weight if it does."""
    weight = layer._parameters.get("weight")
    return layer.state if getattr(weight, CODES, None) is None else weight


def is_int8(layer: Any) -> bool:
    """Tell whether a layer is such a linear, with a weight that has been quantised."""
    kind = type(layer)
    if qualified(kind) not in LAYERS or not _has_own_forward(kind):
        return False
    state = vars(layer.state)
    if "threshold" not in state or state.get(_IN_HALVES, True):
        return False
    weight, source = layer._parameters.get("weight"), _source(layer)
    codes: Any = getattr(source, CODES, None)
    scales: Any = getattr(source, SCALES, None)
    are_there = weight is not None and type(codes) is type(scales) is Tensor
    if not are_there or codes.shape != weight.shape:
        return False
    are_known = codes.dtype is torch.int8 and scales.dtype is torch.float32
    is_one_place = codes.device == scales.device == weight.device
    return are_known and is_one_place and scales.shape == codes.shape[:1]


def _has_own_forward(kind: Any) -> bool:
    """Tell whether nobody has put another function in the place of a class's forward."""
    return getattr(kind.forward, "__qualname__", "") == f"{kind.__qualname__}.forward"


def held_places(layer: Any) -> list[tuple[str, Any, str]]:
    """Return where such a layer holds tensors: the name of each in a stand-in, in the order there,
    a table and a key."""
    source = _source(layer)
    # The dictionary of a tensor may be exchanged for another's (torch.utils.swap_tensors).
    table = Inside(source) if source is layer.weight else vars(source)
    own = ("bias", layer._parameters, "bias")
    return [("weight", table, CODES), own, (SCALES, table, SCALES)]


def watched_places(layer: Any) -> list[tuple[Any, str]]:
    """Return where such a layer holds what decides which tensors these are, and what it computes
    with them."""
    state = vars(layer.state)
    places = [(layer._parameters, "weight"), (vars(layer), "state"), (Inside(layer), "__class__")]
    places += [(state, "threshold"), (state, _IN_HALVES)]
    return places if _source(layer) is layer.weight else [*places, (Inside(layer.weight), CODES)]


def read_by_code(parts: Sequence[tuple[str, Any]]) -> list[tuple[str, nn.Module]]:
    """Return parts with their paths as their code is to be watched: of such layers one without
    attributes for all of a class, as no code of theirs runs. Their states change in each call."""
    return [(path, _bare(part.__class__) if is_int8(part) else part) for path, part in parts]


@lru_cache(maxsize=16)
def _bare(kind: type) -> nn.Module:
    made: nn.Module = object.__new__(kind)
    nn.Module.__init__(made)
    return made


def make_up(layer: Any) -> str:
    """Write out what such a layer is but for its tensors: part of a program's key."""
    return f"{qualified(type(layer))} threshold {float(layer.state.threshold).hex()}"


def share_codes(layer: Any) -> None:
    """Let the weight of such a layer look at the codes that the layer computes with, as its forward
    does after each call. A copied layer has them twice until then, and what is loaded into the
    weight would be lost."""
    weight, codes = layer.weight, getattr(_source(layer), CODES)
    if weight.data_ptr() != codes.data_ptr():
        weight.data = codes


def stand_in(layer: Any) -> nn.Module:
    """Return what stands for such a layer in a trace: it holds the same tensors, under the names of
    checkpoints, and code may ask for its class."""
    made: Any = object.__new__(_stand_in_class(layer.__class__))
    nn.Module.__init__(made)
    held = {name: table[key] for name, table, key in held_places(layer)}
    made._buffers[SCALES] = held.pop(SCALES)
    made._parameters |= held
    made.training, made.threshold = layer.training, float(layer.state.threshold)
    made.in_features, made.out_features = layer.in_features, layer.out_features
    found: nn.Module = made
    return found


@lru_cache(maxsize=16)
def _stand_in_class(kind: type) -> type:
    return type(kind.__name__, (Int8Linear, kind), {"__module__": __name__})


class Int8Linear(nn.Linear):
    """Compute what such a layer does, in a trace."""

    SCB: Tensor
    threshold: float

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
        y: Tensor
        half = rows.to(torch.float16)  # as the library, whatever the type is
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        if self.threshold <= 0:
            codes, most = _codes_of(half)
            y = self._sums(codes).float() * (most * self.SCB) * UNIT**2
            return (y if bias is None else y + bias).to(rows.dtype)
        is_larger = half.abs() >= self.threshold
        columns = is_larger.to(torch.int8).amax(0) > 0  # bytes: they may go through memory
        codes, most = _codes_of(torch.where(is_larger, 0, half))
        sums = self._sums(torch.where(columns, 0, codes))
        y = MIXED_PRODUCT(sums, most, rows, columns, self.weight, self.SCB, bias)
        return y

    def _sums(self, codes: Tensor) -> Tensor:
        sums: Tensor = INT_MM(codes, self.weight.t())
        return sums


def _codes_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of rows, and the size of the largest number in each."""
    most = rows.abs().amax(1, keepdim=True).float()
    scale = torch.where(most > 0, 127 / most, 0)  # a row of zeros has codes of 0
    return torch.round(rows * scale).to(torch.int8), most

"""Let compiled code read the weights of the node pack ComfyUI-GGUF.

Its layers hold codes in tensors of its own class, and dequantise them by functions of its own when
they run. In a trace a layer meets the plain codes, and calls the same functions.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from strop import extensions

from . import gguf_adapters

_TENSOR = "GGMLTensor"


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that hold weights of that class, and have Strop know the class."""
    found = []
    for layer in model.modules():
        kinds = {type(t) for t in layer._parameters.values() if type(t).__name__ == _TENSOR}
        for kind in kinds:
            extensions.read_codes(kind, others=("patches", "is_largest_weight"))
        found += [layer] if kinds else []
    return found


@contextlib.contextmanager
def plain_codes(model: nn.Module) -> Iterator[None]:
    """Let such layers take the codes as they are meanwhile, instead of copying what holds them."""
    owners = {
        owner
        for layer in model.modules()
        for owner in type(layer).__mro__
        if "cast_bias_weight" in vars(owner) and "is_ggml_quantized" in vars(owner)
    }
    own = {owner: vars(owner)["cast_bias_weight"] for owner in owners}
    for owner in owners:
        owner.cast_bias_weight = _weights_of
    try:
        yield
    finally:
        for owner, function in own.items():
            owner.cast_bias_weight = function


def _weights_of(
    layer: Any, input: Any = None, dtype: Any = None, device: Any = None, bias_dtype: Any = None
) -> tuple[Any, Any]:
    """Return the weight and the bias of a layer as its own function does."""
    dtype = dtype or getattr(input, "dtype", torch.float32)
    owner = next(kind for kind in type(layer).__mro__ if "is_ggml_quantized" in vars(kind))
    dequantised = sys.modules[owner.__module__].dequantize_tensor
    weight = dequantised(layer.weight, dtype, layer.dequant_dtype)
    if gguf_adapters.UP in layer._buffers:
        up, down = layer._buffers[gguf_adapters.UP], layer._buffers[gguf_adapters.DOWN]
        weight = weight + up.to(weight.dtype) @ down.to(weight.dtype)
    if layer.bias is None:
        return weight, None
    bias_dtype = bias_dtype or dtype
    return weight, dequantised(layer.bias, dtype, layer.dequant_dtype).to(bias_dtype)

"""Let compiled code compute with LoRAs that ComfyUI-GGUF leaves beside its codes.

The pack adds a LoRA to the dequantised weight in each step, in functions of ComfyUI's own. Here a
layer gets the two factors of the sum of its LoRAs as buffers, and the compiled code adds their
product. Factors are data: another strength, or another LoRA for the same layers, compiles nothing
as long as its rank is in the same row of ``RANKS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

UP, DOWN = "strop_up", "strop_down"  # buffers of a layer, in fp32: [rows, rank], [rank, columns]
RANKS = (16, 32, 64, 128, 256, 512)  # factors have zeros up to one of these
# What the factors of a layer were made of. It is no attribute, as Strop would compare that.
_KEPT: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
_NOT_BUILT = "a LoRA beside GGUF weights has {}, and is computed in each step"


class _Factors(NamedTuple):
    """Hold one LoRA of a layer, whose rows begin at ``begin``; ``scale`` is of its product."""

    up: Tensor
    down: Tensor
    scale: float
    begin: int


def patches_of(weight: Any) -> list[Any]:
    """Return what ComfyUI has for ``calculate_weight`` of a weight."""
    return [patch for patches, _ in getattr(weight, "patches", None) or () for patch in patches]


def _factors(patch: Any, shape: Sequence[int]) -> _Factors | str:
    """Return the factors of a patch for a weight of this shape, or what stands against that."""
    strength, adapter, strength_model, offset, function = (*patch, None, None)[:5]
    if getattr(adapter, "name", "") != "lora":
        return f"a patch of the kind {getattr(adapter, 'name', type(adapter).__name__)}"
    up, down, alpha, mid, lengths, reshaped = (*adapter.weights, None)[:6]
    if mid is not None or lengths is not None or reshaped is not None:
        return "a middle factor, lengths (DoRA) or another shape"
    if strength_model != 1.0 or function is not None or len(shape) != 2:
        return "a function, a strength of the model or a convolution"
    if offset is not None and offset[0] != 0:
        return "an offset in columns"
    scale = 1.0 if alpha is None else float(alpha) / down.shape[0]
    return _Factors(up, down, float(strength) * scale, offset[1] if offset else 0)


def follow(layers: Sequence[nn.Module]) -> str:
    """Give each layer the factors of its adapters as they are now, or say why there are none. All
    have one rank, so that a LoRA for all blocks leaves blocks alike."""
    wanted = {layer: patches_of(layer.weight) for layer in layers}
    if any(patches_of(layer._parameters.get("bias")) for layer in layers):
        return _NOT_BUILT.format("a part for a bias")
    if all(_is_as_kept(layer, patches) for layer, patches in wanted.items()):
        return ""
    found: dict[nn.Module, list[_Factors]] = {}
    for layer, patches in wanted.items():
        for patch in patches:
            factors = _factors(patch, layer.weight.tensor_shape)
            if isinstance(factors, str):
                return _NOT_BUILT.format(factors)
            found.setdefault(layer, []).append(factors)
    rank = _row_of(max((sum(len(f.down) for f in each) for each in found.values()), default=0))
    for layer, patches in wanted.items():
        if patches:
            # normal tensors, of which torch counts the writes
            with torch.inference_mode(False), torch.no_grad():
                _put(layer, *_summed(found[layer], layer.weight, rank))
            _KEPT[layer] = patches
        else:
            drop([layer])
    return ""


def drop(layers: Sequence[nn.Module]) -> None:
    """Take all factors from layers."""
    for layer in layers:
        for name in (UP, DOWN):
            layer._buffers.pop(name, None)
            layer._non_persistent_buffers_set.discard(name)
        _KEPT.pop(layer, None)


def _is_as_kept(layer: nn.Module, patches: Sequence[Any]) -> bool:
    """Tell whether a layer's factors were made of these patches, and lie where its codes do."""
    kept = _KEPT.get(layer, ())
    if len(kept) != len(patches) or not all(map(_is_same, kept, patches)):
        return False
    return not patches or layer._buffers[UP].device == layer.weight.device


def _is_same(a: Any, b: Any) -> bool:
    return a[0] == b[0] and a[1] is b[1] and a[2:] == b[2:]


def _row_of(rank: int) -> int:
    return next((row for row in RANKS if row >= rank), -(-rank // RANKS[-1]) * RANKS[-1])


def _summed(found: Sequence[_Factors], weight: Any, rank: int) -> tuple[Tensor, Tensor]:
    """Return factors of the sum of several products."""
    rows, columns = weight.tensor_shape
    up = torch.zeros(rows, rank, device=weight.device)
    down = torch.zeros(rank, columns, device=weight.device)
    at = 0
    for each in found:
        count, end = len(each.down), each.begin + len(each.up)
        up[each.begin : end, at : at + count] = each.up.to(weight.device).float() * each.scale
        down[at : at + count] = each.down.to(weight.device).float()
        at += count
    return up, down


def _put(layer: nn.Module, up: Tensor, down: Tensor) -> None:
    """Write factors where the last ones are, or put them there."""
    for name, value in ((UP, up), (DOWN, down)):
        known = layer._buffers.get(name)
        if known is not None and (known.shape, known.device) == (value.shape, value.device):
            known.copy_(value)
        else:
            layer.register_buffer(name, value, persistent=False)

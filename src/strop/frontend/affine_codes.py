"""Open the operators by which PT2E writes quantised values (``quantized_decomposed``).

They are Python in torch, so that what they are made of is traced. Those that get a scale or a zero
point as a tensor ask for its value by ``item()``, which no trace can answer: they are written here,
with the roundings that torch has behind the ``item()``. A scale is a number of 64 bits then, whose
inverse is rounded to fp32, and zero points are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

SPACE = "quantized_decomposed"
_BY_TORCH = (  # without an ``item()``
    "quantize_per_tensor.default",
    "dequantize_per_tensor.default",
    "quantize_per_channel.default",
    "dequantize_per_channel.default",
)
_UNSIGNED = (torch.uint8, torch.quint8)


def opened_codes() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yield those that are defined, each with a function that computes the same."""
    for name in _BY_TORCH:
        if (found := _found(name)) is not None:
            yield found, _by_torch(found)
    for name, function in _WITHOUT_ITEM.items():
        if (found := _found(name)) is not None:
            yield found, function


def _found(name: str) -> Any:
    """Return an operator, which torch defines once somebody imports its quantisation."""
    if not torch._C._dispatch_has_kernel(f"{SPACE}::{name.removesuffix('.default')}"):
        return None
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, SPACE), packet), overload)


def _by_torch(operator: Any) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        return operator._op_dk(DispatchKey.CompositeExplicitAutograd, *given, **named)

    return call


def _quantised(
    x: Tensor, scale: Tensor, zero: Tensor, least: int, most: int, dtype: torch.dtype
) -> Any:
    if not x.is_floating_point() or x.dtype is torch.float64:
        return NotImplemented  # torch raises
    inverse = (1.0 / _one(scale).double()).float()
    codes = torch.round(x.float() * inverse) + _one(zero).float()
    return torch.clamp(codes, least, most).to(dtype)


def _dequantised(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    least: int,
    most: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Any:
    if codes.dtype is not dtype or out_dtype not in (None, torch.float32):
        return NotImplemented
    return (codes.float() - _one(zero).float()) * _one(scale).float()


def _one(x: Tensor) -> Tensor:
    return x.reshape(())


def _chosen(
    x: Tensor, least: int, most: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the scale (1,) and the zero point (1,) of x, for codes from ``least`` to ``most``."""
    low, high = _ends(x)
    span = _rounded(high - low, x)
    scale = torch.maximum(_rounded(span / float(most - least), x), _least(x, eps))
    zero = least - torch.round(low / scale).to(torch.int32)
    return scale.double(), torch.clamp(zero, least, most).long()


def _chosen_symmetric(
    x: Tensor, least: int, most: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    low, high = _ends(x)
    largest = torch.maximum(-low, high)
    scale = torch.maximum(_rounded(largest / (float(most - least) / 2), x), _least(x, eps))
    zero = torch.full((1,), 128 if dtype in _UNSIGNED else 0, device=x.device)
    return scale.double(), zero


def _ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return in fp32 the least and the largest number of x, and of 0, which has to have a code.
    Rows come first: the kernel that computes them has these, and reads nothing again."""
    nothing = torch.zeros((), device=x.device)
    least, most = (x.amin(-1), x.amax(-1)) if x.dim() > 1 else (x, x)
    low, high = least.amin().float(), most.amax().float()
    return torch.minimum(low, nothing), torch.maximum(high, nothing)


def _rounded(y: Tensor, x: Tensor) -> Tensor:
    """Return y as torch has it between two steps, in the type of x."""
    return y.to(x.dtype).float()


def _least(x: Tensor, eps: float) -> Tensor:
    return torch.full((1,), eps, dtype=torch.float32, device=x.device)


_WITHOUT_ITEM: dict[str, Callable[..., Any]] = {
    "quantize_per_tensor.tensor": _quantised,
    "dequantize_per_tensor.tensor": _dequantised,
    "choose_qparams.tensor": _chosen,
    "choose_qparams_symmetric.tensor": _chosen_symmetric,
}

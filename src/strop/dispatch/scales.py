"""Scales are numbers that everybody turns: of IP-Adapters, ControlNets and FreeU.

They are inputs of the first graph already, so that no other value asks for another one. Each place
has an input of its own, as some set the scale of every layer. Whole numbers count as floats there.

The code of some multiplies by a scale, but asks first whether it is 0, to save the work. A graph
has no such branch: what it adds is 0 where the scale is (``Factor``), also where the rest has
overflown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import SymFloat, Tensor, nn

from strop.dispatch.signature import NumberRef, Skeleton

_PROCESSORS = "diffusers.models.attention_processor"
_BLOCKS = "diffusers.models.unets.unet_2d_blocks"
_FREE_U = frozenset(("s1", "s2", "b1", "b2"))
# attributes, by the class whose code multiplies by them
SETTINGS: Mapping[tuple[str, str], frozenset[str]] = {
    (_PROCESSORS, "IPAdapterAttnProcessor"): frozenset(("scale",)),
    (_PROCESSORS, "IPAdapterAttnProcessor2_0"): frozenset(("scale",)),
    (_PROCESSORS, "IPAdapterXFormersAttnProcessor"): frozenset(("scale",)),
    (_PROCESSORS, "SD3IPAdapterJointAttnProcessor2_0"): frozenset(("scale",)),
    ("diffusers.models.transformers.transformer_flux", "FluxIPAdapterAttnProcessor"): frozenset(
        ("scale",)
    ),
    (_BLOCKS, "CrossAttnUpBlock2D"): _FREE_U,
    (_BLOCKS, "UpBlock2D"): _FREE_U,
}
ARGUMENTS = frozenset(("conditioning_scale",))  # of calls, by name
# modules whose ``__call__`` asks whether a scale is 0 only to save work
_SAVES_WORK = _PROCESSORS


def is_scale(part: nn.Module, name: str) -> bool:
    """Tell whether an attribute of a module is a scale."""
    kind = type(part)
    return name in SETTINGS.get((kind.__module__, kind.__qualname__), ())


def as_floats(value: Any) -> Any:
    """Return a scale, or a container of them, with floats in the place of whole numbers."""
    if type(value) is int:
        return float(value)
    return type(value)(map(as_floats, value)) if type(value) in (list, tuple) else value


def scales_of_call(skeleton: Skeleton) -> Iterator[int]:
    """Yield which floats of a call are scales: in the skeleton they have these arguments' names."""
    if not isinstance(skeleton, tuple):
        return
    for item in skeleton:
        if isinstance(item, tuple) and len(item) == 2 and item[0] in ARGUMENTS:
            yield from _floats(item[1])
        else:
            yield from scales_of_call(item)


def _floats(skeleton: Skeleton) -> Iterator[int]:
    if isinstance(skeleton, NumberRef):
        yield skeleton.index
    elif isinstance(skeleton, tuple):
        for item in skeleton:
            yield from _floats(item)


def as_traced(part: nn.Module, name: str, value: Any) -> Any:
    """Return what stands for a setting in a trace: for scales that the code compares with 0 to save
    work, factors."""
    own = vars(type(part)).get("__call__")  # another one if somebody has replaced it
    saves_work = getattr(own, "__module__", "") == _SAVES_WORK
    return _as_factors(value) if saves_work and is_scale(part, name) else value


def _as_factors(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_as_factors, value))
    return Factor(value) if isinstance(value, SymFloat) else value


class Factor:
    """Stand for a number that code multiplies tensors by. It is never 0 to who asks, and makes 0 of
    everything where it is."""

    def __init__(self, number: SymFloat) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return False if _is_zero(other) else bool(self.number == other)

    def __ne__(self, other: object) -> bool:
        return True if _is_zero(other) else bool(self.number != other)

    __hash__ = None  # type: ignore[assignment]

    def __mul__(self, other: Any) -> Any:
        product = self.number * other
        if not isinstance(other, Tensor):
            return product
        number: Any = self.number
        wide = torch.full((), number, dtype=torch.float64, device=other.device)
        return product.masked_fill(wide == 0, 0.0)

    __rmul__ = __mul__


def _is_zero(value: object) -> bool:
    return type(value) in (int, float) and value == 0

"""Say of each kind of adapter what it adds to the weight of the layer that peft has wrapped.

A layer that computes what a plain one with another weight does is *folded*: that weight stands for
the layer's own and all adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

Factors = tuple[Tensor, Tensor]  # (rows, rank) and (rank, columns): their product is added


@dataclass(frozen=True, slots=True)
class Term:
    """This is one adapter's part of a weight: ``scale`` times the product of ``factors``, or where
    there are none, times ``delta``, which is computed in at least fp32."""

    scale: float
    factors: Factors | None
    delta: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """This says of a class of wrapped layers: the class of the plain ones in them, which attributes
    hold tensors by the name of an adapter, whether a layer can be folded, and what an adapter of
    scale 1 adds. ``factors`` is None where that is no product of two matrices."""

    base: type[nn.Module]
    tables: tuple[str, ...]
    is_exact: Callable[[Any], bool]
    delta: Callable[[Any, str], Tensor]
    factors: Callable[[Any, str], Factors] | None = None

    def places(self, layer: nn.Module) -> list[tuple[dict[str, Any], str]]:
        """Return where the tensors of all adapters are held, of inactive ones too."""
        found: list[tuple[dict[str, Any], str]] = []
        for table in self._tables(layer):
            for owner in (table, *table._modules.values()):
                if owner is not None and (own := owner._parameters):
                    found += [(own, key) for key in own]
        return found

    def tensors(self, layer: nn.Module) -> list[Tensor]:
        """Return the tensors of all adapters, of inactive ones too."""
        found = [table[key] for table, key in self.places(layer)]
        return [tensor for tensor in found if tensor is not None]

    def has(self, layer: nn.Module, name: str) -> bool:
        """Tell whether a layer has an adapter of this name."""
        tables = self._tables(layer)
        return any(name in table._modules or name in table._parameters for table in tables)

    def _tables(self, layer: nn.Module) -> list[nn.Module]:
        found = map(layer._modules.get, self.tables)
        return [table for table in found if table is not None]

    def term(self, layer: Any, name: str, scale: float) -> Term:
        """Return what an adapter adds; ``scale`` multiplies its own."""
        factors = None if self.factors is None else self.factors(layer, name)
        own = float(layer.scaling[name]) * scale
        return Term(own, factors, partial(self.delta, layer, name))


# LoRA: https://arxiv.org/abs/2106.09685


def _lora_factors(layer: Any, name: str) -> Factors:
    parts = layer._modules  # thousands of reads, for which peft and torch call functions
    first, second = (parts[n]._modules[name]._parameters["weight"] for n in ("lora_A", "lora_B"))
    return _flat(second), _flat(first)


def _flat(factor: Tensor) -> Tensor:
    return factor if factor.dim() == 2 else factor.flatten(1)


def _lora_delta(layer: Any, name: str) -> Tensor:
    second, first = _lora_factors(layer, name)
    product: Tensor = second.float() @ first.float()
    return product.view(layer.base_layer.weight.shape)


def _is_plain_lora(layer: Any) -> bool:
    if layer.lora_variant or any(layer.lora_bias.values()):
        return False
    return not getattr(layer, "fan_in_fan_out", False)


# What the first of two convolutions has to have in common with the layer's own.
_WINDOW = ("stride", "padding", "dilation", "padding_mode", "groups")


def _is_plain_convolution(layer: Any) -> bool:
    """Tell whether each first factor moves over pictures as the layer does, whose groups and
    dilation peft does not pass on."""
    base = layer.base_layer
    firsts = layer.lora_A.values()
    same = (getattr(base, n) == getattr(first, n) for first in firsts for n in _WINDOW)
    return base.groups == 1 and _is_plain_lora(layer) and all(same)


_LORA = ("lora_A", "lora_B", "lora_magnitude_vector")
# By the module and the name of the wrapped layer's class.
FOLDED: Mapping[tuple[str, str], AdapterKind] = {
    ("peft.tuners.lora.layer", "Linear"): AdapterKind(
        nn.Linear, _LORA, _is_plain_lora, _lora_delta, _lora_factors
    ),
    ("peft.tuners.lora.layer", "Conv2d"): AdapterKind(
        nn.Conv2d, _LORA, _is_plain_convolution, _lora_delta, _lora_factors
    ),
}


def name_of(layer: nn.Module) -> tuple[str, str]:
    return type(layer).__module__, type(layer).__name__


def kind_of(layer: nn.Module) -> AdapterKind:
    return FOLDED[name_of(layer)]

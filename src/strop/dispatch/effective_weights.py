"""Sum the weights that stand for a layer with its adapters: W = W0 + sum of s_i B_i A_i, over the
active adapters.

Sums are in fp32 and rounded once, to the type of W0, and always start from W0: to take an adapter
out gives back the very bits that were there before. W0 and the factors stay as they are, and so
does what ``state_dict`` gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strop.dispatch.adapter_weights import AdapterWeights, WrappedLayer
from strop.dispatch.weight_sums import WeightSum, write_sums
from strop.frontend.adapted_layers import active_adapters, has_bias, is_folded, may_fold
from strop.frontend.adapter_kinds import kind_of


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedLayer(WrappedLayer):
    """A wrapped layer, and what stands for its weight, and for its bias where adapters add to it
    (``lora_bias`` of peft)."""

    weight: nn.Parameter
    bias: nn.Parameter | None = None

    @property
    def written(self) -> dict[str, nn.Parameter]:
        bias = {} if self.bias is None else {"bias": self.bias}
        return {"weight": self.weight} | bias

    @property
    def weights(self) -> list[Tensor]:
        """Return W0, and the layer's own bias where another stands for it."""
        held: Any = self.base._parameters
        return [held[name] for name in self.written]

    def places(self) -> Iterator[tuple[Any, str]]:
        yield from WrappedLayer.places(self)
        yield from ((self.base._parameters, name) for name in self.written)

    def sums(self, scale: float) -> Iterator[WeightSum]:
        """Yield what they are to be; ``scale`` multiplies that of each adapter."""
        wrapped, kind = self.wrapped, kind_of(self.wrapped)
        names, (own, *biases) = active_adapters(wrapped), self.weights
        yield WeightSum(self.weight, own, tuple(kind.term(wrapped, n, scale) for n in names))
        if self.bias is not None:
            added = [kind.bias_term(wrapped, name, scale) for name in names]
            yield WeightSum(self.bias, biases[0], tuple(t for t in added if t is not None))


class EffectiveWeights(AdapterWeights[AdaptedLayer]):
    """Hold the weights of all adapted layers of one module."""

    def missing_bytes(self, wrapped: Iterable[Any]) -> int:
        """Return the bytes of the weights that would be made for these layers."""
        new = (part.base_layer for part in wrapped if id(part.base_layer) not in self._layers)
        return sum(base.weight.nbytes for base in new)

    def scan(
        self, module: nn.Module, parts: Sequence[nn.Module], leave: Set[int] = frozenset()
    ) -> None:
        """Look for adapted layers among all parts of a module, but for those with these ids, whose
        weights are then to be written. Those of layers that are known stay at the same place."""
        found: dict[int, AdaptedLayer] = {}
        wrapped = [part for part in parts if is_folded(part) and id(part) not in leave]
        for part in wrapped if wrapped and may_fold(module, parts) else ():
            base: Any = part.base_layer
            known = self._layers.get(id(base))
            made = {} if known is None else known.written
            names = ("weight", "bias") if has_bias(part) else ("weight",)
            standing = [_standing_for(base._parameters[n], made.get(n)) for n in names]
            found[id(base)] = AdaptedLayer(part, *standing)
        self._take(found)

    def _serves(self) -> bool:
        return all(is_folded(layer.wrapped) for layer in self._layers.values())

    def _write(self, layers: Sequence[AdaptedLayer], scale: float) -> None:
        write_sums([one for layer in layers for one in layer.sums(scale)])


def _standing_for(own: Tensor, known: nn.Parameter | None) -> nn.Parameter:
    """Return what stood for a Parameter, if that still can, or a new one."""
    looks = [(t.shape, t.dtype, t.device) for t in (own, known) if t is not None]
    if known is not None and looks[0] == looks[1]:
        return known
    return nn.Parameter(torch.empty_like(own), requires_grad=False)

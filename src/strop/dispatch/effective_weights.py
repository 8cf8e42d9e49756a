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
from strop.frontend.adapted_layers import active_adapters, is_folded, may_fold
from strop.frontend.adapter_kinds import kind_of


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedLayer(WrappedLayer):
    """A wrapped layer, and the weight that stands for it."""

    weight: nn.Parameter

    @property
    def written(self) -> dict[str, nn.Parameter]:
        return {"weight": self.weight}

    @property
    def own(self) -> Tensor:
        """Return W0."""
        found = self.base._parameters["weight"]
        assert found is not None
        return found

    @property
    def weights(self) -> Sequence[Tensor]:
        return (self.own,)

    def places(self) -> Iterator[tuple[Any, str]]:
        yield from WrappedLayer.places(self)
        yield self.base._parameters, "weight"

    def fits(self, own: Tensor) -> bool:
        """Tell whether the weight can stand for this one."""
        ours = self.weight
        return (own.shape, own.dtype, own.device) == (ours.shape, ours.dtype, ours.device)

    def sum(self, scale: float) -> WeightSum:
        """Return what the weight is to be; ``scale`` multiplies that of each adapter."""
        wrapped, kind = self.wrapped, kind_of(self.wrapped)
        terms = tuple(kind.term(wrapped, name, scale) for name in active_adapters(wrapped))
        return WeightSum(self.weight, self.own, terms)


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
            weight = known.weight if known is not None and known.fits(base.weight) else None
            if weight is None:
                weight = nn.Parameter(torch.empty_like(base.weight), requires_grad=False)
            found[id(base)] = AdaptedLayer(part, weight)
        self._take(found)

    def _serves(self) -> bool:
        return all(is_folded(layer.wrapped) for layer in self._layers.values())

    def _write(self, layers: Sequence[AdaptedLayer], scale: float) -> None:
        write_sums([layer.sum(scale) for layer in layers])

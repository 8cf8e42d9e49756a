"""Keep the weights that stand for a layer with its adapters, and write them anew when a source is
another: W = W0 + sum of s_i B_i A_i, over the active adapters.

Sums are in fp32 and rounded once, to the type of W0, and always start from W0: to take an adapter
out gives back the very bits that were there before. W0 and the factors stay as they are, and so
does what ``state_dict`` gives. A weight is written where it lies, so that nothing that reads it has
to be bound anew.

What may change without a new object, such as factors that a hot swap writes through ``.data``, is
compared by value: a copy of all factors, and of the first row of each W0, is kept for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from strop.dispatch.known_settings import KnownSettings
from strop.dispatch.known_values import KnownValues
from strop.dispatch.weight_sums import WeightSum, write_sums
from strop.frontend.adapted_layers import active_adapters, is_folded, may_fold
from strop.frontend.adapter_kinds import AdapterKind, kind_of

_VERSION = attrgetter("_version")
# What peft keeps in a wrapped layer of which adapters count.
SETTINGS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedLayer:
    """A wrapped layer, and the weight that stands for it."""

    wrapped: Any
    weight: nn.Parameter

    @property
    def base(self) -> nn.Module:
        found: nn.Module = self.wrapped.base_layer
        return found

    @property
    def own(self) -> Tensor:
        """Return W0."""
        found = self.base._parameters["weight"]
        assert found is not None
        return found

    @property
    def kind(self) -> AdapterKind:
        return kind_of(self.wrapped)

    def fits(self, own: Tensor) -> bool:
        """Tell whether the weight can stand for this one."""
        ours = self.weight
        return (own.shape, own.dtype, own.device) == (ours.shape, ours.dtype, ours.device)

    def sum(self, scale: float) -> WeightSum:
        """Return what the weight is to be; ``scale`` multiplies that of each adapter."""
        wrapped, kind = self.wrapped, self.kind
        terms = tuple(kind.term(wrapped, name, scale) for name in active_adapters(wrapped))
        return WeightSum(self.weight, self.own, terms)

    def sources(self) -> list[tuple[Any, str]]:
        """Return where the objects are held that the weight depends on."""
        return [*sources_of(self.wrapped), (self.base._parameters, "weight")]


def sources_of(wrapped: Any) -> Iterator[tuple[Any, str]]:
    """Yield where the objects are held of which a layer's adapters and their scales are."""
    own = wrapped.__dict__
    yield from ((own, name) for name in SETTINGS)
    yield from ((own["scaling"], name) for name in own["scaling"])
    yield from kind_of(wrapped).places(wrapped)


def tensors_of(wrapped: Any) -> Iterator[Tensor]:
    """Yield the tensors of a layer's adapters, and scales that are tensors: peft makes those for a
    hot swap, which writes to them."""
    yield from kind_of(wrapped).tensors(wrapped)
    scales = wrapped.__dict__["scaling"].values()
    yield from (scale for scale in scales if isinstance(scale, Tensor))


class EffectiveWeights:
    """Hold the weights of all adapted layers of one module."""

    def __init__(self) -> None:
        self._layers: dict[int, AdaptedLayer] = {}  # by the id of the layer that is wrapped
        self._scale: float | None = 1.0  # of all adapters in the weights; None: nothing is written
        self._settings = KnownSettings(())
        self._hint = KnownSettings(())  # those of one layer
        self._watched: list[Tensor] = []
        self._versions: list[int] = []  # of each W0
        self._pointers: list[int] = []  # of each W0 and of all factors
        self._values = KnownValues([])

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def size_bytes(self) -> int:
        return sum(layer.weight.nbytes for layer in self._layers.values())

    @property
    def tables(self) -> Mapping[int, dict[str, Any]]:
        """Return, by the id of a layer that is wrapped, its Parameters with the weight that stands
        for its own."""
        return {
            number: layer.base._parameters | {"weight": layer.weight}
            for number, layer in self._layers.items()
        }

    @property
    def stand_ins(self) -> dict[int, nn.Module]:
        """Return, by the id of a wrapped layer, the plain one that stands for it."""
        return {id(layer.wrapped): layer.base for layer in self._layers.values()}

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
        self._layers, self._scale = found, None if found else 1.0

    def begin_look(self) -> None:
        """Begin to compare values, which a GPU does beside what is launched from here on."""
        if self._layers and self._scale is not None:
            self._values.begin()

    def seem_others(self, scale: float) -> bool:
        """Tell whether what most changes of adapters do has been done: it is quick, and knows one
        layer alone."""
        return bool(self._layers) and (scale != self._scale or self._hint.differ())

    def has_other_layers(self) -> bool:
        """Tell whether a layer is no longer one for which a weight can stand."""
        if not self._layers or not self._settings.differ():
            return False
        return not all(is_folded(layer.wrapped) for layer in self._layers.values())

    def refresh(self, scale: float) -> bool:
        """Write the weights anew if a source or the scale has changed since, and tell whether that
        was so."""
        if not self._layers:
            return False
        if self._scale is None:
            self._write(scale)
            self._watch()
            return True
        has_new_values = self._values.differ()  # waits for what ``begin_look`` has begun
        has_moved = self._have_moved()
        has_new_settings = self._settings.differ()
        if not (scale != self._scale or has_new_values or has_moved or has_new_settings):
            return False
        self._write(scale)
        if has_new_values or has_moved or has_new_settings:
            self._watch(has_new_values=has_new_values or has_moved)
        return True

    def needs_refresh(self, scale: float) -> bool:
        """Tell whether weights are to be written whether or not anybody has changed adapters."""
        return bool(self._layers) and scale != self._scale

    def _have_moved(self) -> bool:
        """Tell whether a W0 was written to, or the memory of a W0 or of a factor is another."""
        return (
            list(map(_VERSION, self._watched[: len(self._layers)])) != self._versions
            or list(map(Tensor.data_ptr, self._watched)) != self._pointers
        )

    def _write(self, scale: float) -> None:
        with torch.inference_mode(False):
            write_sums([layer.sum(scale) for layer in self._layers.values()])
        self._scale = scale

    def _watch(self, *, has_new_values: bool = True) -> None:
        """Remember all that the weights have come from. Unless it ``has_new_values``, what is known
        of these holds."""
        layers = list(self._layers.values())
        self._settings = KnownSettings(chain.from_iterable(one.sources() for one in layers))
        self._hint = KnownSettings(layers[0].sources())
        bases = [layer.own for layer in layers]
        found = [t for layer in layers for t in tensors_of(layer.wrapped)]
        known, self._watched = self._watched, [*bases, *found]
        self._versions = list(map(_VERSION, bases))
        self._pointers = list(map(Tensor.data_ptr, self._watched))
        same = len(known) == len(self._watched) and all(map(is_, known, self._watched))
        if has_new_values or not same:
            with torch.inference_mode(False):
                self._values = KnownValues([t.detach() for t in (*(b[:1] for b in bases), *found)])

"""Hold what programs read in the place of the weights of layers with adapters, and write it anew
when a source is another.

It is written where it lies, so that nothing that reads it has to be bound anew. What may change
without a new object, such as factors that a hot swap writes through ``.data``, is compared by
value: a copy of all factors, and of the first row of each W0 that counts, is kept for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from strop.dispatch.known_settings import KnownSettings
from strop.frontend.adapter_kinds import kind_of
from strop.runtime.derived.known_values import KnownValues
from strop.runtime.derived.sources import KnownMemory, KnownWrites, Sources

# What peft keeps in a wrapped layer of which adapters count.
SETTINGS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def _wait_for_nobody() -> None:
    """Do nothing: nobody reads what is about to be written."""


@dataclass(frozen=True, slots=True, eq=False)
class WrappedLayer:
    """A layer that peft has wrapped, and what a program reads for it."""

    wrapped: Any

    @property
    def base(self) -> nn.Module:
        found: nn.Module = self.wrapped.base_layer
        return found

    @property
    def written(self) -> dict[str, nn.Parameter]:
        """Return what is read, by the names that it has among the layer's Parameters."""
        raise NotImplementedError

    @property
    def weights(self) -> Sequence[Tensor]:
        """Return the layer's own weights of which that is made."""
        return ()

    def places(self) -> Iterator[tuple[Any, str]]:
        """Yield where the objects are held of which the adapters and their scales are."""
        own = self.wrapped.__dict__
        yield from ((own, name) for name in SETTINGS)
        yield from ((own["scaling"], name) for name in own["scaling"])
        yield from kind_of(self.wrapped).places(self.wrapped)

    def factors(self) -> Iterator[Tensor]:
        """Yield the tensors of the adapters, and scales that are tensors: peft makes those for a
        hot swap, which writes to them."""
        yield from kind_of(self.wrapped).tensors(self.wrapped)
        scales = self.wrapped.__dict__["scaling"].values()
        yield from (scale for scale in scales if isinstance(scale, Tensor))


Layer = TypeVar("Layer", bound=WrappedLayer)


class AdapterWeights(Generic[Layer]):
    """Hold what is read for some wrapped layers of one module. ``rows``: which adapters rows of a
    batch have, where each has its own."""

    def __init__(self) -> None:
        self.num_writes = 0
        self.rows: Any = None
        self.before_write: Callable[[], object] = _wait_for_nobody
        self._layers: dict[int, Layer] = {}  # by the id of the layer that is wrapped
        self._wish: tuple[float, Any] | None = None  # scale and rows, as written; None: nothing is
        self._forget()

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def size_bytes(self) -> int:
        """Return the memory of what programs read."""
        return sum(t.nbytes for layer in self._layers.values() for t in layer.written.values())

    @property
    def watch_bytes(self) -> int:
        """Return the memory of what sources are compared with."""
        return self._content.size_bytes

    @property
    def tables(self) -> Mapping[int, dict[str, Any]]:
        """Return, by the id of a layer that is wrapped, what is read in the place of its Parameters
        or beside them."""
        return {number: dict(layer.written) for number, layer in self._layers.items()}

    @property
    def stand_ins(self) -> dict[int, nn.Module]:
        """Return, by the id of a wrapped layer, the plain one that stands for it."""
        return {id(layer.wrapped): layer.base for layer in self._layers.values()}

    def begin_look(self) -> None:
        """Begin to compare values, which a GPU does beside what is launched from here on."""
        if self._wish is not None:
            self._content.begin()

    def seem_others(self, scale: float) -> bool:
        """Tell whether what most changes of adapters do has been done: it is quick, and knows one
        layer alone."""
        return bool(self._layers) and (self.needs_refresh(scale) or self._hint.differs())

    def needs_refresh(self, scale: float) -> bool:
        """Tell whether to write whether or not anybody has changed adapters."""
        return bool(self._layers) and self._wish != (scale, self.rows)

    def has_other_layers(self) -> bool:
        """Tell whether a layer can no longer be served as it is."""
        if not self._layers:
            return False
        has_wish = self._wish is not None and self._wish[1] == self.rows
        return not (has_wish and not self._settings.differs()) and not self._serves()

    def refresh(self, scale: float) -> bool:
        """Write anew if a source or the scale of all adapters has changed since, and tell whether
        that was so."""
        if not self._layers:
            return False
        is_new = self._wish is None
        has_new_content = is_new or self._content.differs()  # waits for what ``begin_look`` began
        has_new_settings = is_new or self._settings.differs()
        if not (has_new_content or has_new_settings or self.needs_refresh(scale)):
            return False
        self.before_write()
        self._wish = None  # should writing fail half way
        with torch.inference_mode(False), torch.no_grad():
            self._write(list(self._layers.values()), scale)
            self._wish = scale, self.rows
            self.num_writes += 1
            if has_new_content or has_new_settings:
                self._watch(list(self._layers.values()), has_new_content=has_new_content)
        return True

    def _serves(self) -> bool:
        """Tell whether all layers are such as can be served."""
        raise NotImplementedError

    def _write(self, layers: Sequence[Layer], scale: float) -> None:
        """Write what is read; ``scale`` multiplies that of each adapter."""
        raise NotImplementedError

    def _take(self, layers: dict[int, Layer]) -> None:
        """Serve these layers, for which nothing is written yet."""
        self._layers, self._wish = layers, None
        if not layers:
            self._forget()

    def _forget(self) -> None:
        """Watch no sources, nor keep the memory of any."""
        self._settings = self._hint = KnownSettings(())  # the hint is of one layer
        self._values, self._memory = KnownValues(()), KnownMemory(())
        self._content = Sources()

    def _watch(self, layers: Sequence[Layer], *, has_new_content: bool) -> None:
        """Remember all sources as they are. Values are known where they are no others."""
        self._settings = KnownSettings(chain.from_iterable(layer.places() for layer in layers))
        self._hint = KnownSettings(layers[0].places())
        weights = [weight for layer in layers for weight in layer.weights]
        factors = [factor for layer in layers for factor in layer.factors()]
        before, self._memory = self._memory.tensors, KnownMemory([*weights, *factors])
        now = self._memory.tensors
        if has_new_content or len(before) != len(now) or not all(map(is_, before, now)):
            firsts = (w[:1] if w.dim() > 1 else w for w in weights)  # a bias is as small
            compared = (*firsts, *factors)
            self._values = KnownValues([tensor.detach() for tensor in compared])
        self._content = Sources(self._values, self._memory, KnownWrites(weights))

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from strop.dispatch.identities import Identities, identities
from strop.frontend.adapted_layers import (
    active_adapters,
    delta_of,
    factors,
    is_folded,
    may_fold,
)

_VERSION = attrgetter("_version")


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedLayer:
    """A wrapped layer, and the weight that stands for it."""

    wrapped: Any
    weight: nn.Parameter

    @property
    def base(self) -> nn.Module:
        found: nn.Module = self.wrapped.base_layer
        return found

    def fits(self, base: nn.Module) -> bool:
        """Tell whether the weight can stand for this layer's."""
        own, ours = base._parameters["weight"], self.weight
        assert own is not None
        return (own.shape, own.dtype, own.device) == (ours.shape, ours.dtype, ours.device)

    @torch.no_grad()
    def write(self, scale: float) -> None:
        """Compute the weight from its sources; ``scale`` multiplies that of each adapter."""
        base, delta = self.base._parameters["weight"], delta_of(self.wrapped)
        assert base is not None
        names = active_adapters(self.wrapped)
        if not names:
            self.weight.copy_(base)
            return
        total = base.to(torch.float32, copy=True)
        for name in names:
            total.add_(delta(self.wrapped, name), alpha=self.wrapped.scaling[name] * scale)
        self.weight.copy_(total)

    def sources(self) -> Iterator[tuple[Any, str]]:
        """Yield where the objects are held that the weight depends on."""
        wrapped = self.wrapped
        yield wrapped.__dict__, "_active_adapter"
        yield wrapped.__dict__, "_disable_adapters"
        yield wrapped.__dict__, "merged_adapters"
        yield self.base._parameters, "weight"
        for name in wrapped.lora_A:
            yield wrapped.scaling, name
        for factor in (wrapped.lora_A, wrapped.lora_B):
            for part in factor.values():
                yield part._parameters, "weight"


class EffectiveWeights:
    """Hold the weights of all adapted layers of one module."""

    def __init__(self) -> None:
        self.scale = 1.0  # of all adapters, as the latest call has asked for
        self._layers: dict[int, AdaptedLayer] = {}  # by the id of the layer that is wrapped
        self._sources: Identities = identities(())
        self._lists: list[list[str]] = []
        self._known: list[list[str]] = []
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

    def scan(self, module: nn.Module, parts: Sequence[nn.Module]) -> None:
        """Look for adapted layers among all parts of a module. Those that are known keep their
        weights, at the same place."""
        found: dict[int, AdaptedLayer] = {}
        wrapped = [part for part in parts if is_folded(part)]
        for part in wrapped if wrapped and may_fold(module, parts) else ():
            base: Any = part.base_layer
            known = self._layers.get(id(base))
            weight = known.weight if known is not None and known.fits(base) else None
            if weight is None:
                weight = nn.Parameter(torch.empty_like(base.weight), requires_grad=False)
            found[id(base)] = AdaptedLayer(part, weight)
        self._layers = found
        if found:
            self._write()

    def begin_look(self) -> None:
        """Begin to compare values, which a GPU does beside what is launched from here on."""
        if self._layers:
            self._values.begin()

    def has_other_layers(self) -> bool:
        """Tell whether a layer is no longer one for which a weight can stand."""
        if not self._layers or not self._have_new_settings():
            return False
        return not all(is_folded(layer.wrapped) for layer in self._layers.values())

    def refresh(self, scale: float) -> bool:
        """Write the weights anew if a source or the scale has changed since, and tell whether that
        was so."""
        if not self._layers:
            return False
        has_new_values = self._values.differ()  # waits for what ``begin_look`` has begun
        is_same = scale == self.scale and not has_new_values
        if is_same and not self._have_new_settings() and not self._have_moved():
            return False
        self.scale = scale
        self._write()
        return True

    def _have_new_settings(self) -> bool:
        """Tell whether adapters, their scales, or objects that hold weights are others."""
        names = self._sources
        same = names.hold() or all(map(_is_equal, names.now(), names.values))
        return not same or self._lists != self._known

    def _have_moved(self) -> bool:
        """Tell whether a W0 was written to, or the memory of a W0 or of a factor is another."""
        return (
            list(map(_VERSION, self._watched[: len(self._layers)])) != self._versions
            or list(map(Tensor.data_ptr, self._watched)) != self._pointers
        )

    def _bases(self) -> list[Tensor]:
        return [layer.base._parameters["weight"] for layer in self._layers.values()]  # type: ignore[misc]

    def _write(self) -> None:
        layers = list(self._layers.values())
        with torch.inference_mode(False):
            for layer in layers:
                layer.write(self.scale)
            self._sources = identities([place for layer in layers for place in layer.sources()])
            self._lists = [v for v in self._sources.values if isinstance(v, list)]
            self._known = [list(names) for names in self._lists]
            bases = self._bases()
            self._versions = list(map(_VERSION, bases))
            rows = [base[:1] for base in bases]
            found = [t for layer in layers for t in factors(layer.wrapped)]
            self._watched = [*bases, *found]
            self._pointers = list(map(Tensor.data_ptr, self._watched))
            self._values = KnownValues([t.detach() for t in (*rows, *found)])


class KnownValues:
    """Remember the values of tensors, bit by bit."""

    def __init__(self, tensors: list[Tensor]) -> None:
        kinds = dict.fromkeys((t.dtype, t.device) for t in tensors)
        self._groups = [
            KnownGroup([t for t in tensors if (t.dtype, t.device) == kind]) for kind in kinds
        ]

    def begin(self) -> None:
        for group in self._groups:
            group.begin()

    def differ(self) -> bool:
        """Tell whether a tensor has other values than when this was made."""
        answers = [group.differs() for group in self._groups]  # of all: each has begun
        return any(answers)


class KnownGroup:
    """Remember tensors of one type and device. They are compared on a stream of their own, so that
    nobody waits for what is launched meanwhile."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._known, parts = _room_for(tensors)
        self._now, self._parts = _room_for(tensors)
        torch._foreach_copy_(parts, tensors)
        self._done: torch.cuda.Event | None = None
        self._is_on_gpu = self._known.device.type == "cuda"
        if self._is_on_gpu:
            self._stream = torch.cuda.Stream(self._known.device)
            self._stream.wait_stream(torch.cuda.current_stream(self._known.device))
            self._answer = torch.zeros((), dtype=torch.bool, pin_memory=True)

    @torch.no_grad()
    def begin(self) -> None:
        """Compare them, as they are for work that is launched from here on. Nothing is compared
        while the caller captures a CUDA graph."""
        if not self._is_on_gpu or torch.cuda.is_current_stream_capturing():
            return
        device = self._known.device
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            torch._foreach_copy_(self._parts, self._tensors)
            self._answer.copy_((self._now != self._known).any(), non_blocking=True)
            self._done = self._stream.record_event()

    @torch.no_grad()
    def differs(self) -> bool:
        if self._is_on_gpu:
            if self._done is None:
                self.begin()
            done, self._done = self._done, None
            if done is None:
                return False
            done.synchronize()
            return bool(self._answer)
        with torch.inference_mode(False):
            torch._foreach_copy_(self._parts, self._tensors)
            return not torch.equal(self._now, self._known)


def _room_for(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return memory for all tensors as whole numbers, and the parts of it for each."""
    sizes = [t.numel() for t in tensors]
    flat = tensors[0].new_zeros(-(-sum(sizes) // 8) * 8)
    parts = flat[: sum(sizes)].split(sizes)
    shaped = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
    return flat.view(torch.int64), shaped


def _is_equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, float | bool | str | list) and a == b)

"""Serve a graph that Dynamo has traced as ``strop.optimize`` serves a module.

Each set of weights that the graph is called with has a dispatcher of its own, and all share one
store of programs: the blocks of a transformer are one graph for Dynamo, called with the weights of
each block in turn.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.fx import GraphModule

from strop.dispatch.adapter import Adapter
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.identities import addresses
from strop.dispatch.signature import Shapes, Skeleton, memory_order
from strop.dispatch.variants import VariantStore
from strop.frontend.traced_graph import TracedGraph
from strop.ir.dims import parse
from strop.ir.tensor_spec import TensorSpec
from strop.options import Options

MOST_OWNERLESS = 8  # sets of weights that are kept of graphs whose weights have no one module
_MOST_FRAMES = 8  # between the code that Dynamo has written and this


class TracedSizesAdapter(Adapter):
    """Name those sizes that Dynamo has left open: all others are constants of its graph."""

    def __init__(self, shapes: Sequence[Sequence[str]]) -> None:
        self._shapes = [(tuple(texts), tuple(map(parse, texts))) for texts in shapes]

    def shapes(self, tensors: Sequence[Tensor], skeleton: Skeleton = ()) -> Shapes:
        hints: dict[str, int] = {}
        specs = []
        for (texts, sizes), tensor in zip(self._shapes, tensors, strict=True):
            for size, value in zip(sizes, tensor.shape, strict=True):
                for name in size.roots:
                    hints[name] = max(int(value) // size.divisor, 2)
            order = memory_order(tensor)
            specs.append(TensorSpec(texts, tensor.dtype, tensor.device, order))
        return Shapes(tuple(specs), hints)


@dataclass(frozen=True, slots=True, eq=False)
class ServedWeights:
    """One set of weights, with the dispatcher that serves it. ``owner`` is the module that has
    them by the names ``sources``, where there is one: what it has no longer is dropped."""

    tensors: tuple[Tensor, ...]
    where: bytes  # the addresses of these objects
    dispatcher: Dispatcher
    owner: weakref.ref[nn.Module] | None
    sources: tuple[str, ...]


_ALL: WeakSet[ServedGraph] = WeakSet()


class ServedGraph:
    """This serves all graphs of one text, which compute no gradients."""

    def __init__(self, traced: TracedGraph, options: Options, name: str) -> None:
        self._traced, self._options, self.name = traced, options, name
        self.variants = VariantStore(traced.module, options, name)
        self._served: list[ServedWeights] = []
        self._lock = threading.Lock()
        _ALL.add(self)

    @property
    def dispatchers(self) -> list[Dispatcher]:
        return [served.dispatcher for served in self._served]

    def find(self, where: bytes) -> ServedWeights | None:
        return next((s for s in self._served if s.where == where), None)

    def serve(
        self, state: tuple[Tensor, ...], owner: nn.Module | None, sources: tuple[str, ...]
    ) -> ServedWeights:
        """Return the dispatcher for a set of weights, which is made if need be."""
        with self._lock:
            where = addresses(state, len(state))
            found = self.find(where)
            if found is None:
                for graph in list(_ALL):  # a module that has other weights has them everywhere
                    graph._drop(graph._replaced(owner, sources, where))
                self._drop(self._oldest())
                found = self._made(state, where, owner, sources)
                self._served.append(found)
            return found

    def _made(
        self,
        state: tuple[Tensor, ...],
        where: bytes,
        owner: nn.Module | None,
        sources: tuple[str, ...],
    ) -> ServedWeights:
        module = self._traced.with_weights(state)
        dispatcher = Dispatcher(
            module,
            self._options,
            name=self.name,
            adapter=TracedSizesAdapter(self._traced.shapes),
            variants=self.variants,
        )
        module.forward = dispatcher
        drop = weakref.WeakMethod(self._drop_dead)  # keeps no graph alive that Dynamo forgets
        reference = None if owner is None else weakref.ref(owner, lambda dead: _call(drop, dead))
        return ServedWeights(state, where, dispatcher, reference, sources)

    def _replaced(
        self, owner: nn.Module | None, sources: Sequence[str], where: bytes
    ) -> list[ServedWeights]:
        """Return other weights that this module had by these names."""
        of_owner = [s for s in self._served if s.owner is not None and s.owner() is owner]
        return [s for s in of_owner if s.sources == sources and s.where != where]

    def _oldest(self) -> list[ServedWeights]:
        """Return the oldest weights of which no module is known, where they are too many."""
        ownerless = [s for s in self._served if s.owner is None]
        return ownerless[: max(len(ownerless) + 1 - MOST_OWNERLESS, 0)]

    def _drop_dead(self, reference: weakref.ref[nn.Module]) -> None:
        self._drop([s for s in self._served if s.owner is reference])

    def _drop(self, gone: Sequence[ServedWeights]) -> None:
        self._served = [s for s in self._served if s not in gone]
        for served in gone:
            served.dispatcher.leave()


class GraphCall:
    """This is what Dynamo calls in the place of one graph, with all that the graph reads."""

    def __init__(self, served: ServedGraph, traced: TracedGraph) -> None:
        self.served = served
        self._owner, self._sources = traced.owner, traced.sources
        self._state_of, self._given_of = getter(traced.state), getter(traced.given)

    def __call__(self, *arguments: Any) -> Any:
        state = self._state_of(arguments)
        where = addresses(state, len(state))
        found = self.served.find(where)
        if found is None:
            found = self.served.serve(state, self._owner_now(), self._sources)
        return found.dispatcher(*self._given_of(arguments))

    def make_ready(self, state: Sequence[Tensor], given: Sequence[Tensor], owner: Any) -> None:
        """Have a program for a call. Raises one of REFUSALS where there can be none."""
        owner = owner if isinstance(owner, nn.Module) else None
        self.served.serve(tuple(state), owner, self._sources).dispatcher.make_ready(*given)

    def _owner_now(self) -> nn.Module | None:
        """Return the module in the frame that Dynamo has compiled, which now calls this."""
        frame = sys._getframe(2)
        for _ in range(_MOST_FRAMES):
            found = frame.f_locals.get(self._owner)
            if isinstance(found, nn.Module) and not isinstance(found, GraphModule):
                return found
            if frame.f_back is None:
                break
            frame = frame.f_back
        return None


def _call(method: weakref.WeakMethod[Any], argument: Any) -> None:
    found = method()
    if found is not None:
        found(argument)


def getter(places: Sequence[int]) -> Any:
    """Return what takes the items at these places out of a tuple, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda arguments: tuple(arguments[place] for place in places)

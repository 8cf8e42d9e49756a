"""Some calls of one module have a short way, which is found by how their arguments look."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strop.dispatch import cpu_fast_path
from strop.dispatch.arguments import structured
from strop.dispatch.cpu_fast_path import Served, Short, untaken
from strop.dispatch.entry import Entry
from strop.dispatch.flights import RunsInFlight
from strop.dispatch.module_state import ModuleState
from strop.dispatch.quick_look import quickest

MOST_READY = 1024  # calls kept prepared, of one module


class PlainCall(NamedTuple):
    """Hold the arguments of a call, of which the last ones have these names."""

    values: tuple[Any, ...]
    names: tuple[str, ...] = ()


class PreparedCalls(dict[Hashable, Short]):
    """This maps the ``plain_key`` of a call, and its names, to its short way, or to ``untaken``
    where there can be none: such calls are not looked at again. It is a dict, as it is asked at
    each call of a few microseconds. Calls whose lengths one entry serves all have one short way."""

    def __init__(self, cache_dir: str, in_flight: RunsInFlight) -> None:
        """Native code is kept in ``cache_dir``; ``in_flight`` counts runs that others wait for."""
        super().__init__()
        self._cache_dir, self._in_flight = cache_dir, in_flight
        self._free: tuple[frozenset[int], ...] = ()  # places of lengths that some entry serves all
        self._latest: dict[tuple[str, ...], Short] = {}  # of calls with names

    def clear(self) -> None:
        super().clear()
        self._latest.clear()

    def of(self, args: tuple[Any, ...], names: tuple[str, ...] = ()) -> Short:
        """Return the short way of calls that look like this one, or ``untaken``."""
        call = PlainCall(args, names)
        short = self.get(_key(frozenset(), call), untaken)
        for free in self._free:
            if short is not untaken:
                break
            short = self.get(_key(free, call), untaken)
        return short

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call with names by its short way, or None where that is not to be
        taken. The arguments are those of a call before, in this order."""
        names = tuple(kwargs)
        latest = self._latest.get(names)
        if latest is None:
            return None
        values = (*args, *kwargs.values())
        if (result := latest(values)) is not None:
            return result
        short = self.of(values, names)
        if short is untaken or short is latest:
            return None
        self._latest[names] = short
        return short(values)

    def is_due(self, state: ModuleState, entry: Entry, call: PlainCall) -> bool:
        """Say whether nobody has looked yet for a short way for such a call."""
        if entry.device.type != "cpu" or state.turned.names:
            return False
        key = _key(entry.free, call)
        return bool(key) and key not in self and not torch._C._len_torch_dispatch_stack()

    def prepare(
        self,
        served: Served,
        state: ModuleState,
        entry: Entry,
        call: PlainCall,
        tensors: Sequence[Tensor],
    ) -> None:
        """Have the short way ready for the next call that looks like this one, which ``entry`` has
        just served with these ``tensors``."""
        if not self.is_due(state, entry, call):
            return
        key = _key(entry.free, call)
        if len(self) >= MOST_READY:
            self.clear()
        if entry.free and entry.free not in self._free:
            self._free += (entry.free,)
        self[key] = untaken
        if not cpu_fast_path.takes(entry, call.values, tensors):
            return
        is_unchanged = quickest(state, state.comparison(), self._cache_dir)
        bound = entry.bounds[0]
        made_of = structured(entry.variant.out_spec, len(bound.program.returned))
        run, is_long = bound.straight(made_of), False
        if run is None and bound.program.is_ours:
            run, is_long = bound.walking(made_of), True
        if run is not None and is_unchanged is not None:
            drop = partial(self.pop, key, None)
            short = cpu_fast_path.prepared(served, entry, tensors, run, is_unchanged, drop)
            short = cpu_fast_path.counted(short, self._in_flight) if is_long else short
            self[key] = short
            if call.names:
                self._latest[call.names] = short
            else:
                served.short = short
            cpu_fast_path.open_entrance(served)


def _key(free: frozenset[int], call: PlainCall) -> Hashable:
    """Return what calls have in common that an entry serves at any length of what is ``free``, as
    ``PreparedCalls`` keeps it; None for a call that is not one of plain dense tensors."""
    key = cpu_fast_path.plain_key(call.values, free)
    if not key:
        return None
    key = (free, key) if free else key
    return (call.names, key) if call.names else key

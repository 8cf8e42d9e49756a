"""Entries are bound to the weights of a module as it is, and serve calls of one shape each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch

from strop.dispatch.entry import Entry
from strop.dispatch.known_bindings import KnownBindings, StateBinding
from strop.dispatch.module_state import ModuleState

# It drops the graphs of all entries on some devices, but those of the entries behind these.
ForgetGraphs = Callable[[Iterable[torch.device], Iterable[Entry]], object]


class BoundShapes:
    """These are the entries that are bound to the state of one module, by the keys of calls, and
    those that were bound to earlier states of it."""

    def __init__(self, state: ModuleState, forget_graphs: ForgetGraphs) -> None:
        self._state, self._forget_graphs = state, forget_graphs
        self._by_key: dict[Hashable, Entry] = {}
        self._known = KnownBindings()

    @property
    def entries(self) -> list[Entry]:
        """Return those that are bound to the module as it is."""
        return [*self._by_key.values()]

    def get(self, key: Hashable) -> Entry | None:
        return self._by_key.get(key)

    def put(self, key: Hashable, entry: Entry) -> None:
        self._by_key[key] = entry

    def alike(self, entry: Entry) -> Entry:
        """Return the one that serves what ``entry`` would, which is this where there is none."""
        return next(filter(entry.is_like, self._by_key.values()), entry)

    def binding(self) -> StateBinding:
        """Return what is bound to the module, as it was when somebody last looked at it."""
        return StateBinding.of(self._state, self._by_key)

    def follow(self, before: StateBinding, *, is_kept: bool) -> bool:
        """Bind everything again where weights, modules or adapters are not what ``before`` is bound
        to, nor what anything was bound to earlier, and tell whether that has to be. ``is_kept``:
        memory may be kept for what was there before."""
        looks = self._state.bound_to()
        if looks == before.looks:  # often: diffusers notes with which scale adapters were fused
            return False
        self._known.add(before, is_kept=is_kept)
        self._known.prune(self._state)
        self._by_key = self._known.take(looks)
        for entry in self._by_key.values():
            if entry.placed is not None:
                self._state.remember(entry.variant.program, entry.placed)
        self._drop_graphs(before.entries.values())
        return not self._by_key

    def keep_only(self, entry: Entry) -> None:
        """Forget all that is bound to weights which have been moved for this entry."""
        before = self.entries
        self._by_key = {key: own for key, own in self._by_key.items() if own is entry}
        self._known.prune(self._state)
        self._drop_graphs(before)

    def clear(self) -> None:
        entries = (*self._by_key.values(), *self._known.entries)
        self._forget_graphs({entry.device for entry in entries}, ())
        self._by_key.clear()
        self._known.clear()

    def _drop_graphs(self, before: Iterable[Entry]) -> None:
        """Drop the graphs of all entries but those that are bound to the module, or were and may be
        again. ``before`` are those that were bound to it so far."""
        kept = [*self._by_key.values(), *self._known.entries]
        self._forget_graphs({entry.device for entry in (*kept, *before)}, kept)

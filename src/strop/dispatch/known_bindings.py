"""Keep what was bound to earlier states of a module, while the module still has their weights.

To unload a LoRA or an IP-Adapter gives back the very layers and weights that were there before.
What had been bound to them then, CUDA graphs too, serves them as it did.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from strop.dispatch.entry import Entry
from strop.dispatch.module_state import ModuleState
from strop.runtime.derived.sources import KnownMemory

MOST_BINDINGS = 4  # earlier states of one module


@dataclass(frozen=True, slots=True)
class StateBinding:
    """Hold the entries that are bound to one state of a module, and what tells that state from
    others (``ModuleState.bound_to``). Tensors live as long as this, so that no other gets the id
    of one."""

    looks: tuple[Any, ...]
    memory: KnownMemory
    entries: dict[Hashable, Entry]

    @staticmethod
    def of(state: ModuleState, entries: dict[Hashable, Entry]) -> StateBinding:
        return StateBinding(state.bound_to(), KnownMemory(state.tensors), entries)

    @property
    def tensors(self) -> list[Tensor]:
        return self.memory.tensors


class KnownBindings:
    """Keep the bindings of one module to states that it has had."""

    def __init__(self) -> None:
        self._bindings: list[StateBinding] = []

    @property
    def entries(self) -> Iterator[Entry]:
        return (entry for binding in self._bindings for entry in binding.entries.values())

    def add(self, binding: StateBinding, *, is_kept: bool) -> None:
        """Keep what is bound to the state that the module has just left, or have it let go of the
        weights: whoever has wrapped a dispatcher may hold its entries (functools.update_wrapper)"""
        if not is_kept:
            for entry in binding.entries.values():
                entry.let_go()
        elif binding.entries:
            self._bindings = [*self._bindings, binding][-MOST_BINDINGS:]

    def prune(self, state: ModuleState) -> None:
        """Let go of bindings to weights that the module no longer has, or that lie elsewhere now:
        they would keep memory that nobody else needs."""
        if not self._bindings:
            return
        weights = ((*part._parameters.values(), *part._buffers.values()) for part in state.modules)
        held = {id(tensor) for tensors in (*weights, state.tensors) for tensor in tensors}
        self._bindings = [
            binding
            for binding in self._bindings
            if held.issuperset(map(id, binding.tensors)) and not binding.memory.differs()
        ]

    def take(self, looks: tuple[Any, ...]) -> dict[Hashable, Entry]:
        """Return what was bound to this very state, which is current again; else nothing."""
        found = [binding for binding in self._bindings if binding.looks == looks]
        self._bindings = [binding for binding in self._bindings if binding.looks != looks]
        return found[-1].entries if found else {}

    def clear(self) -> None:
        self._bindings.clear()

"""This records what Strop sets in objects that are not its own, and undoes it.

Everything that ``optimize`` puts somewhere else than in front of a ``forward`` goes through
``Changes``, so that ``restore`` can take out exactly that. What others have put in the same place
since stays there, around ours if they keep it; ours is only a way to the original by then.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from weakref import WeakSet, finalize

from strop.dispatch.dispatcher import Dispatcher

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
# What was set keeps its Change in this attribute. ``functools.wraps`` copies it to others.
_NOTE = "strop_change"
# Finalizers take it too, in whatever thread and at whatever time objects are collected. So nobody
# may wait for anything while holding it, such as the first import of a module.
LOCK = threading.RLock()


class Change:
    """``ours`` stands under ``name`` in each of ``owners``, where ``before`` stood.

    It is kept by ``ours`` alone, and thus lives as long as there is something to undo. ``holders``
    are those who want it; it is undone when none is left.
    """

    def __init__(self, owners: Sequence[Any], name: str, ours: Any, before: Any) -> None:
        self.owners, self.name, self.ours, self.before = owners, name, ours, before
        self.holders: set[Changes] = set()

    def undo(self) -> None:
        """Put ``before`` back wherever ``ours`` still stands."""
        for owner in self.owners:
            if _standing(owner, self.name) is self.ours:
                _put(owner, self.name, self.before)

    @property
    def is_of_module(self) -> bool:
        """Tell whether other modules may have imported ``ours`` in the meantime."""
        return any(isinstance(owner, ModuleType) for owner in self.owners)


class Changes:
    """An object of this class holds what was set for one pipeline, or for all of them."""

    def __init__(self) -> None:
        self._made = WeakSet[Change]()

    def put(self, owners: Sequence[Any], name: str, ours: Any) -> None:
        """Set the attribute ``name`` of each owner, which has the same value in all, to ``ours``.

        ``ours`` is an object with a ``__dict__`` and is put into one place only.
        """
        with LOCK:
            change = Change(owners, name, ours, original(_standing(owners[0], name)))
            vars(ours)[_NOTE] = change
            self._hold(change)
            for owner in owners:
                setattr(owner, name, ours)

    def share(self, ours: Any) -> None:
        """Hold what another has put in its place, so that it stays until both have undone it."""
        with LOCK:
            if in_force(ours):
                self._hold(vars(ours)[_NOTE])

    def undo(self) -> None:
        """Undo what nobody else holds. Doing so again does nothing."""
        with LOCK:
            made = list(self._made)
            self._made.clear()
            for change in made:
                change.holders.discard(self)
            undone = [change for change in made if not change.holders]
            for change in undone:
                change.undo()
            _undo_imports([change for change in undone if change.is_of_module])

    def _hold(self, change: Change) -> None:
        change.holders.add(self)
        self._made.add(change)


class SharedChanges:
    """These changes to what all pipelines use are made for the first dispatcher that is held, and
    undone when the last one has left its module or is gone.

    A dispatcher counts, not the pipeline: a pipeline that was made of another's components lives
    longer than that.
    """

    def __init__(self, make: Callable[[Changes], object]) -> None:
        self._make = make
        self._holders = set[int]()
        self._changes: Changes | None = None

    def hold(self, dispatcher: Dispatcher) -> None:
        end = finalize(dispatcher, self._release, id(dispatcher))
        end.atexit = False
        dispatcher.on_leave = end
        self._enter(id(dispatcher))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the changes within, even if all dispatchers are replaced there."""
        token = object()
        self._enter(id(token))
        try:
            yield
        finally:
            self._release(id(token))

    def _enter(self, holder: int) -> None:
        with LOCK:
            self._holders.add(holder)
            if self._changes is None:
                self._changes = Changes()
                self._make(self._changes)

    def _release(self, holder: int) -> None:
        with LOCK:
            self._holders.discard(holder)
            if not self._holders and self._changes is not None:
                changes, self._changes = self._changes, None
                changes.undo()


def in_force(ours: Any) -> bool:
    """Tell whether somebody still wants what was set. Otherwise it must do what the original
    does."""
    change = _change_of(ours)
    return change is not None and bool(change.holders)


def is_around(value: Any) -> bool:
    """Tell whether a value is in force, or wraps what is by ``functools.wraps``."""
    change = getattr(value, "__dict__", {}).get(_NOTE)
    return isinstance(change, Change) and bool(change.holders)


def original(value: Any) -> Any:
    """Return what stood in the place of something that others have put back after it was undone, or
    the value itself."""
    while (change := _change_of(value)) is not None and not change.holders:
        value = change.before
    return value


def mend(owner: Any, name: str) -> None:
    """Put back the original of what others have put back after it was undone."""
    value = _standing(owner, name)
    if (before := original(value)) is not value:
        _put(owner, name, before)


def undo_at(owner: Any, name: str) -> None:
    """Undo what stands in one place, whoever else wants it."""
    with LOCK:
        if (change := _change_of(_standing(owner, name))) is not None:
            change.holders.clear()
            change.undo()


def _change_of(value: Any) -> Change | None:
    change = getattr(value, "__dict__", {}).get(_NOTE)
    return change if isinstance(change, Change) and change.ours is value else None


def _standing(owner: Any, name: str) -> Any:
    return getattr(owner, "__dict__", {}).get(name, ABSENT)


def _put(owner: Any, name: str, value: Any) -> None:
    if value is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _undo_imports(changes: Sequence[Change]) -> None:
    """Put back what stood there in modules that have imported ours, under whatever name."""
    known = {id(change.ours): change.before for change in changes}
    for module in list(sys.modules.values()) if known else ():
        table = vars(module) if isinstance(module, ModuleType) else {}
        if not known.keys().isdisjoint(map(id, list(table.values()))):
            for name, value in list(table.items()):
                if id(value) in known:
                    setattr(module, name, known[id(value)])

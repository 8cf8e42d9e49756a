"""Hold the patterns of this process, in the order in which they were declared: earlier ones match
first.

Programs name a pattern by its key, a digest of what it searches for. A change of the registry has
whoever watches it forget what was compiled with the patterns before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from strop.errors import PatternError

if TYPE_CHECKING:
    from strop.patterns.pattern import Pattern

_lock = threading.Lock()
_active: tuple[Pattern, ...] = ()
_by_key: dict[str, Pattern] = {}  # removed ones too: a call may still be running
_watching: list[Callable[[], Callable[[], Any] | None]] = []
_everywhere: dict[Callable[[], Any], None] = {}
_held: ContextVar[tuple[Pattern, ...] | None] = ContextVar("held", default=None)


def active() -> tuple[Pattern, ...]:
    """Return the patterns that a compile now uses."""
    held = _held.get()
    return _active if held is None else held


@contextmanager
def holding(patterns: tuple[Pattern, ...]) -> Iterator[None]:
    """Compile with these, whatever other threads declare meanwhile."""
    token = _held.set(patterns)
    try:
        yield
    finally:
        _held.reset(token)


def keys() -> list[str]:
    """Return what a stored plan depends on."""
    return [f"pattern {pattern.key}" for pattern in active()]


def find(key: str, name: str) -> Pattern:
    """Find the pattern that a program was compiled with."""
    for pattern in active():
        if pattern.key == key:
            return pattern
    if key not in _by_key:
        raise PatternError(
            f"a program calls the replacement of pattern {name!r}, which this process has not"
            " declared: call strop.pattern first"
        )
    return _by_key[key]


def add(pattern: Pattern) -> None:
    global _active
    with _lock:
        if pattern in _active:
            return
        _by_key[pattern.key] = pattern
        _active = (*_active, pattern)
    _tell()


def remove(pattern: Pattern) -> None:
    """Remove a pattern; one that is gone already is no error."""
    global _active
    with _lock:
        if pattern not in _active:
            return
        _active = tuple(p for p in _active if p is not pattern)
    _tell()


def watch(forget: Callable[[], Any]) -> None:
    """Have a method called after each change, as long as its object lives."""
    with _lock:
        _watching[:] = [reference for reference in _watching if reference() is not None]
        _watching.append(weakref.WeakMethod(forget))


def watch_once(forget: Callable[[], Any]) -> None:
    """Have a function called after each change, however often it is given."""
    with _lock:
        _everywhere[forget] = None


def _tell() -> None:
    """Tell listeners without holding the lock: who forgets may wait for a compile, which asks for
    the patterns."""
    for reference in tuple(_watching):
        forget = reference()
        if forget is not None:
            forget()
    for forget in tuple(_everywhere):
        forget()

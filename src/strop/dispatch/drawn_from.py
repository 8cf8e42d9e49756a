"""Find objects that give something else each time: iterators, and generators of random numbers of
Python's and NumPy's own. Compiled code would keep what the trace has drawn."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from strop.errors import CaptureError

# of each class of generators: what has the state, and how that is read and put back
_STATES: tuple[tuple[type, Any, Any], ...] = (
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.RandomState, np.random.RandomState.get_state, np.random.RandomState.set_state),
    (
        np.random.Generator,
        lambda own: own.bit_generator.state,
        lambda own, state: setattr(own.bit_generator, "state", state),
    ),
)


def gives_others(value: Any) -> bool:
    """Tell whether a value may be one of these objects."""
    return _is_iterator(value) or any(isinstance(value, kind) for kind, _, _ in _STATES)


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


class DrawnFrom:
    """Hold the states of generators among what code reads."""

    def __init__(self, held: Iterable[tuple[str, Any]]) -> None:
        """``held`` are labels and such objects. Raises CaptureError for an iterator, which nobody
        can put back when a trace has drawn from it."""
        self._known = list[tuple[str, Any, Any, Any, Any]]()
        for label, value in held:
            if _is_iterator(value):
                raise CaptureError(
                    f"it reads {label}, an iterator, which may give another item now"
                )
            read, put = next(each[1:] for each in _STATES if isinstance(value, each[0]))
            self._known.append((label, value, read, put, read(value)))

    def undo(self) -> Iterator[str]:
        """Put back what has been drawn, and yield from what."""
        for label, value, read, put, state in self._known:
            if repr(read(value)) != repr(state):
                put(value, state)
                yield label

"""Find objects that give something else each time they are asked: generators of random numbers of
Python's and NumPy's own, and iterators. Compiled code would keep what the trace has drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from strop.errors import CaptureError

_ITERATORS = ("builtins", "itertools")  # modules of classes that keep their place to themselves
_Read = Callable[[Any], Any]
_Put = Callable[[Any, Any], None]
# of each class of generators: how its state is read and set
_STATES: tuple[tuple[type, _Read, _Put], ...] = (
    (random.Random, lambda own: own.getstate(), lambda own, state: own.setstate(state)),
    (
        np.random.Generator,
        lambda own: own.bit_generator.state,
        lambda own, state: setattr(own.bit_generator, "state", state),
    ),
    (
        np.random.RandomState,
        lambda own: own.get_state(legacy=False),
        lambda own, state: own.set_state(state),
    ),
)
_GENERATORS = tuple(kind for kind, _, _ in _STATES)


def gives_others(value: Any) -> bool:
    """Tell whether a value may be one of these objects."""
    return _is_iterator(value) or isinstance(value, _GENERATORS)


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator) and type(value).__module__ in _ITERATORS


class DrawnFrom:
    """Hold the states of generators among what code reads."""

    def __init__(self, held: Iterable[tuple[str, Any]]) -> None:
        """``held`` are labels and values of such objects. Raises CaptureError for an iterator:
        where it stands cannot be put back when a trace has drawn from it."""
        self._known: list[tuple[str, Any, _Read, _Put, Any]] = []
        for label, value in held:
            if _is_iterator(value):
                raise CaptureError(
                    f"it reads {label}, an iterator, which may give another item to each call"
                )
            for kind, read, put in _STATES:
                if isinstance(value, kind):
                    self._known.append((label, value, read, put, read(value)))

    def undo(self) -> Iterator[str]:
        """Put back what has been drawn, and yield from what."""
        for label, value, read, put, state in self._known:
            if repr(read(value)) != repr(state):
                put(value, state)
                yield label

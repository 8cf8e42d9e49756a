"""Tell whoever waits for gradients of each as soon as a compiled backward pass has computed it.

Autograd hands out the gradients of one backward graph together, when all of it has run. Ranks that
average gradients would begin only then; told of each as it comes, they do so meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from strop.runtime.run.ready_results import Told
from strop.runtime.run.sizes import Look


class Listener(Protocol):
    """Gets gradients of leaves, each as one backward graph computes it."""

    def home(self, leaf: Tensor, look: Look) -> Tensor | None:
        """Return memory of this shape, strides and type for the gradient, or None."""
        ...

    def take(self, leaf: Tensor, gradient: Tensor) -> bool:
        """Take a gradient that is complete, on the stream, and in the thread, of its graph. True
        where it is kept: autograd then gets none, and its memory is free as soon as the listener
        lets go of it."""
        ...


_listeners: dict[int, tuple[Tensor, Listener]] = {}  # by the leaf's id; autograd has threads


@contextmanager
def listening(
    leaves: Sequence[Tensor], listener: Listener, num_own_hooks: int = 0
) -> Iterator[None]:
    """Hand a listener the gradients of ``leaves`` that compiled backward graphs compute in here.
    Who has hooks on its gradient, which may change it, is left out, and so is all that no graph of
    Strop computes. So many of the hooks behind accumulation are the listener's own."""
    added = {id(leaf): (leaf, listener) for leaf in leaves if not _has_hooks(leaf, num_own_hooks)}
    _listeners.update(added)
    try:
        yield
    finally:
        for key in added:
            _listeners.pop(key, None)


def _has_hooks(leaf: Tensor, num_own: int) -> bool:
    behind = getattr(leaf, "_post_accumulate_grad_hooks", None) or ()
    return bool(leaf._backward_hooks) or len(behind) > num_own


@dataclass(frozen=True)
class _Sources:
    """Hand results on, by the leaves that they are gradients of."""

    leaves: Mapping[int, tuple[Tensor, Listener]]

    def home(self, place: int, look: Look) -> Tensor | None:
        leaf, listener = self.leaves.get(place, (None, None))
        return None if leaf is None or listener is None else listener.home(leaf, look)

    def ready(self, place: int, result: Tensor) -> bool:
        leaf, listener = self.leaves.get(place, (None, None))
        return leaf is not None and listener is not None and listener.take(leaf, result)


def told_of(sources: Sequence[Tensor]) -> Told | None:
    """Return what is to get the results of a backward graph, the gradients of ``sources``; None
    where nobody listens."""
    if not _listeners:
        return None
    known = {at: _listeners[id(leaf)] for at, leaf in enumerate(sources) if id(leaf) in _listeners}
    return _Sources(known) if known else None

"""Tell whoever waits for gradients of each as soon as a compiled backward pass has computed it.

Autograd hands out the gradients of one backward graph together, when all of it has run. Ranks that
average gradients would begin only then; told of each as it comes, they do so meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from strop.runtime.run.ready_results import Told

Take = Callable[[Tensor, Tensor], None]  # a leaf, and its gradient by one backward graph

_takers: dict[int, tuple[Tensor, Take]] = {}  # by the leaf's id; autograd has threads of its own


@contextmanager
def listening(leaves: Sequence[Tensor], take: Take) -> Iterator[None]:
    """Call ``take`` for gradients of ``leaves`` that compiled backward graphs compute in here. It
    is called on the stream, and in the thread, that runs them. Who has hooks on its gradient, which
    may change it, is left out, and so is all that no graph of Strop computes."""
    added = {id(leaf): (leaf, take) for leaf in leaves if not _has_hooks(leaf)}
    _takers.update(added)
    try:
        yield
    finally:
        for key in added:
            _takers.pop(key, None)


def _has_hooks(leaf: Tensor) -> bool:
    return bool(leaf._backward_hooks) or bool(getattr(leaf, "_post_accumulate_grad_hooks", None))


def told_of(sources: Sequence[Tensor]) -> Told | None:
    """Return what a backward graph is to call for its results, the gradients of ``sources``; None
    where nobody listens."""
    if not _takers:
        return None
    takers = {place: _takers[id(leaf)] for place, leaf in enumerate(sources) if id(leaf) in _takers}
    if not takers:
        return None

    def told(place: int, gradient: Tensor) -> None:
        if place in takers:
            leaf, take = takers[place]
            take(leaf, gradient)

    return told

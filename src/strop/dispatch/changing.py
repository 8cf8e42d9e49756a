"""A change of a model is made as a whole, while other threads call it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from strop.dispatch.dispatcher import Dispatcher


@contextmanager
def held(dispatchers: Iterable[Dispatcher]) -> Iterator[None]:
    """Have calls of these modules from other threads wait for the end of the body, which begins
    when those that are under way are done. Two bodies take the modules in the same order, so that
    neither waits for the other for good."""
    with ExitStack() as ends:
        for dispatcher in sorted(dispatchers, key=id):
            ends.enter_context(dispatcher.held())
        yield

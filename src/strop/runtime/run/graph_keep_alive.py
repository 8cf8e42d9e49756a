"""Keep what a CUDA graph of somebody else points to: working memory of programs that ran under its
capture. Programs grow their memory and leave the old one; whoever replays must keep it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class KeptMemory(Protocol):
    """Memory of one run."""

    def check(self) -> None:
        """Raise what a kernel has left a mark of."""


_taker: list[KeptMemory] | None = None  # of the process: backward passes run in threads of torch's


@contextmanager
def taken() -> Iterator[list[KeptMemory]]:
    """Collect the leases of all programs that run meanwhile, step by step: none of them replays a
    CUDA graph of its own, which no capture could hold."""
    global _taker
    outer, _taker = _taker, []
    try:
        yield _taker
    finally:
        _taker = outer


def are_wanted() -> bool:
    return _taker is not None


def note(lease: KeptMemory) -> None:
    if _taker is not None:
        _taker.append(lease)

"""No garbage collection while something is being compiled.

A trace holds hundreds of thousands of live objects, and every full collection walks over all of
them to find next to nothing: a fifth of the time that a capture of the SD1.5 UNet takes. What a
trace leaves behind is walked over once.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def collection_paused(*, leaves_much: bool = False) -> Iterator[None]:
    """Pause garbage collection. Pauses nest, also across threads: the last one out turns collection
    on again if it was on. One that ``leaves_much`` then collects what has been made since, and what
    lives on counts as old."""
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                if leaves_much:
                    _collect_young()
                gc.enable()


def _collect_young() -> None:
    """Collect what is young. Else each of the next collections, and one that Dynamo asks for after
    each trace, would walk over all that is left. Freezing and thawing makes objects old without
    touching them; those that somebody else has frozen stay so."""
    gc.collect(0)
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()

"""Save checkpoints while the training goes on.

A thread copies what is to be saved, writes, hashes, syncs and renames it. Each rank writes its own
states; rank 0 writes the rest, waits for the others, and publishes the checkpoint.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from strop.train import checkpoint, files
from strop.train.host_copies import HostCopies, HostCopy, Tensors, mark
from strop.train.ranks import Ranks, Talk
from strop.train.settings import Settings


class Saver:
    """Save the checkpoints of a training, one after the other.

    What goes wrong in the thread is raised by the next ``check`` or ``wait``.
    """

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        self._settings, self._ranks = settings, ranks
        self._copies = HostCopies()
        self._pool = ThreadPoolExecutor(1, "strop-checkpoint")
        self._copying: Future[HostCopy] | None = None
        self._running: Future[None] | None = None
        self._abandoned = threading.Event()

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any], all_write: bool) -> None:
        """Begin a save of these tensors as they are now, after the save before has ended. All ranks
        have to call it; where not ``all_write``, rank 0 alone writes."""
        self.wait()
        talk = self._ranks.talk(self._abandoned) if all_write else Talk()
        writes = all_write or self._ranks.is_first
        if self._settings.background_checkpoints:
            if writes:
                self._copying = self._pool.submit(self._copies.take, tensors, mark(tensors))
                found = self._copying.result  # the pool has one thread: it is there by then
                self._running = self._pool.submit(self._write, step, found, state, talk)
        else:
            now = partial(HostCopy, tensors)
            self._ranks.together(lambda: self._write(step, now, state, talk) if writes else None)

    def reserve(self, tensors: Tensors) -> None:
        """Have the thread make memory for copies of such tensors before it is needed."""
        if self._settings.background_checkpoints:
            self._running = self._pool.submit(self._copies.reserve, tensors)

    def settle(self) -> None:
        """Wait until what is being saved is copied, before anything changes it."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result().hold_changes()

    def check(self) -> None:
        """Raise what a save has raised that has ended since."""
        if self._running is not None and self._running.done():
            self._end()

    def wait(self) -> None:
        """Wait until the checkpoint is there, on all ranks, and raise what its save has raised."""
        self._ranks.together(self._end)

    def close(self, warn: Callable[[str], None], *, alone: bool = False) -> None:
        """End the thread. After an error of the training, a save that is under way goes on to its
        end, unless it needs ranks that are lost, as this one is ``alone``; if it fails, ``warn``
        gets why."""
        if alone:
            self._abandoned.set()
        running, self._running = self._running, None
        if running is not None and (error := running.exception()) is not None:
            warn(f"the last checkpoint was not saved: {error}")
        self._pool.shutdown()

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _write(
        self, step: int, copied: Callable[[], HostCopy], state: Mapping[str, Any], talk: Talk
    ) -> None:
        final = self._settings.output / f"checkpoint-{step}"
        with talk.telling_failures(), files.writing(final):
            found = copied()
            found.wait()
            if self._ranks.is_first:
                checkpoint.begin(final)
                talk.tell("begun")
                entries = checkpoint.write_tensors(final, found.tensors)
                for text in talk.hear_others():
                    entries |= json.loads(text)
                checkpoint.publish(final, step, state, entries)
                checkpoint.prune(self._settings.output, self._settings.checkpoints_total_limit)
            else:
                talk.hear(0)
                entries = checkpoint.write_tensors(final, found.tensors, self._ranks.rank)
                talk.tell(json.dumps(entries))

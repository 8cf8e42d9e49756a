"""Pass short texts between the ranks of a group, through the store in which they have met.

Whoever waits for a text waits as long as the other rank lives, since to draw pictures or to fill a
cache may take hours. A rank says that it lives by a beat, and when it ends with an error, that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from strop.errors import StropError, TrainingError

BEAT_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
FAILED = "failed: "


class LostRanksError(TrainingError):
    """This rank cannot go on, as others have failed or do not answer."""


@dataclass
class _Place:
    step: int = 0


@dataclass(eq=False)
class Messages:
    """Hold the texts of all ranks by name."""

    rank: int
    count: int
    store: Any  # torch.distributed.Store
    timeout_s: int
    _place: _Place = field(default_factory=_Place)

    def apart(self) -> Messages:
        """Return the same with a connection of its own, for a thread that must not wait while
        another one does."""
        return replace(self, store=self.store.clone())

    @property
    def step(self) -> int:
        """Return the step that this rank is in."""
        return self._place.step

    @property
    def others(self) -> list[int]:
        """Return the numbers of all other ranks."""
        return [rank for rank in range(self.count) if rank != self.rank]

    def post(self, name: str, text: str) -> None:
        """Leave a text of this rank."""
        with self.answered():
            self.store.set(self._key(name, self.rank), text)

    def find(self, name: str, rank: int) -> str | None:
        """Return the text that a rank has left, or None if there is none yet."""
        key = self._key(name, rank)
        with self.answered():
            if not self.store.check([key]):
                return None
            text: str = self.store.get(key).decode()
            return text

    def read(self, name: str, rank: int, stop: threading.Event | None = None) -> str:
        """Wait for the text of a rank. Raises LostRanksError if it has failed, if it shows no sign
        of life for ``timeout_s``, or once ``stop`` is set."""
        stop, pause, look = stop or threading.Event(), _FIRST_PAUSE_S, time.monotonic() + BEAT_S
        beat, alive = None, time.monotonic()
        while (text := self.find(name, rank)) is None:
            if stop.wait(pause):
                raise LostRanksError(f"rank {self.rank} does not wait for rank {rank} any longer")
            pause, now = min(2 * pause, _LONGEST_PAUSE_S), time.monotonic()
            if now < look:
                continue
            look = now + BEAT_S
            if (end := self.find("end", rank)) is not None:
                raise LostRanksError(f"rank {rank} {end}")
            if (last := self.find("beat", rank)) != beat:
                beat, alive = last, now
            if now - alive > self.timeout_s:
                raise LostRanksError(
                    f"rank {rank} has shown no sign of life for {self.timeout_s} s "
                    f"(--rank_timeout), while rank {self.rank} waited for it in step {self.step}: "
                    f"{self.where(rank)}"
                )
        if text.startswith(FAILED):
            raise LostRanksError(f"rank {rank} {text}")
        return text

    def begin(self, step: int) -> None:
        """Tell the others which step this rank begins."""
        self._place.step = step
        self.post("step", str(step))

    def where(self, rank: int) -> str:
        """Return where a rank was last seen."""
        step = self.find("step", rank)
        return f"rank {rank} began no step" if step is None else f"rank {rank} began step {step}"

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Say who waited, in which step, and for whom, where others do not answer."""
        try:
            yield
        except (StropError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:  # DistError and its kinds among them
            reason = str(error).strip().split("\n", 1)[0]
            raise LostRanksError(
                f"rank {self.rank} of {self.count} got no answer from the others in step "
                f"{self.step} (--rank_timeout {self.timeout_s}): {self._seen()}; {reason}"
            ) from error

    def _seen(self) -> str:
        try:
            found = [
                f"rank {rank} began step {self.store.get(key).decode()}"
                if self.store.check([key := self._key("step", rank)])
                else f"rank {rank} began no step"
                for rank in self.others
            ]
        except RuntimeError:  # the store has ended with its process
            return "their store is gone"
        return ", ".join(found)

    def _key(self, name: str, rank: int) -> str:
        return f"strop/{name}/{rank}"

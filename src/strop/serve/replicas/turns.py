"""Let batches that wait for a replica have their turn in the order in which they came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_PATIENCE_S = 0.3  # for which a later batch need not wait: the replicas may be idle
_SILENT_S = 5.0  # whoever has not asked for so long waits no more, though nobody has said so


@dataclass
class _Waiting:
    since: float
    is_over: Callable[[], bool]
    asked: float


class WaitingTurns:
    """Know who waits. Ray gives a free replica to whoever asks first, so that a batch which has
    waited long, and asks rarely for that reason, would go on waiting. Times are in seconds."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}

    def is_next(self, name: str, since: float, is_over: Callable[[], bool], now: float) -> bool:
        """Note that a batch waits since then, and tell whether it may have a replica: nobody has
        waited longer, or nobody for long."""
        self._waiting[name] = _Waiting(since, is_over, now)
        self._waiting = {
            other: one
            for other, one in self._waiting.items()
            if not one.is_over() and now - one.asked <= _SILENT_S
        }
        before = min((one.since for one in self._waiting.values()), default=since)
        return since <= before or now - before < _PATIENCE_S

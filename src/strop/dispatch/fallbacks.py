"""This counts what of one module ran otherwise than compiled, and says once why."""

from __future__ import annotations

import logging

from strop.dispatch.counters import Counters

log = logging.getLogger("strop")


class Fallbacks:
    def __init__(self, name: str, counters: Counters) -> None:
        self._name, self._counters = name, counters

    def note(self, reason: str, what: str = "") -> None:
        """Log each reason once, and count how often it comes."""
        found = self._counters.fallbacks
        if reason not in found:
            log.warning("%s%s: %s", self._name, what, reason)
        found[reason] = found.get(reason, 0) + 1

    def note_eager(self, reason: str) -> None:
        """Note that a whole call has run in eager."""
        self.note(reason, " runs in eager")
        self._counters.eager_calls += 1

"""What of one module ran otherwise than compiled, and why: said once, and counted."""

from __future__ import annotations

import logging

from strop.dispatch.counters import Counters

log = logging.getLogger("strop")


class Fallbacks:
    def __init__(self, name: str, counters: Counters) -> None:
        self._name, self._counters = name, counters

    def note(self, reason: str, what: str = "") -> None:
        """One log line for each reason, and a count of how often."""
        found = self._counters.fallbacks
        if reason not in found:
            log.warning("%s%s: %s", self._name, what, reason)
        found[reason] = found.get(reason, 0) + 1

    def note_eager(self, reason: str) -> None:
        """A whole call has run in eager."""
        self.note(reason, " runs in eager")
        self._counters.eager_calls += 1

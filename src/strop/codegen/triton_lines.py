"""Collect the lines of a Triton text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Lines:
    """Hold source text under construction. What may wait stands where it is needed first."""

    lines: list[str] = field(default_factory=list)
    depth: int = 1
    waiting: dict[str, str] = field(default_factory=dict)  # by the name that a line gives a value

    def add(self, text: str) -> None:
        for name in [name for name in self.waiting if re.search(rf"\b{name}\b", text)]:
            self._append(self.waiting.pop(name))
        self._append(text)

    def add_later(self, name: str, text: str) -> None:
        """Add a line that gives this name a new value before the first one that has it, or where
        the block ends or another begins."""
        self.waiting[name] = text

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        self._add_waiting()
        with self.choice(header):
            yield
            self._add_waiting()

    @contextmanager
    def choice(self, header: str) -> Iterator[None]:
        """Print a block in which, and behind which, lines still wait."""
        self.add(header)
        self.depth += 1
        yield
        self.depth -= 1

    def _append(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def _add_waiting(self) -> None:
        for text in self.waiting.values():
            self._append(text)
        self.waiting.clear()

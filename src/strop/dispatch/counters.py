"""Count what has happened to the calls of one module."""

from __future__ import annotations

from dataclasses import dataclass, field

from strop.runtime.loop.hoisting import Tally


@dataclass
class Counters:
    """Count what has happened; ``explain`` prints it."""

    calls: int = 0
    eager_calls: int = 0
    replays: int = 0
    short_replays: int = 0  # of them, those by the short way
    slow_look: str = ""  # why they look at the module in Python, and not in native code
    large_pages: str = ""  # how much of the weights lies on them, if that was asked for
    rebinds: int = 0
    launches: int = 0  # of the latest call
    nonfinite: list[str] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    checked_steps: int = 0  # by ``options.check``, and what it found
    findings: list[str] = field(default_factory=list)
    hoisted: Tally = field(default_factory=Tally)

"""Draw the numbers on the CPU that a program for a GPU does not use, so that torch's generator
there moves on as in eager."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from strop.ir.program import HostDraw
from strop.runtime.run.operator_calls import overload


def draw_on_host(draws: tuple[HostDraw, ...]) -> None:
    """Make each draw, in its order, as the results of a call are handed out: a run that is taken
    back draws nothing."""
    for draw in _calls_of(draws):
        draw()


@lru_cache(maxsize=256)
def _calls_of(draws: tuple[HostDraw, ...]) -> tuple[Callable[[], Any], ...]:
    return tuple(partial(overload(d.target), *d.args, **dict(d.kwargs)) for d in draws)

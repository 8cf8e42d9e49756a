"""Put functions of ours in the place of functions of diffusers, for all pipelines of a process.

Ours give the answers of the function that is known, in less time; that of another edition, which
asks for something else, stays where it is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any


class StandIn:
    """Stand in for a function of diffusers, which is ``own``."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own


def put_in_place(
    where: str, name: str, asked: frozenset[str], make: Callable[[FunctionType], StandIn]
) -> bool:
    """Put a stand-in in the place of the function ``where.name`` of diffusers, if its code asks for
    these names, wherever diffusers has imported it. Tell whether a stand-in is there; False without
    diffusers."""
    try:
        place = importlib.import_module(where)
    except ImportError:
        return False
    own = getattr(place, name, None)
    if isinstance(own, FunctionType) and frozenset(own.__code__.co_names) == asked:
        ours = make(own)
        for each in [m for n, m in sys.modules.items() if n.partition(".")[0] == "diffusers"]:
            if vars(each).get(name) is own:
                setattr(each, name, ours)
    return isinstance(getattr(place, name, None), StandIn)

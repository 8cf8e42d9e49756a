"""Functions of Strop stand in the place of diffusers' own while a pipeline is optimised.

Ours give the answers of the function that is known, in less time, to optimised pipelines. All
others get diffusers' own function, and a function of another edition, which asks for something
else, stays where it is.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from strop.diffusion.changes import Changes, in_force, original


class StandIn(ABC):
    """A stand-in answers calls of optimised pipelines; ``own``, for which it stands, all others."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own
        self.__wrapped__ = own  # what guards watch: see ``dispatch.code_walk.Originals``

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and in_force(self) and self.is_for(*args, **kwargs):
            return self.answer(*args, **kwargs)
        return self.own(*args, **kwargs)

    @abstractmethod
    def is_for(self, *args: Any, **kwargs: Any) -> bool:
        """Tell whether the call is an optimised pipeline's and may be answered in another way."""

    @abstractmethod
    def answer(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``own`` answers, in less time."""


def put_in_place(
    changes: Changes,
    where: str,
    name: str,
    asked: frozenset[str],
    make: Callable[[FunctionType], StandIn],
) -> bool:
    """Put a stand-in in the place of the function ``where.name`` of diffusers, wherever diffusers
    has imported it, if its code asks for these names. Returns whether it was put there; False
    without diffusers."""
    try:
        place = importlib.import_module(where)
    except ImportError:
        return False
    own = original(getattr(place, name, None))
    if not isinstance(own, FunctionType) or frozenset(own.__code__.co_names) != asked:
        return False
    loaded = [m for n, m in list(sys.modules.items()) if n.partition(".")[0] == "diffusers"]
    having = [m for m in loaded if m is not place and original(vars(m).get(name)) is own]
    changes.put([place, *having], name, make(own))
    return True

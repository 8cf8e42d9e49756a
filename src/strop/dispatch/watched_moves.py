"""Programs let go of weights that somebody moves by ``module.to``: they and their CUDA graphs would
keep the memory where these lay until the next call. Working memory of a GPU that weights leave
rests, too: who takes a model off a GPU wants room there for something else.

``nn.Module._apply``, by which torch moves and converts all weights of a module, is replaced while
there are modules to be watched, on systems with a GPU alone. Of each such module the first weight
is looked at, before and behind the outermost call: a graph of Dynamo's has a user's weights, but is
no part of his module."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn

from strop.dispatch.offloaded_weights import WeightReader
from strop.runtime.run.workspace import rest_on

Place = tuple[torch.device, torch.dtype, int]


class WatchedModule:
    """Hold who reads the weights of a module. Its first weight is looked for once: to load an
    adapter moves thousands of small modules."""

    def __init__(self) -> None:
        self.readers: WeakSet[WeightReader] = WeakSet()
        self._first: Callable[[], nn.Parameter | None] = lambda: None

    def place(self, module: nn.Module) -> Place | None:
        weight = self._first()
        if weight is None and (weight := next(module.parameters(), None)) is not None:
            self._first = ref(weight)
        return None if weight is None else (weight.device, weight.dtype, _address(weight))


_WATCHED: WeakKeyDictionary[nn.Module, WatchedModule] = WeakKeyDictionary()
_LOCK = threading.RLock()
_THREAD = threading.local()  # ``is_moving``: an outer module is being moved
_own: Any = None  # torch's function, while ours is in its place


def watch(reader: WeightReader, *modules: nn.Module) -> None:
    """Have a reader forget the weights of these modules whenever they are moved."""
    global _own
    if not is_wanted():
        return
    with _LOCK:
        for module in modules:
            _WATCHED.setdefault(module, WatchedModule()).readers.add(reader)
        if _own is None:
            _own = nn.Module._apply
            nn.Module._apply = _moving(_own)  # type: ignore[method-assign]


def unwatch(reader: WeightReader) -> None:
    """Leave a reader alone, and torch as it was once there is none. Ours stays, doing nothing,
    where somebody else's calls it."""
    global _own
    with _LOCK:
        for module, watched in list(_WATCHED.items()):
            watched.readers.discard(reader)
            if not watched.readers:
                del _WATCHED[module]
        is_ours = getattr(nn.Module._apply, "__wrapped__", None) is _own
        if not _WATCHED and _own is not None and is_ours:
            nn.Module._apply = _own  # type: ignore[method-assign]
            _own = None


def is_wanted() -> bool:
    """Tell whether weights can be anywhere where their memory matters so much."""
    return torch.cuda.is_available()


def _moving(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def _apply(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(_THREAD, "is_moving", False):
            return own(module, *args, **kwargs)
        before = _places()
        _THREAD.is_moving = True
        try:
            return own(module, *args, **kwargs)
        finally:
            _THREAD.is_moving = False
            _tell(before)

    return _apply


def _places() -> dict[nn.Module, Place]:
    """Return where the first weight of each module lies, and of what type it is."""
    with _LOCK:
        items = list(_WATCHED.items())
    return {m: place for m, watched in items if (place := watched.place(m)) is not None}


def _address(weight: nn.Parameter) -> int:
    is_plain = type(weight) is nn.Parameter and weight.layout is torch.strided
    return weight.data_ptr() if is_plain else 0


def _tell(before: dict[nn.Module, Place]) -> None:
    """Tell the readers of modules that do not lie where they did."""
    now = _places()
    moved = [module for module, place in before.items() if now.get(module, place) != place]
    for module in moved:
        watched = _WATCHED.get(module)
        for reader in list(watched.readers) if watched else ():
            reader.forget_weights()
    for device in {before[module][0] for module in moved} - {now[module][0] for module in moved}:
        rest_on(device)

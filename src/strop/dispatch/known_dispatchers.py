"""All dispatchers of the process are known here, by the module that each serves."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import nn

from strop.dispatch.watched_moves import unwatch, watch

if TYPE_CHECKING:
    from strop.dispatch.dispatcher import Dispatcher

ALL: WeakSet[Dispatcher] = WeakSet()


def enter(dispatcher: Dispatcher) -> None:
    """Know a dispatcher from here on, and have it hear of moves of its weights."""
    ALL.add(dispatcher)
    watch(dispatcher, dispatcher.module, dispatcher.component)


def depart(dispatcher: Dispatcher) -> None:
    """Have a dispatcher that has left hear nothing any more."""
    unwatch(dispatcher)


def dispatcher_of(module: nn.Module) -> Dispatcher | None:
    """Return the dispatcher that serves a module, though somebody may have put other functions
    around it since, or None."""
    return next((d for d in list(ALL) if d.module is module and not d.has_left), None)


def serves_a_part(module: nn.Module) -> bool:
    """Tell whether somebody's dispatcher serves a part of a module."""
    others = {id(d.module) for d in list(ALL) if d.module is not module and not d.has_left}
    return bool(others) and any(id(part) in others for part in module.modules())


def have_others_rest(own: Dispatcher) -> None:
    """Have other models of pipelines give back the memory of the GPU that weights have there which
    are offloaded by parts, as libraries give it back behind each call. Models that the steps of one
    loop call in turn keep theirs, as do those that another thread calls now."""
    for other in list(ALL) if own.on_leave is not None else ():
        if other is own or other.on_leave is None or not other.hosted.may_rest():
            continue
        if other.loop is not own.loop and not (other.loop.is_running or other.is_busy):
            other.rest()

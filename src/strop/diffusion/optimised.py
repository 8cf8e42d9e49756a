"""This knows which pipelines are optimised, and what belongs to them.

A pipeline is optimised if ``optimize`` was given it, or if it has components that were compiled for
one that was (``from_pipe``, ``Img2Img(**pipe.components)``).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any
from weakref import WeakSet

from torch import nn

from strop.diffusion.changes import LOCK, Changes
from strop.diffusion.parts import COMPONENTS, parts_of, pipelines_dispatcher


class OptimisedRecord:
    """A record tells what was done for one pipeline that ``optimize`` was given.

    ``compiled`` are the modules that were compiled for it, ``components`` all modules that it has
    had since. Both are weak: what the pipeline does not need any more may be collected. ``end``
    undoes the changes, and is called when the pipeline is restored or collected.
    """

    def __init__(self, pipe: Any) -> None:
        self.changes = Changes()
        self.compiled, self.components = WeakSet[nn.Module](), WeakSet[nn.Module]()
        self.end = weakref.finalize(pipe, self._ended, id(pipe))
        self.end.atexit = False

    def note(self, components: Mapping[str, Any], compiled: Iterable[nn.Module]) -> None:
        self.components.update(c for c in components.values() if isinstance(c, nn.Module))
        self.compiled.update(compiled)

    def _ended(self, key: int) -> None:
        with LOCK:
            _RECORDS.pop(key, None)
            self.changes.undo()


_RECORDS: dict[
    int, OptimisedRecord
] = {}  # by the id of a pipeline, which ends its record when it is gone


def record_of(pipe: Any) -> OptimisedRecord | None:
    return _RECORDS.get(id(pipe))


def new_record(pipe: Any) -> OptimisedRecord | None:
    """Return the record of a pipeline, which is made if there is none. It is None for an object of
    which Python cannot tell when it is gone."""
    with LOCK:
        if id(pipe) not in _RECORDS:
            try:
                _RECORDS[id(pipe)] = OptimisedRecord(pipe)
            except TypeError:
                return None
        return _RECORDS[id(pipe)]


def is_claimed(module: nn.Module) -> bool:
    """Tell whether a module was compiled for a pipeline that is still optimised."""
    return any(module in record.compiled for record in list(_RECORDS.values()))


def is_optimised(pipe: Any) -> bool:
    if id(pipe) in _RECORDS:
        return True
    held = getattr(pipe, "__dict__", {})
    modules = (m for name in COMPONENTS for m in parts_of(held.get(name), name).values())
    return any(pipelines_dispatcher(module) is not None for module in modules)


def belongs(component: Any) -> bool:
    """Tell whether a module is a component of an optimised pipeline."""
    if not isinstance(component, nn.Module):
        return False
    if any(component in record.components for record in list(_RECORDS.values())):
        return True
    near = (component, *component._modules.values())
    return any(pipelines_dispatcher(module) is not None for module in near)


def is_called_by_optimised() -> bool:
    """Tell whether the innermost pipeline whose method runs now is optimised. A callback of one may
    run another."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            caller = frame.f_locals.get("self")
            if id(caller) in _RECORDS or hasattr(type(caller), "components"):
                return is_optimised(caller)
        frame = frame.f_back
    return False

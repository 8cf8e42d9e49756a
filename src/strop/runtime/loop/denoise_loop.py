"""Describe a denoise loop: what its steps share."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from strop.runtime.loop.hoisting import Kept, Moment, Stamp, stamp_of

_LOOPS = itertools.count(1)


@dataclass
class DenoiseLoop:
    """Keep what depends on the prompt or on the timestep alone between ``begin`` and ``end``.
    ``timesteps`` (n,): those of its steps, if somebody knows them. ``has_user_code``: whether code
    that is no library's may run between two steps, and change the model. ``num_calls``: how often
    a denoiser will be called with one prompt, 0 where nobody knows. ``lanes``: what a step cache
    keeps of earlier steps; ``furthest`` counts the calls of the lane that has most."""

    number: int = 0
    is_running: bool = False
    kept: WeakValueDictionary[Hashable, Kept] = field(default_factory=WeakValueDictionary)
    timesteps: Tensor | None = None
    has_user_code: bool = True
    num_calls: int = 0
    lanes: dict[Hashable, Any] = field(default_factory=dict)
    furthest: int = 0

    def begin(
        self, timesteps: Any = None, *, has_user_code: bool = True, num_calls: int = 0
    ) -> None:
        self.number = next(_LOOPS)  # threads never get the same
        self.num_calls, self.furthest = num_calls, 0
        self.lanes.clear()
        self.is_running, self.has_user_code = True, has_user_code
        is_known = isinstance(timesteps, Tensor) and timesteps.dim() == 1
        self.timesteps = timesteps if is_known and timesteps.is_contiguous() else None

    def end(self) -> None:
        self.is_running, self.timesteps = False, None
        self.forget()

    def forget(self) -> None:
        """Have the next step compute anew what steps share."""
        self.lanes.clear()
        for kept in [found() for found in self.kept.valuerefs()]:
            if kept is not None:
                kept.forget()


def moment_of(timesteps: Tensor | None, timestep: Tensor, stamp: Stamp | None) -> Moment | None:
    """None for a timestep (b,) that is not one of ``timesteps``, the same b times, and for one of
    another number of dims: there is no timetable for it."""
    if stamp is None or timesteps is None or timestep.dim() != 1:
        return None
    if timestep.stride(0) and len(timestep) > 1:
        return None
    place = place_among(timesteps, timestep)
    own = None if place is None else stamp_of(stamp.loop, [timesteps])
    return None if place is None or own is None else Moment(place, timesteps, own, stamp)


def place_among(timesteps: Tensor, timestep: Tensor) -> int | None:
    """Find where ``timestep`` lies in the memory of ``timesteps`` (n,), as iteration gives them."""
    if timestep.dtype != timesteps.dtype:
        return None
    if timestep.untyped_storage().data_ptr() != timesteps.untyped_storage().data_ptr():
        return None
    place = int(timestep.storage_offset() - timesteps.storage_offset())
    return place if 0 <= place < len(timesteps) else None

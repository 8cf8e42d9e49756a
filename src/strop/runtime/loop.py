"""A denoise loop: what its steps share."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from strop.runtime.hoisting import Kept

_LOOPS = itertools.count(1)


@dataclass
class Loop:
    """Between ``begin`` and ``end`` weights are checked once, then only lightly, and what depends
    on the prompt or on the timestep alone is kept. ``timesteps`` (n,): those of its steps, if
    somebody knows them."""

    number: int = 0
    is_running: bool = False
    kept: WeakValueDictionary[Hashable, Kept] = field(default_factory=WeakValueDictionary)
    timesteps: Tensor | None = None

    def begin(self, timesteps: Any = None) -> None:
        self.number = next(_LOOPS)  # threads never get the same
        self.is_running = True
        is_known = isinstance(timesteps, Tensor) and timesteps.dim() == 1
        self.timesteps = timesteps if is_known and timesteps.is_contiguous() else None

    def end(self) -> None:
        self.is_running, self.timesteps = False, None
        for kept in [found() for found in self.kept.valuerefs()]:
            if kept is not None:
                kept.forget()

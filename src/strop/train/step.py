"""Say what a device is asked to do in one step, and what stays on it between steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from strop.train.ema import EMASchedule
from strop.train.layout import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GROUP_NUMBERS = 8  # of each parameter group, after as many of the whole optimizer


@dataclass(frozen=True, slots=True)
class Request:
    """Describe one step. ``numbers``: a rule's numbers of each group, see ``rules.py``."""

    numbers: tuple[tuple[float, ...], ...]
    lr_tensors: tuple[tuple[int, Tensor], ...]  # group, its learning rate on the device
    max_norm: float
    schedule: EMASchedule | None
    scale: Tensor | None  # of the loss, by a GradScaler
    found_inf: Tensor | None
    measured: bool  # whether the first sweep is needed
    skips: bool  # whether a step with NaN or inf is left out
    shards: ProcessGroup | None  # of those who step the other parameters, if the norm is of all

    @property
    def clips(self) -> bool:
        return self.measured and self.max_norm < float("inf")


@dataclass(frozen=True, slots=True)
class Memory:
    """Hold numbers that live on the device."""

    steps: Tensor  # fp32, of each parameter
    counters: Tensor  # int64: steps of the average, steps that drew random numbers
    norm: Tensor  # fp32: of all gradients, unscaled, before the clip
    nonfinite: Tensor  # fp32: 1 if a gradient was NaN or inf
    scalars: Tensor  # fp64: factor of the gradients, skipped?, 1 - decay of the average, unused

    @property
    def weight(self) -> Tensor:
        """Return what the average takes of the parameters in this step."""
        return self.scalars[2]

    @staticmethod
    def on(device: torch.device, num_params: int, counts: Sequence[int]) -> Memory:
        return Memory(
            torch.zeros(max(num_params, 1), device=device),
            torch.tensor(list(counts), dtype=torch.int64, device=device),
            torch.zeros((), device=device),
            torch.zeros((), device=device),
            torch.zeros(4, dtype=torch.float64, device=device),
        )


class Stepper(Protocol):
    """Do steps in a device's way."""

    memory: Memory

    def run(self, layout: Layout, grads: Sequence[Tensor], request: Request) -> None: ...

    def load(self, request: Request) -> None: ...

    def loaded(self) -> AbstractContextManager[tuple[object, ...]]: ...

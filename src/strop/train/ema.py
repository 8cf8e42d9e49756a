"""Keep moving averages of the parameters in the optimizer's own sweep.

The schedule and the state dict are those of ``diffusers.training_utils.EMAModel``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strop.errors import OptionError
from strop.wording import counted

if TYPE_CHECKING:
    from strop.train.optimizer import FusedOptimizer


@dataclass(frozen=True, slots=True)
class EMASchedule:
    """Compute the decay of each step, from the arguments of ``EMAModel``."""

    decay: float = 0.9999
    min_decay: float = 0.0
    update_after_step: int = 0
    use_ema_warmup: bool = False
    inv_gamma: float = 1.0
    power: float = 2 / 3

    def __post_init__(self) -> None:
        for name in ("decay", "min_decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise OptionError(f"{name} is {getattr(self, name)}: it must lie in [0, 1]")

    def decay_at(self, step: int) -> float:
        """Return the decay of the step with this number, from 1 on."""
        age = step - self.update_after_step - 1
        if age <= 0:
            return 0.0
        growing = (
            1 - (1 + age / self.inv_gamma) ** -self.power
            if self.use_ema_warmup
            else (1 + age) / (10 + age)
        )
        return max(min(growing, self.decay), self.min_decay)


class ParameterEMA:
    """Serve as ``optimizer.ema``: the averages, with the methods of ``EMAModel`` that scripts call.

    There is no ``step``: the optimizer's step is also the average's.
    """

    def __init__(self, optimizer: FusedOptimizer, schedule: EMASchedule) -> None:
        self._optimizer = optimizer
        self.schedule = schedule
        self._stored: list[Tensor] | None = None

    @property
    def shadow_params(self) -> list[Tensor]:
        """Return the averages, in the order of the optimizer's parameters."""
        return [self._optimizer.average_of(p) for p in self._optimizer.parameters()]

    @property
    def optimization_step(self) -> int:
        """Return the steps so far. This waits for the device."""
        return self._optimizer.counts[0]

    def state_dict(self) -> dict[str, Any]:
        """Return what ``EMAModel.load_state_dict`` takes, and ``EMAModel.state_dict`` gives."""
        return {
            **asdict(self.schedule),
            "optimization_step": self.optimization_step,
            "shadow_params": self.shadow_params,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over averages and schedule. Also from an ``EMAModel``."""
        names = {field.name for field in fields(EMASchedule)}
        found = state_dict.get("shadow_params")
        mine = self.shadow_params
        if found is not None and len(found) != len(mine):
            raise OptionError(
                f"the state has {counted(len(found), 'average')} and the optimizer"
                f" {counted(len(mine), 'parameter')}: hand both the same parameters in the same"
                " order"
            )
        _write(mine if found is not None else (), found or ())
        given = {name: value for name, value in state_dict.items() if name in names}
        self.schedule = EMASchedule(**{**asdict(self.schedule), **given})
        step = state_dict.get("optimization_step")
        if step is not None:
            self._optimizer.counts = (int(step), self._optimizer.counts[1])

    @torch.no_grad()
    def copy_to(self, parameters: Iterable[Tensor]) -> None:
        """Write the averages into these parameters."""
        _write(tuple(parameters), self.shadow_params)

    @torch.no_grad()
    def store(self, parameters: Iterable[Tensor]) -> None:
        """Keep a copy of these parameters on the CPU, for ``restore``."""
        self._stored = [parameter.detach().cpu().clone() for parameter in parameters]

    @torch.no_grad()
    def restore(self, parameters: Iterable[Tensor]) -> None:
        """Write back what ``store`` kept."""
        if self._stored is None:
            raise OptionError("there is nothing to restore: call store(parameters) before")
        _write(tuple(parameters), self._stored)
        self._stored = None


def _write(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write all of them, or none and raise OptionError: half a model's averages are no model."""
    shapes, given = ([tuple(t.shape) for t in tensors] for tensors in (targets, values))
    if shapes != given:
        places = (n for n, (a, b) in enumerate(zip(shapes, given, strict=False)) if a != b)
        first = next(places, min(len(shapes), len(given)))
        raise OptionError(
            f"{counted(len(values), 'tensor')} for {counted(len(targets), 'parameter')}, which"
            f" differ from number {first} on: hand over those that the optimizer has, in its order"
        )
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)

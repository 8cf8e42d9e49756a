"""Step a training's weights by Strop's AdamW, with a scaler of the loss where fp16 is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from strop.train import quantized
from strop.train.averages import HostAverages
from strop.train.ema import EMASchedule
from strop.train.optimizers import FusedAdamW
from strop.train.scaler import GradScaler, update
from strop.train.settings import Settings
from strop.train.updating import Updating
from strop.train.weight_steps import States

AVERAGE = "ema"
_KINDS = ("step", "exp_avg", "exp_avg_sq", AVERAGE, *quantized.KEYS)  # of states, by name


class FusedSteps:
    """Implement ``WeightSteps`` by one fused step. ``group`` are those who step other weights."""

    def __init__(
        self, settings: Settings, parameters: Sequence[Tensor], group: ProcessGroup | None
    ) -> None:
        self.optimizer = FusedAdamW(
            parameters,
            lr=settings.rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            weight_decay=settings.adam_weight_decay,
            max_grad_norm=settings.max_grad_norm,
            ema_decay=settings.ema_decay if settings.use_ema and not settings.offload_ema else None,
            states="8bit" if settings.use_8bit_adam else "fp32",
            process_group=group,
        )
        self.averages = None
        if settings.use_ema and settings.offload_ema:
            self.averages = HostAverages(parameters, EMASchedule(settings.ema_decay))
        device = parameters[0].device.type
        self.scaler = GradScaler(device) if settings.mixed_precision == "fp16" else None

    @property
    def draws_otherwise(self) -> bool:
        return self.optimizer.ema is not None or self.averages is not None

    @property
    def skips_steps(self) -> bool:
        return self.scaler is not None

    @property
    def norm(self) -> Tensor:
        found = self.optimizer.grad_norm
        assert found is not None
        return found

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    @property
    def updating(self) -> Updating:
        return Updating(self.optimizer, self.scaler)

    def before(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.averages is not None:
            self.averages.settle()

    def after(self) -> None:
        if self.averages is not None:
            self.averages.step()

    def step(self, rate: float) -> None:
        self.before(rate)
        update(self.optimizer, self.scaler)
        self.after()

    def tensors_of(self, parameter: Tensor) -> States:
        state = self.optimizer.state.get(parameter, {})
        found = {key: value for key, value in state.items() if key in _KINDS}
        average = None if self.averages is None else self.averages.of(parameter)
        return found if average is None else {**found, AVERAGE: average}

    def numbers(self) -> dict[str, Any]:
        averaged, draws = self.optimizer.counts
        if self.averages is not None:
            averaged = self.averages.steps
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return {"counts": [averaged, draws], "scaler": scaler}

    def load(self, states: Mapping[Tensor, States], numbers: Mapping[str, Any]) -> None:
        optimizer, kept = self.optimizer, dict[int, States]()
        for place, parameter in enumerate(optimizer.parameters()):
            found = dict(states[parameter])
            if self.averages is not None and AVERAGE in found:
                self.averages.take(parameter, found.pop(AVERAGE))
            if found:
                kept[place] = found
        if self.averages is not None:
            self.averages.steps = numbers["counts"][0]
        extra = dict(zip(("ema_steps", "draws"), numbers["counts"], strict=True))
        optimizer.load_state_dict({**optimizer.state_dict(), "state": kept, "strop": extra})
        if self.scaler is not None:
            self.scaler.load_state_dict(numbers["scaler"])

    @torch.no_grad()
    def put_weights_to_draw(self) -> None:
        if self.averages is not None:
            self.averages.write()
            return
        for parameter in self.optimizer.parameters():
            average = self.tensors_of(parameter).get(AVERAGE)
            if average is not None:  # there is none before the first step
                parameter.copy_(average)

    def put_weights_to_train(self) -> None:
        """Do nothing: averages are written over nothing that steps read."""

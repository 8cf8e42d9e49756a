"""Put optimizers of torch and of pytorch-optimizer behind the interface that a training needs.

They clip, step and average in sweeps of their own, which Strop's AdamW does in two for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from strop.errors import OptionError
from strop.train import averages
from strop.train.averages import Averages
from strop.train.ema import EMASchedule
from strop.train.fused_steps import AVERAGE
from strop.train.settings import Settings
from strop.train.weight_steps import States

_TENSOR = "tensor"  # marks values of a group that were tensors
_EXTRA = "pip install 'strop[optimizers]'"


@dataclass(frozen=True)
class Maker:
    """Say which class makes an optimizer, and which arguments it takes of the settings beside the
    learning rate: pairs of theirs and of ``values_of``'s."""

    library: str
    name: str
    takes: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


_COMMON = {"betas": "betas", "weight_decay": "weight_decay"}
_ADAM = {**_COMMON, "eps": "eps"}
MAKERS: dict[str, Maker] = {
    "adafactor": Maker("torch.optim", "Adafactor", {"weight_decay": "weight_decay"}),
    "lion": Maker("pytorch_optimizer", "Lion", _COMMON),
    # The clip of LAMB itself would come on top of --max_grad_norm.
    "lamb": Maker("pytorch_optimizer", "Lamb", _ADAM, {"max_grad_norm": 0.0}),
    "novograd": Maker("pytorch_optimizer", "NovoGrad", _ADAM),
    "prodigy": Maker(
        "pytorch_optimizer",
        "Prodigy",
        {
            **_ADAM,
            "beta3": "beta3",
            "weight_decouple": "decouple",
            "bias_correction": "bias_correction",
            "safeguard_warmup": "safeguard_warmup",
        },
    ),
    "schedule-free": Maker("pytorch_optimizer", "ScheduleFreeAdamW", _ADAM),
}


def values_of(settings: Settings) -> dict[str, Any]:
    return {
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "eps": settings.adam_epsilon,
        "weight_decay": settings.adam_weight_decay,
        "beta3": settings.prodigy_beta3,
        "decouple": settings.prodigy_decouple,
        "bias_correction": settings.prodigy_use_bias_correction,
        "safeguard_warmup": settings.prodigy_safeguard_warmup,
    }


def make(settings: Settings, parameters: Sequence[Tensor]) -> LibrarySteps:
    """Make the optimizer of this name. Raises OptionError without its library."""
    maker, values = MAKERS[settings.optimizer], values_of(settings)
    try:
        library = import_module(maker.library)
    except ImportError as error:
        raise OptionError(
            f"--optimizer {settings.optimizer} needs pytorch-optimizer: {_EXTRA}"
        ) from error
    arguments = {theirs: values[ours] for theirs, ours in maker.takes.items()}
    inner = getattr(library, maker.name)(
        list(parameters), lr=settings.rate, **arguments, **maker.more
    )
    beside = None
    if settings.use_ema:
        schedule = EMASchedule(settings.ema_decay)
        beside = averages.make(parameters, schedule, settings.offload_ema)
    return LibrarySteps(inner, settings.max_grad_norm, beside)


class LibrarySteps:
    """Implement ``WeightSteps``: clip, step, and average the weights."""

    skips_steps = False
    updating = None  # numbers of a step are read on the host

    def __init__(
        self, inner: torch.optim.Optimizer, max_norm: float, averages: Averages | None
    ) -> None:
        self.inner, self.max_norm, self.averages = inner, max_norm, averages
        self.norm = torch.zeros(())
        self._switch("train")

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.inner.param_groups for parameter in group["params"]]

    @property
    def _switches(self) -> bool:
        """Tell whether the optimizer itself trains other weights than those to draw with."""
        return hasattr(self.inner, "eval")

    def _switch(self, mode: str) -> None:
        if self._switches:
            getattr(self.inner, mode)()

    @property
    def draws_otherwise(self) -> bool:
        return self.averages is not None or self._switches

    def scaled(self, loss: Tensor) -> Tensor:
        return loss

    def before(self, rate: float) -> None:
        for group in self.inner.param_groups:
            group["lr"] = rate
        if self.averages is not None:
            self.averages.settle()

    def after(self) -> None:
        if self.averages is not None:
            self.averages.step()

    @torch.no_grad()
    def step(self, rate: float) -> None:
        self.before(rate)
        owners = [p for p in self._parameters if p.grad is not None]
        grads = [p.grad for p in owners if p.grad is not None]
        self.norm = torch.nn.utils.get_total_norm(grads)
        torch.nn.utils.clip_grads_with_norm_(owners, self.max_norm, self.norm)
        self.inner.step()
        self.inner.zero_grad()
        self.after()

    def put_weights_to_draw(self) -> None:
        if self.averages is not None:
            self.averages.write()
        self._switch("eval")

    def put_weights_to_train(self) -> None:
        self._switch("train")

    # ---- checkpoints ---------------------------------------------------------------------------

    def tensors_of(self, parameter: Tensor) -> States:
        state = self.inner.state.get(parameter, {})
        found = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        average = None if self.averages is None else self.averages.of(parameter)
        return found if average is None else {**found, AVERAGE: average}

    def numbers(self) -> dict[str, Any]:
        states = [
            {key: value for key, value in self.inner.state.get(p, {}).items() if _is_plain(value)}
            for p in self._parameters
        ]
        groups = [
            {key: _as_json(value) for key, value in group.items() if _is_kept(value)}
            for group in self.inner.param_groups
        ]
        averaged = 0 if self.averages is None else self.averages.steps
        own = {"averaged": averaged, "states": states, "groups": groups}
        return {"optimizer": own, "scaler": None}

    @torch.no_grad()
    def load(self, states: Mapping[Tensor, States], numbers: Mapping[str, Any]) -> None:
        numbers = numbers["optimizer"]
        if self.averages is not None:
            self.averages.steps = numbers["averaged"]
        for parameter, plain in zip(self._parameters, numbers["states"], strict=True):
            own = {
                key: t.to("cpu" if key == "step" else parameter.device, copy=True)
                for key, t in states[parameter].items()
            }
            average = own.pop(AVERAGE, None)
            if average is not None and self.averages is not None:
                self.averages.take(parameter, average)
            if own or plain:
                self.inner.state[parameter] = {**own, **plain}
        for group, found_group in zip(self.inner.param_groups, numbers["groups"], strict=True):
            device = group["params"][0].device
            for key, value in found_group.items():
                is_tensor = isinstance(value, dict)
                group[key] = torch.tensor(value[_TENSOR], device=device) if is_tensor else value


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float)


def _is_kept(value: object) -> bool:
    """Tell whether a value of a group is a part of the state: numbers, and tensors of one."""
    return _is_plain(value) or (isinstance(value, Tensor) and value.numel() == 1)


def _as_json(value: Any) -> Any:
    return {_TENSOR: value.tolist()} if isinstance(value, Tensor) else value

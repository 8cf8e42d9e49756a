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
from strop.train.ema import EMASchedule
from strop.train.settings import Settings

AVERAGE = "ema"
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


def make(settings: Settings, parameters: Sequence[Tensor]) -> LibraryOptimizer:
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
    schedule = EMASchedule(settings.ema_decay) if settings.use_ema else None
    return LibraryOptimizer(inner, settings.max_grad_norm, schedule)


class LibraryOptimizer:
    """Clip, step, and average the weights; hand the state out by parameter and take it back."""

    def __init__(
        self, inner: torch.optim.Optimizer, max_norm: float, ema: EMASchedule | None
    ) -> None:
        self.inner, self.max_norm, self.ema = inner, max_norm, ema
        self.grad_norm: Tensor | None = None
        self._averages: dict[Tensor, Tensor] = {}
        self._averaged = 0  # steps
        self.switch("train")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        owners = [p for p in self.parameters() if p.grad is not None]
        grads = [p.grad for p in owners if p.grad is not None]
        self.grad_norm = torch.nn.utils.get_total_norm(grads)
        torch.nn.utils.clip_grads_with_norm_(owners, self.max_norm, self.grad_norm)
        self.inner.step()
        if self.ema is None:
            return
        self._averaged += 1
        weight = 1.0 - self.ema.decay_at(self._averaged)
        for parameter in self.parameters():
            average = self._averages.setdefault(parameter, parameter.detach().clone())
            average.lerp_(parameter, weight)

    @property
    def switches(self) -> bool:
        """Tell whether weights to train with are others than those to draw with."""
        return hasattr(self.inner, "eval")

    def switch(self, mode: str) -> None:
        """Put the weights to "train" with in place, or those to draw with for "eval"."""
        if self.switches:
            getattr(self.inner, mode)()

    # ---- checkpoints ---------------------------------------------------------------------------

    def tensors_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the parameter's state and average, as far as they are tensors."""
        state = self.inner.state.get(parameter, {})
        found = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        if parameter in self._averages:
            found[AVERAGE] = self._averages[parameter]
        return found

    def numbers(self) -> dict[str, Any]:
        """Return the rest of the state, for JSON."""
        states = [
            {key: value for key, value in self.inner.state.get(p, {}).items() if _is_plain(value)}
            for p in self.parameters()
        ]
        groups = [
            {key: _as_json(value) for key, value in group.items() if _is_kept(value)}
            for group in self.param_groups
        ]
        return {"averaged": self._averaged, "states": states, "groups": groups}

    @torch.no_grad()
    def load(self, tensors: Sequence[Mapping[str, Tensor]], numbers: Mapping[str, Any]) -> None:
        """Take over what ``tensors_of`` each parameter and ``numbers`` gave."""
        self._averaged = numbers["averaged"]
        pairs = zip(self.parameters(), tensors, numbers["states"], strict=True)
        for parameter, found, plain in pairs:
            own = {
                key: t.to("cpu" if key == "step" else parameter.device, copy=True)
                for key, t in found.items()
            }
            if AVERAGE in own:
                self._averages[parameter] = own.pop(AVERAGE)
            if own or plain:
                self.inner.state[parameter] = {**own, **plain}
        for group, found_group in zip(self.param_groups, numbers["groups"], strict=True):
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

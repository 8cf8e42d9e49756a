"""Update rules as data: the states of a parameter and the numbers of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """``numbers`` is in the order that ``settle_*`` in ``kernels.py`` reads, lr first."""

    name: str
    states: Callable[[Group], tuple[str, ...]]
    numbers: Callable[[Group], tuple[float, ...]]


def lr_of(group: Group) -> float:
    """Return a learning rate; one on a GPU is copied there, and counts as 0 here."""
    lr = group["lr"]
    return 0.0 if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(lr)


def _sign(group: Group) -> float:
    return -1.0 if group["maximize"] else 1.0


def _adam(group: Group) -> tuple[float, ...]:
    decoupled = float(group["decoupled_weight_decay"])
    betas, eps, decay = group["betas"], group["eps"], group["weight_decay"]
    return (lr_of(group), *map(float, betas), eps, decay, decoupled, _sign(group), 0.0)


def _sgd(group: Group) -> tuple[float, ...]:
    nesterov = float(group["nesterov"])
    numbers = (group["momentum"], group["dampening"], nesterov, float(group["weight_decay"]))
    return (lr_of(group), *numbers, 0.0, _sign(group), 0.0)


def _sgd_states(group: Group) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


ADAM = UpdateRule("adam", lambda group: ("exp_avg", "exp_avg_sq"), _adam)
SGD = UpdateRule("sgd", _sgd_states, _sgd)

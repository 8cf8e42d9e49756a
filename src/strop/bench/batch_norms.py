"""Give batch norms of networks with random weights what training would have given them.

New ones divide by 1 whatever they get, and some classes draw their weights about 0. Signals then
die out within a few layers, or all inputs give nearly one result, by which nothing can be judged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

WEIGHTS, BIASES = (0.5, 1.5), (-0.5, 0.5)  # drawn evenly between these
Statistics = list[tuple[Tensor, Tensor]]


def norms_of(model: nn.Module) -> list[_BatchNorm]:
    return [part for part in model.modules() if isinstance(part, _BatchNorm)]


def draw_weights(model: nn.Module, seed: int = 0) -> None:
    """Set weights to values from 0.5 to 1.5 and biases to values from -0.5 to 0.5, the same on
    every device."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for norm in norms_of(model):
            for drawn, (low, high) in ((norm.weight, WEIGHTS), (norm.bias, BIASES)):
                drawn.copy_(torch.empty(drawn.shape).uniform_(low, high, generator=source))


def statistics_of(model: nn.Module, run: Callable[[nn.Module], Any]) -> Statistics:
    """Return mean and variance of what each batch norm gets while ``run`` calls a copy of the model
    in fp32 on the CPU. Each norm divides by those of this one batch, as in training."""
    copied = copy.deepcopy(model).to("cpu", torch.float32)
    norms = norms_of(copied)
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean of all batches, of which there is one
        norm.train()
    with torch.no_grad():
        run(copied)
    return [(_given(norm.running_mean), _given(norm.running_var)) for norm in norms]


def set_statistics(model: nn.Module, found: Statistics) -> None:
    """Write what ``statistics_of`` has found into the running statistics, in their own type."""
    for norm, (mean, variance) in zip(norms_of(model), found, strict=True):
        _given(norm.running_mean).copy_(mean)
        _given(norm.running_var).copy_(variance)


def _given(statistics: Tensor | None) -> Tensor:
    assert statistics is not None, "batch norms of these networks keep statistics"
    return statistics

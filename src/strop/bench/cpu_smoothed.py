"""Make the linears of BERT easier to quantise, by SmoothQuant (Xiao et al., 2023).

One scale for all values of a linear is that of the largest column. Each column is divided by a
factor, and the weight multiplied by it, so that columns are about alike: their sums are what they
were. OpenVINO's preset for transformers does so by itself, PT2E does not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

ALPHA = 0.5  # how much of the difference moves from values to weights
LEAST = 1e-4


class Smoothed(nn.Module):
    """Gives a linear of columns that are divided by ``factors`` (K,): values (..., K)."""

    def __init__(self, linear: nn.Linear, factors: Tensor) -> None:
        super().__init__()
        self.linear = linear
        # as bf16 has it, so that it and the weight fit each other in a model of bf16
        inverse = (1 / factors).bfloat16().float()
        self.register_buffer("inverse", inverse)
        linear.weight.data.div_(inverse)

    def forward(self, x: Tensor) -> Any:
        inverse: Any = self.inverse
        return self.linear(x * inverse)


@torch.no_grad()
def smoothed(model: nn.Module, calls: Iterable[Sequence[Tensor]]) -> nn.Module:
    """Return a copy of ``cpu_workloads.Bert`` in fp32 whose encoder is smoothed by the largest
    values that these calls have."""
    found: Any = copy.deepcopy(model)
    largest = _largest(found, calls)
    for layer in found.whole.bert.encoder.layer:
        own, output = layer.attention.self, layer.attention.output
        _wrap(largest, (own, "query"), (own, "key"), (own, "value"))
        _wrap(largest, (layer.intermediate, "dense"))
        _wrap(largest, (layer.output, "dense"))
        factors = _factors(largest, output.dense)
        output.dense.weight.mul_(factors)  # and what attends to values divides them
        own.value.linear.weight.div_(factors[:, None])
        own.value.linear.bias.div_(factors)
    smooth: nn.Module = found
    return smooth


def _largest(model: nn.Module, calls: Iterable[Sequence[Tensor]]) -> dict[nn.Module, Tensor]:
    """Return the largest value of each column that linears get."""
    found: dict[nn.Module, Tensor] = {}

    def look(linear: nn.Module, given: tuple[Tensor, ...]) -> None:
        columns = given[0].abs().flatten(0, -2).amax(0)
        found[linear] = torch.maximum(found.get(linear, columns), columns)

    linears = [part for part in model.modules() if isinstance(part, nn.Linear)]
    hooks = [linear.register_forward_pre_hook(look) for linear in linears]
    for given in calls:
        model(*given)
    for hook in hooks:
        hook.remove()
    return found


def _factors(largest: dict[nn.Module, Tensor], *linears: nn.Linear) -> Tensor:
    weights = torch.stack([linear.weight.abs().amax(0) for linear in linears]).amax(0)
    found = largest[linears[0]] ** ALPHA / weights ** (1 - ALPHA)
    return found.clamp_min(LEAST) / found.mean()


def _wrap(largest: dict[nn.Module, Tensor], *places: tuple[nn.Module, str]) -> None:
    """Smooth linears that get the same values."""
    factors = _factors(largest, *(getattr(owner, name) for owner, name in places))
    for owner, name in places:
        setattr(owner, name, Smoothed(getattr(owner, name), factors))

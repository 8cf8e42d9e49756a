"""Stand in for a layer that peft has wrapped while its weight stays as it is: y = W x + B (A x).

A and B hold the factors of all adapters that count, side by side, and zeros up to a rank that is
known when the layer is traced. So which adapters there are, of which ranks and scales, is no part
of the program; of a convolution A is one with the same window, and B is 1x1.

Where rows of a batch have adapters of their own, a table says by how much each row takes each
column of A x: a factor for each row of the batch and each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.errors import CaptureError
from strop.frontend.adapted_layers import is_folded
from strop.frontend.adapter_kinds import name_of

# Names of the Parameters that a stand-in has besides those of the layer.
DOWN, UP, ROWS = "low_rank_a", "low_rank_b", "low_rank_rows"
LAYERS = frozenset((("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.layer", "Conv2d")))


def has_low_rank(layer: Any) -> bool:
    """Tell whether a wrapped layer gives W x + sum of s_i B_i (A_i x), and nothing else."""
    if name_of(layer) not in LAYERS or not is_folded(layer):
        return False
    return not layer.lora_variant and not any(layer.lora_bias.values())


class LowRankLinear(nn.Linear):
    """Stand in for a linear layer with adapters."""

    low_rank_a: Tensor
    low_rank_b: Tensor

    def forward(self, input: Tensor) -> Tensor:
        low = _by_rows(self, F.linear(input, self.low_rank_a), -1)
        return F.linear(input, self.weight, self.bias) + F.linear(low, self.low_rank_b)


class LowRankConv2d(nn.Conv2d):
    """Stand in for a convolution with adapters."""

    low_rank_a: Tensor
    low_rank_b: Tensor

    def forward(self, input: Tensor) -> Tensor:
        low = _by_rows(self, self._conv_forward(input, self.low_rank_a, None), 1)
        plain: Tensor = self._conv_forward(input, self.weight, self.bias)
        return plain + F.conv2d(low, self.low_rank_b)


STAND_INS: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.Linear: LowRankLinear,
    nn.Conv2d: LowRankConv2d,
}


def stand_in(layer: nn.Module) -> None:
    """Have a copy of a plain layer compute its low-rank part too, if it has been given one."""
    if DOWN in layer._parameters:
        layer.__class__ = STAND_INS[type(layer)]


def is_factor(name: str) -> bool:
    """Tell whether this is the name of an A or a B among the weights of a module."""
    return name.rpartition(".")[2] in (DOWN, UP)


# rows in one batch


_BATCH: ContextVar[Any] = ContextVar("strop_batch")  # how many rows the call has that is traced


@contextmanager
def rows_counted(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Note how many rows a call has, for layers that are traced in the body."""
    token = _BATCH.set(batch_of(args, kwargs))
    try:
        yield
    finally:
        _BATCH.reset(token)


def batch_of(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return how many rows a call has: the first size of its first tensor that has one, or 0."""
    given = (*args, *kwargs.values())
    return next((t.shape[0] for t in given if isinstance(t, Tensor) and t.dim()), 0)


def _by_rows(layer: nn.Module, low: Tensor, dim: int) -> Tensor:
    """Multiply A x, whose ranks lie along ``dim``, by what each row takes of each; all takes all
    where rows have no adapters of their own."""
    table = layer._parameters.get(ROWS)
    if table is None:
        return low
    batch = _BATCH.get()
    if low.dim() < 2 or low.shape[0] != batch:
        raise CaptureError(
            "strop.lora_rows gives adapters to rows of the batch, but an adapted layer gets"
            f" {low.shape[0]} rows of a call with {batch}: its rows are no pictures"
        )
    shape = [1] * low.dim()
    shape[0], shape[dim] = batch, low.shape[dim]
    taken = torch.narrow(table, 0, 0, batch).reshape(shape)
    return (low * taken).to(low.dtype)  # the table is fp32: rounded once

"""Say how much noise each row of a batch gets, and what the loss makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from strop.train.share import BatchShare


@dataclass(frozen=True)
class Draws:
    """Draw for all rows of a batch, and return those of a share."""

    source: torch.Generator
    share: BatchShare

    def normal(self, *shape: int) -> Tensor:
        """Return a tensor of this shape for each row of the share."""
        size, device = (self.share.drawn, *shape), self.source.device
        return self.share.rows(torch.randn(size, device=device, generator=self.source))

    def even(self) -> Tensor:
        """Return a number from 0 on and below 1 for each row of the share."""
        size, device = (self.share.drawn,), self.source.device
        return self.share.rows(torch.rand(size, device=device, generator=self.source))

    def integers(self, end: int) -> Tensor:
        """Return a number from 0 on and below ``end`` for each row of the share."""
        size, device = (self.share.drawn,), self.source.device
        return self.share.rows(torch.randint(end, size, device=device, generator=self.source))


@dataclass(frozen=True)
class Levels:
    """Hold what was drawn for the rows of a batch: what the network sees is ``keep * latents + lose
    * noise``, both of shape [rows, 1, 1, 1].

    times: [rows], as the scheduler counts.
    weights: [rows] of the loss; None are ones.
    """

    times: Tensor
    keep: Tensor
    lose: Tensor
    weights: Tensor | None


class Process(Protocol):
    """Say by what the latents become noise, and what a network is to predict of that."""

    @property
    def prediction(self) -> str:
        """Name what the network predicts, as diffusers' schedulers do."""
        ...

    def draw(self, draws: Draws) -> Levels: ...

    def wanted(self, latents: Tensor, noise: Tensor, levels: Levels) -> Tensor:
        """Return what the network is to predict."""
        ...

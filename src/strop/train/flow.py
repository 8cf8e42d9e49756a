"""Train networks by flow matching: they predict the velocity from the picture to noise.

The share of noise in what the network sees goes from 0, the picture, to 1 (Liu et al. 2022). How
timesteps are drawn and errors weighed is that of Esser et al. 2024, as diffusers' scripts have it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.train.levels import Draws, Levels


@dataclass(frozen=True)
class Timesteps:
    """Say where timesteps are drawn.

    scheme: one of ``noise_settings.SCHEMES``.
    mean, deviation: those of logit_normal.
    mode_scale: how far mode is from even.
    """

    scheme: str
    mean: float = 0.0
    deviation: float = 1.0
    mode_scale: float = 1.29

    def draw(self, draws: Draws) -> Tensor:
        """Return [rows] from 0 to 1, of the way from noise to the picture."""
        if self.scheme == "logit_normal":
            return (draws.normal() * self.deviation + self.mean).sigmoid()
        even = draws.even()
        if self.scheme != "mode":
            return even
        bend = torch.cos(math.pi * even / 2) ** 2 - 1 + even
        return 1 - even - self.mode_scale * bend

    def weights(self, shares: Tensor) -> Tensor | None:
        """Return what errors at these shares of noise are multiplied by; None for ones."""
        if self.scheme == "sigma_sqrt":
            return shares**-2.0
        if self.scheme == "cosmap":
            return 2 / (math.pi * (1 - 2 * shares + 2 * shares**2))
        return None


@dataclass(frozen=True)
class FlowMatching:
    """Add noise to latents by ``shares``: those of noise at each of the scheduler's timesteps, of
    which the first has most. ``is_weighed`` multiplies errors by the share squared, as if the
    network predicted the picture."""

    shares: Tensor
    timesteps: Timesteps
    is_weighed: bool
    prediction: str = "flow_prediction"

    def draw(self, draws: Draws) -> Levels:
        count = len(self.shares)
        places = (self.timesteps.draw(draws) * count).long().clamp(0, count - 1)
        shares = self.shares[places]
        weights = self.timesteps.weights(shares)
        if self.is_weighed:
            weights = shares**2 if weights is None else weights * shares**2
        lose = shares[:, None, None, None]
        return Levels(shares * count, 1.0 - lose, lose, weights)

    def wanted(self, latents: Tensor, noise: Tensor, levels: Levels) -> Tensor:
        return noise - latents


def shares_of(scheduler: Any, shift: float | None) -> Tensor:
    """Return the share of noise at each timestep: those of the scheduler, or even ones that are
    shifted to noise by ``shift``."""
    count = int(scheduler.config.num_train_timesteps)
    if shift is None:
        own: Tensor = scheduler.sigmas[:count]
        return own.float()
    even = torch.linspace(count, 1, count, dtype=torch.float64) / count
    return (shift * even / (1 + (shift - 1) * even)).float()

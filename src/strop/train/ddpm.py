"""Train networks that predict the noise of DDPM, the picture, or v between the two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.errors import UnsupportedError
from strop.train.levels import Draws, Levels


@dataclass(frozen=True)
class Ddpm:
    """Add noise as the scheduler's ``alphas_cumprod`` say: ``signal`` is the share of the picture
    that is left at each timestep."""

    signal: Tensor
    prediction: str
    snr_gamma: float | None

    def draw(self, draws: Draws) -> Levels:
        times = draws.integers(len(self.signal))
        signal = self.signal[times]
        keep = signal.sqrt()[:, None, None, None]
        lose = (1.0 - signal).sqrt()[:, None, None, None]
        weights = None
        if self.snr_gamma is not None:
            weights = snr_weights(signal, self.snr_gamma, self.prediction)
        return Levels(times, keep, lose, weights)

    def wanted(self, latents: Tensor, noise: Tensor, levels: Levels) -> Tensor:
        return target_of(self.prediction, latents, noise, levels.keep, levels.lose)


def snr_weights(signal: Tensor, gamma: float, prediction: str) -> Tensor:
    """Return Min-SNR weights (Hang et al. 2023) at timesteps with these ``alphas_cumprod``.

    The loss of a prediction of the noise is that of the picture times the SNR, and v's times
    SNR + 1, so the weight min(SNR, gamma) of the picture's loss is divided by that.
    """
    snr = signal / (1.0 - signal)
    capped = snr.clamp(max=gamma)
    if prediction == "sample":
        return capped
    # If no signal is left (zero terminal SNR) the first quotient is 0 / 0; its limit is 1.
    return (
        capped / (snr + 1.0)
        if prediction == "v_prediction"
        else torch.where(snr > 0, capped / snr.clamp(min=1e-38), 1.0)
    )


def target_of(
    prediction: str, latents: Tensor, noise: Tensor, keep: Tensor, lose: Tensor
) -> Tensor:
    """Return what the UNet is to predict; the noisy latents are ``keep * latents + lose *
    noise``."""
    if prediction == "epsilon":
        return noise
    if prediction == "v_prediction":
        return keep * noise - lose * latents
    if prediction == "sample":
        return latents
    raise UnsupportedError(
        f"prediction type {prediction!r} is not built; use epsilon, v_prediction or sample"
    )

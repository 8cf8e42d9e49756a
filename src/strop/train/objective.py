"""Compute the loss of a batch: noise, what the network is to predict of it, and weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strop.errors import UnsupportedError
from strop.train import flow
from strop.train import model as models
from strop.train.data import Batch
from strop.train.draws import generator, seed_of
from strop.train.model import DiffusionModel, FlowModel, NoiseModel
from strop.train.settings import Settings
from strop.train.share import BatchShare


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


def joined(rows: Tensor, num_instances: int, prior_weight: float) -> Tensor:
    """Return the mean loss of the instances, and the weighted one of the class pictures after
    them."""
    instances, classes = rows[:num_instances], rows[num_instances:]
    loss = instances.mean()
    return loss + prior_weight * classes.mean() if len(classes) else loss


@dataclass(frozen=True)
class Noised:
    """Hold latents, the noise that is to be predicted, and the noise that they get."""

    latents: Tensor
    noise: Tensor
    added: Tensor


@dataclass(frozen=True)
class Draws:
    """Draw for all rows of a batch, and return those of a share."""

    source: torch.Generator
    share: BatchShare

    def normal(self, *shape: int) -> Tensor:
        """Return a tensor of this shape for each row of the share."""
        size, device = (self.share.drawn, *shape), self.source.device
        return self.share.rows(torch.randn(size, device=device, generator=self.source))

    def integers(self, end: int) -> Tensor:
        """Return a number from 0 on and below ``end`` for each row of the share."""
        size, device = (self.share.drawn,), self.source.device
        return self.share.rows(torch.randint(end, size, device=device, generator=self.source))


class Objective:
    """Compute a rank's part of the loss of a batch with its number; ``unet`` is what runs in the
    place of the model's. The average of the parts is the loss."""

    def __init__(
        self, settings: Settings, model: DiffusionModel, unet: nn.Module, rank: int = 0
    ) -> None:
        self.settings, self.model, self.unet = settings, model, unet
        self._dropout = f"dropout of rank {rank}" if rank else "dropout"

    def __call__(self, batch: Batch, number: int) -> Tensor:
        settings, model, share = self.settings, self.model, batch.share
        source = generator(settings.seed, "noise", number, model.device)
        torch.manual_seed(seed_of(settings.seed, self._dropout, number))  # of the modules
        draws = Draws(source, share)
        latents = self._latents(batch, draws)
        noised = Noised(latents, *self._noises(latents, draws))
        if isinstance(model, FlowModel):
            rows = self._flow_errors(model, noised, batch.text, draws)
        else:
            assert isinstance(model, NoiseModel)
            rows = self._noise_errors(model, noised, batch.text, draws)
        loss = joined(rows, len(share), settings.prior_loss_weight)
        return loss if share.weight == 1.0 else loss * share.weight

    def _noise_errors(
        self, model: NoiseModel, noised: Noised, text: Tensor, draws: Draws
    ) -> Tensor:
        count, latents = len(model.signal), noised.latents
        times = draws.integers(count)
        signal = model.signal[times]
        keep = signal.sqrt()[:, None, None, None]
        lose = (1.0 - signal).sqrt()[:, None, None, None]
        states = self._text(text)
        mixed = keep * latents + lose * noised.added
        with model.autocast():
            guess = self.unet(mixed, times, states, return_dict=False)[0]
        wanted = target_of(model.prediction, latents, noised.noise, keep, lose)
        rows: Tensor = (guess.float() - wanted).square().mean(dim=(1, 2, 3))
        if self.settings.snr_gamma is not None:
            rows = rows * snr_weights(signal, self.settings.snr_gamma, model.prediction)
        return rows

    def _flow_errors(self, model: FlowModel, noised: Noised, text: Tensor, draws: Draws) -> Tensor:
        """Compare with the velocity, which leads on a straight way from the latents to noise."""
        latents = noised.latents
        drawn = flow.draw_times(self.settings.weighting_scheme, draws.share.drawn, draws.source)
        times = draws.share.rows(drawn)
        share = times[:, None, None, None]
        mixed = (1.0 - share) * latents + share * noised.added
        inputs = flow.inputs_of(model, mixed, times, text)
        with model.autocast():
            guess = self.unet(**inputs, return_dict=False)[0]
        wanted = flow.tokens_of(noised.noise - latents)
        rows: Tensor = (guess.float() - wanted).square().mean(dim=(1, 2))
        return rows

    def _noises(self, latents: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return the noise that is to be predicted, and what the latents get."""
        settings, shape = self.settings, latents.shape[1:]
        noise = draws.normal(*shape)
        if settings.noise_offset:
            shift = draws.normal(shape[0], 1, 1)
            noise = noise + settings.noise_offset * shift
        if not settings.input_perturbation:
            return noise, noise
        more = draws.normal(*shape)
        return noise, noise + settings.input_perturbation * more

    def _latents(self, batch: Batch, draws: Draws) -> Tensor:
        """Draw latents from the encoder's distribution, as diffusers does."""
        found = batch.pictures.to(self.model.device, non_blocking=True)
        moments = found if batch.are_moments else models.moments_of(self.model, found)
        mean, log_variance = moments.chunk(2, dim=1)
        noise = draws.normal(*mean.shape[1:])
        latents = mean + noise * (0.5 * log_variance.clamp(-30.0, 20.0)).exp()
        config = self.model.vae.config
        if config.shift_factor:
            latents = latents - config.shift_factor
        return latents * float(config.scaling_factor)

    def _text(self, text: Tensor) -> Tensor:
        text = text.to(self.model.device, non_blocking=True)
        if text.is_floating_point():
            return text
        if not self.settings.train_text_encoder:
            return models.embeddings_of(self.model, text)
        with self.model.autocast():
            states: Tensor = self.model.text_encoder(text, return_dict=False)[0]
        return states

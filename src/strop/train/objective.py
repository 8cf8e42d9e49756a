"""Compute the loss of a batch: noise, what the network is to predict of it, and weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strop.train import model as models
from strop.train.data import Batch
from strop.train.draws import generator, seed_of
from strop.train.families.family import Noisy
from strop.train.levels import Draws
from strop.train.model import DiffusionModel
from strop.train.prompts import Prompts
from strop.train.settings import Settings

_GUIDANCE = 3.5  # that diffusers' scripts train Flux with


def joined(rows: Tensor, num_instances: int, prior_weight: float) -> Tensor:
    """Return the mean loss of the instances, and the weighted one of the class pictures after
    them."""
    instances, classes = rows[:num_instances], rows[num_instances:]
    loss = instances.mean()
    return loss + prior_weight * classes.mean() if len(classes) else loss


class Objective:
    """Compute a rank's part of the loss of a batch with its number; ``unet`` is what runs in the
    place of the model's. The average of the parts is the loss."""

    def __init__(
        self, settings: Settings, model: DiffusionModel, unet: nn.Module, rank: int = 0
    ) -> None:
        self.settings, self.model, self.unet = settings, model, unet
        self._dropout = f"dropout of rank {rank}" if rank else "dropout"

    def __call__(self, batch: Batch, number: int) -> Tensor:
        settings, share = self.settings, batch.share
        source = generator(settings.seed, "noise", number, self.model.device)
        torch.manual_seed(seed_of(settings.seed, self._dropout, number))  # of the modules
        rows = self._errors(batch, Draws(source, share))
        loss = joined(rows, len(share), settings.prior_loss_weight)
        return loss if share.weight == 1.0 else loss * share.weight

    def _errors(self, batch: Batch, draws: Draws) -> Tensor:
        """Return the weighed error of each row."""
        model = self.model
        latents = self._latents(batch, draws)
        noise, added = self._noises(latents, draws)
        levels = model.process.draw(draws)
        text = self._text(batch.text)
        mixed = levels.keep * latents + levels.lose * added
        wish = self.settings.guidance_scale
        guidance = _GUIDANCE if wish is None else wish
        noisy = Noisy(mixed, levels.times, text, self._moved(batch.sizes), guidance)
        inputs = model.family.inputs(model.modules, noisy)
        with model.autocast():
            found = self.unet(**inputs, return_dict=False)[0]
        guess = model.family.guess(model.modules, found, mixed)
        errors = (guess.float() - model.process.wanted(latents, noise, levels)).square()
        if batch.masks is not None:
            errors = errors * self._moved(batch.masks)
        rows: Tensor = errors.mean(dim=(1, 2, 3))
        return rows if levels.weights is None else rows * levels.weights

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
        found = self._moved(batch.pictures)
        moments = found if batch.are_moments else models.moments_of(self.model, found)
        mean, log_variance = moments.chunk(2, dim=1)
        noise = draws.normal(*mean.shape[1:])
        latents = mean + noise * (0.5 * log_variance.clamp(-30.0, 20.0)).exp()
        config = self.model.vae.config
        if config.shift_factor:
            latents = latents - config.shift_factor
        return latents * float(config.scaling_factor)

    def _text(self, text: Prompts) -> dict[str, Tensor]:
        """Return what the text encoders give for the prompts of a batch."""
        model, text = self.model, text.to(self.model.device)
        if text.is_encoded:
            return text.tensors
        if not self.settings.train_text_encoder:
            return models.embeddings_of(model, text).tensors
        with model.autocast():
            return model.family.encode(model.modules, text.tensors)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.model.device, non_blocking=True)

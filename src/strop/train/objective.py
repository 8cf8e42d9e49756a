"""Compute the loss of a batch: noise, what the network is to predict of it, and weights."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class DrawnBatch:
    """Hold what the loss of a batch is computed from, on the device.

    mixed, wanted: [rows, channels, height, width], what the network sees and is to predict.
    times, weights: [rows]; without weights all are 1.
    text: what the encoders give, or ids where these are trained.
    sizes: of the pictures and their crops.
    masks: [rows, 1, height, width] of the errors.
    conditions: what a ControlNet is shown: pixels [rows, 3, height, width], their latents [rows,
        channels, height, width] or tokens [rows, count, channels].
    num_instances: the first rows, behind which those of class pictures lie.
    share: factor of a rank's part of the loss.
    """

    mixed: Tensor
    times: Tensor
    wanted: Tensor
    weights: Tensor | None
    text: Prompts
    sizes: Tensor
    masks: Tensor | None
    conditions: Tensor | None
    num_instances: int
    share: float


class Objective:
    """Compute a rank's part of the loss of a batch with its number; ``unet`` is what runs in the
    place of the model's. The average of the parts is the loss."""

    def __init__(
        self, settings: Settings, model: DiffusionModel, unet: nn.Module, rank: int = 0
    ) -> None:
        self.settings, self.model, self.unet = settings, model, unet
        self._dropout = f"dropout of rank {rank}" if rank else "dropout"

    def __call__(self, batch: Batch, number: int) -> Tensor:
        return self.loss(self.drawn(batch, number))

    def drawn(self, batch: Batch, number: int) -> DrawnBatch:
        """Draw what the loss of this batch needs, and encode what is not trained. Seeds torch's
        generators for the dropout of the modules."""
        settings, share, model = self.settings, batch.share, self.model
        source = generator(settings.seed, "noise", number, model.device)
        torch.manual_seed(seed_of(settings.seed, self._dropout, number))
        draws = Draws(source, share)
        latents = self._latents(batch, draws)
        noise, added = self._noises(latents, draws)
        levels = model.process.draw(draws)
        return DrawnBatch(
            levels.keep * latents + levels.lose * added,
            levels.times,
            model.process.wanted(latents, noise, levels),
            levels.weights,
            self._text(batch.text),
            self._moved(batch.sizes),
            None if batch.masks is None else self._moved(batch.masks),
            None if batch.conditions is None else self._shown(batch.conditions, draws),
            len(share),
            share.weight,
        )

    def loss(self, drawn: DrawnBatch) -> Tensor:
        """Compute the loss of what was drawn, on the device alone."""
        rows = self._errors(drawn)
        loss = joined(rows, drawn.num_instances, self.settings.prior_loss_weight)
        return loss if drawn.share == 1.0 else loss * drawn.share

    def _errors(self, drawn: DrawnBatch) -> Tensor:
        """Return the weighed error of each row."""
        model, wish = self.model, self.settings.guidance_scale
        guidance = _GUIDANCE if wish is None else wish
        text = self._encoded(drawn.text)
        noisy = Noisy(drawn.mixed, drawn.times, text, drawn.sizes, guidance)
        inputs = model.family.inputs(model.modules, noisy)
        if drawn.conditions is not None:
            inputs["controlnet_cond"] = drawn.conditions
        with model.autocast():
            found = self.unet(**inputs, return_dict=False)[0]
        guess = model.family.guess(model.modules, found, drawn.mixed)
        errors = (guess.float() - drawn.wanted).square()
        if drawn.masks is not None:
            errors = errors * drawn.masks
        rows: Tensor = errors.mean(dim=(1, 2, 3))
        return rows if drawn.weights is None else rows * drawn.weights

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
        return self._sampled(moments, draws)

    def _sampled(self, moments: Tensor, draws: Draws, *, is_shifted: bool = True) -> Tensor:
        mean, log_variance = moments.chunk(2, dim=1)
        noise = draws.normal(*mean.shape[1:])
        latents = mean + noise * (0.5 * log_variance.clamp(-30.0, 20.0)).exp()
        config = self.model.vae.config
        if is_shifted and config.shift_factor:
            latents = latents - config.shift_factor
        return latents * float(config.scaling_factor)

    def _shown(self, conditions: Tensor, draws: Draws) -> Tensor:
        """Return what a ControlNet is shown. Latents are drawn behind all else of the batch."""
        model = self.model

        def encoded(pixels: Tensor, is_shifted: bool) -> Tensor:
            return self._sampled(models.moments_of(model, pixels), draws, is_shifted=is_shifted)

        return model.family.control.shown(model.denoisers[1], self._moved(conditions), encoded)

    def _text(self, text: Prompts) -> Prompts:
        """Return what the text encoders give for prompts, or the ids where they are trained."""
        text = text.to(self.model.device)
        is_fixed = text.is_encoded or self.settings.train_text_encoder
        return text if is_fixed else models.embeddings_of(self.model, text)

    def _encoded(self, text: Prompts) -> dict[str, Tensor]:
        if text.is_encoded:
            return text.tensors
        with self.model.autocast():
            return self.model.family.encode(self.model.modules, text.tensors)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.model.device, non_blocking=True)

"""Trains the autoencoder: L1 on pixels and on their differences, and a small KL term."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from strop.models.sprites import draw, network
from strop.models.sprites.grammar import BUCKETS
from strop.models.sprites.learner import Learner
from strop.models.sprites.loop import Loop, Piece, bucket, generator
from strop.models.sprites.settings import Settings, VaeTraining
from strop.models.sprites.specs import draw_training_specs

# The most that one picture counts, in pictures of average loss.
_HARDEST = 10.0


def _edges(difference: Tensor) -> Tensor:
    across = difference[..., :, 1:] - difference[..., :, :-1]
    down = difference[..., 1:, :] - difference[..., :-1, :]
    return across.abs().mean((1, 2, 3)) + down.abs().mean((1, 2, 3))


def picture_loss(difference: Tensor, edge_weight: float) -> Tensor:
    """Return the mean loss of reconstructions off by `difference` [n, 3, height, width].

    A picture counts in proportion to its own loss: else the few with an object that was lost,
    green on gray above all, hardly move a mean over thousands of good ones.
    """
    rows = difference.abs().mean((1, 2, 3)) + edge_weight * _edges(difference)
    share = rows.detach() / rows.detach().mean().clamp(min=1e-8)
    return (rows * share.clamp(max=_HARDEST)).mean()


def vae_loss(model: AutoencoderKL, training: VaeTraining, step: int, dtype: torch.dtype) -> Tensor:
    """Return the loss of one step on fresh pictures."""
    device = model.device
    source = generator(training.seed, step, device)
    width, height, count = bucket(step, training.batch)
    with torch.no_grad():
        specs = draw_training_specs(count, source)
        pictures = draw.pictures(specs, width, height, source) * 2 - 1
    moments: Tensor = model.quant_conv(model.encoder(pictures.to(dtype))).float()
    mean, logvar = moments.chunk(2, dim=1)
    logvar = logvar.clamp(-30, 20)
    noise = torch.randn(mean.shape, device=device, generator=source)
    latents = mean + noise * torch.exp(0.5 * logvar)
    back: Tensor = model.decoder(model.post_quant_conv(latents.to(dtype))).float()
    difference = back - pictures
    kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
    return picture_loss(difference, training.edge_weight) + training.kl_weight * kl


@torch.no_grad()
def latent_statistics(model: AutoencoderKL, seed: int, count: int = 256) -> tuple[Tensor, Tensor]:
    """Return mean and deviation per latent channel over `count` pictures of every size."""
    source = generator(seed, -1 % 1_000_003, model.device)
    rows = []
    for width, height in BUCKETS:
        specs = draw_training_specs(count, source)
        for part in torch.split(specs, 32):
            pictures = draw.pictures(part, width, height, source) * 2 - 1
            latents = model.encode(pictures.to(model.dtype)).latent_dist.mean.float()
            rows.append(latents.transpose(0, 1).flatten(1).cpu())
    stacked = torch.cat(rows, dim=1)
    return stacked.mean(dim=1), stacked.std(dim=1)


def train_vae(
    settings: Settings,
    out: Path,
    piece: Piece,
    device: torch.device,
    compiled: bool = False,
    init: Path | None = None,
) -> bool:
    """Train one piece and write the averaged model to `out/vae`; returns whether it is complete.

    A new training starts from the exported model in `init`, if given.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    built = network.parts(settings, settings.vae.seed)
    if init is not None:
        network.start_from(built, init)
    learner = Learner({"vae": built.vae}, settings.vae, device, dtype)
    if compiled:
        built.vae.encoder.compile(dynamic=False)
        built.vae.decoder.compile(dynamic=False)

    def loss(step: int) -> Tensor:
        return vae_loss(built.vae, settings.vae, step, dtype)

    note: dict[str, Any] = {"settings": settings.as_dict()}
    loop = Loop(learner, loss, piece, note)
    complete = loop.run()
    model = network.vae(settings.network)
    model.load_state_dict(learner.averaged("vae"))
    mean, std = latent_statistics(model.to(device).eval(), settings.vae.seed)
    network.fold_statistics(model.cpu(), mean, std)
    model.save_pretrained(out / "vae", safe_serialization=True)
    print(f"vae: latent mean {mean.tolist()} deviation {std.tolist()} folded in", flush=True)
    return complete

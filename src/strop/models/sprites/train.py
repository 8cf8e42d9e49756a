"""Trains the autoencoder: `python -m strop.models.sprites.train --out DIR`.

`DIR/weights` then is a diffusers folder with the autoencoder, and with a UNet and a text encoder of
random weights, which `strop train text-to-image --config examples/sprites.yaml --model DIR/weights`
trains. `python -m strop.models.sprites.evaluate --folder DIR/weights --validate-scorer` says how
many pictures survive the autoencoder.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from strop.models.sprites import draw, network
from strop.models.sprites.export import export
from strop.models.sprites.grammar import BUCKETS
from strop.models.sprites.learner import Learner
from strop.models.sprites.loop import BudgetLoop, Piece, bucket, generator
from strop.models.sprites.settings import NAMED, Settings, VaeTraining
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


def vae_loss(model: AutoencoderKL, training: VaeTraining, step: int) -> Tensor:
    """Return the loss of one step on fresh pictures: L1 on pixels and edges, and a small KL."""
    source = generator(training.seed, step, model.device)
    width, height, count = bucket(step, training.batch)
    with torch.no_grad():
        specs = draw_training_specs(count, source)
        pictures = draw.pictures(specs, width, height, source) * 2 - 1
    moments: Tensor = model.quant_conv(model.encoder(pictures.to(model.dtype))).float()
    mean, logvar = moments.chunk(2, dim=1)
    logvar = logvar.clamp(-30, 20)
    noise = torch.randn(mean.shape, device=model.device, generator=source)
    latents = mean + noise * torch.exp(0.5 * logvar)
    back: Tensor = model.decoder(model.post_quant_conv(latents.to(model.dtype))).float()
    kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
    return picture_loss(back - pictures, training.edge_weight) + training.kl_weight * kl


@torch.no_grad()
def latent_statistics(model: AutoencoderKL, training: VaeTraining) -> tuple[Tensor, Tensor]:
    """Return mean and deviation [channels] of the latents of pictures of every size."""
    source = generator(training.seed, -1 % 1_000_003, model.device)
    rows = []
    for width, height in BUCKETS:
        specs = draw_training_specs(training.statistics, source)
        for part in torch.split(specs, 32):
            pictures = draw.pictures(part, width, height, source) * 2 - 1
            latents = model.encode(pictures.to(model.dtype)).latent_dist.mean.float()
            rows.append(latents.transpose(0, 1).flatten(1).cpu())
    stacked = torch.cat(rows, dim=1)
    return stacked.mean(dim=1), stacked.std(dim=1)


def train(
    settings: Settings,
    out: Path,
    piece: Piece,
    device: torch.device,
    compiled: bool = False,
    init: Path | None = None,
) -> bool:
    """Train one piece and write `out/weights`; returns whether the training is complete.

    Args:
        settings: Sizes of all networks, and how the autoencoder is trained.
        out: Folder of the training.
        piece: The checkpoint and how long to train.
        device: Where to train.
        compiled: Compile encoder and decoder.
        init: Folder of a model whose autoencoder a new training starts from.

    Raises:
        FileExistsError: there is a checkpoint, and the piece is not to resume it.
        FileNotFoundError: `init` has no autoencoder.
        ValueError: the checkpoint is of other settings, or a weight is not finite in fp16.
    """
    built = network.parts(settings, settings.vae.seed)
    if init is not None:
        network.start_from(built.vae, init)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    learner = Learner(built.vae, settings.vae, device, dtype)
    if compiled:
        built.vae.encoder.compile(dynamic=False)
        built.vae.decoder.compile(dynamic=False)

    def loss(step: int) -> Tensor:
        return vae_loss(built.vae, settings.vae, step)

    complete = BudgetLoop(learner, loss, piece, {"settings": settings.as_dict()}).run()
    model = network.vae(settings.network)
    model.load_state_dict(learner.averaged())
    mean, std = latent_statistics(model.to(device).eval(), settings.vae)
    network.fold_statistics(model.cpu(), mean, std)
    print(f"latent mean {mean.tolist()} deviation {std.tolist()} folded in", flush=True)
    export(replace(built, vae=model), settings.noise, out)
    return complete


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m strop.models.sprites.train")
    parser.add_argument("--out", type=Path, required=True, help="folder of the training")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of this piece")
    parser.add_argument("--resume", action="store_true", help="continue a checkpoint")
    parser.add_argument("--settings", choices=tuple(NAMED), default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="run the networks eagerly")
    parser.add_argument("--init", type=Path, help="a model whose autoencoder to start from")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = _arguments(words)
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    piece = Piece(args.out / "vae.ckpt", args.minutes, args.resume)
    compiled = device.type == "cuda" and not args.no_compile
    complete = train(NAMED[args.settings], args.out, piece, device, compiled, args.init)
    print("training", "complete" if complete else "unfinished: run again with --resume", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Trains UNet and text encoder together on latents of freshly drawn pictures."""

from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn import functional

from strop.models.sprites import draw, network
from strop.models.sprites.learner import Learner
from strop.models.sprites.loop import Loop, Piece, bucket, generator
from strop.models.sprites.settings import Settings
from strop.models.sprites.specs import draw_training_specs, token_rows


class DiffusionLoss:
    """The v-prediction loss of one step, with captions dropped for classifier-free guidance."""

    def __init__(
        self, settings: Settings, built: network.Parts, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.settings = settings
        self.built = built
        self.device = device
        self.dtype = dtype
        self.tables = network.tables(built.tokens, device)
        noise = network.scheduler(settings.noise)
        self.signal: Tensor = noise.alphas_cumprod.to(device=device, dtype=torch.float32)
        empty = built.tokens("", padding="max_length", max_length=self.tables.length)
        self.empty = torch.tensor(empty.input_ids, device=device)
        self.render: Callable[..., Tensor] = draw.render
        nn.Module.to(built.vae, device=device, dtype=dtype)
        built.vae.eval().requires_grad_(False)

    def compile(self) -> None:
        """Compile the parts that carry the work; each picture size gets its own kernels."""
        self.render = torch.compile(draw.render, dynamic=False)
        self.built.vae.encoder.compile(dynamic=False)
        self.built.unet.compile(dynamic=False)

    @torch.no_grad()
    def batch(self, step: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return clean latents [n, 4, h/4, w/4] and token ids [n, length] of one step."""
        training = self.settings.diffusion
        width, height, count = bucket(step, training.batch)
        specs = draw_training_specs(count, source)
        geometry = draw.place(specs, width, height, source)
        pictures = self.render(specs, geometry, width, height) * 2 - 1
        pictures = pictures.to(self.dtype, memory_format=torch.channels_last)
        vae = self.built.vae
        moments = vae.quant_conv(vae.encoder(pictures)).float()
        ids = token_rows(specs, self.tables)
        drop = torch.rand(count, 1, device=self.device, generator=source)
        ids = torch.where(drop < training.caption_dropout, self.empty, ids)
        return moments.chunk(2, dim=1)[0] * vae.config.scaling_factor, ids

    def __call__(self, step: int) -> Tensor:
        """Return the loss of one step on fresh pictures."""
        source = generator(self.settings.diffusion.seed, step, self.device)
        latents, ids = self.batch(step, source)
        noise = torch.randn(latents.shape, device=self.device, generator=source)
        times = torch.randint(
            len(self.signal), (len(latents),), device=self.device, generator=source
        )
        keep = self.signal[times].sqrt()[:, None, None, None]
        lose = (1.0 - self.signal[times]).sqrt()[:, None, None, None]
        noisy = (keep * latents + lose * noise).to(self.dtype)
        noisy = noisy.contiguous(memory_format=torch.channels_last)
        text = self.built.text(ids)[0]
        guess = self.built.unet(noisy, times, text).sample.float()
        return functional.mse_loss(guess, keep * noise - lose * latents)


def train_diffusion(
    settings: Settings,
    out: Path,
    piece: Piece,
    device: torch.device,
    compiled: bool,
    init: Path | None = None,
) -> bool:
    """Train one piece against the autoencoder in `out/vae`; returns whether it is complete.

    A new training starts from the exported model in `init`, if given.
    """
    if not (out / "vae" / "config.json").is_file():
        raise FileNotFoundError(
            f"no trained autoencoder at {out / 'vae'}; run the 'vae' verb with the same --out first"
        )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    built = network.parts(settings, settings.diffusion.seed)
    if init is not None:
        network.start_from(built, init)
    built.vae.load_state_dict(AutoencoderKL.from_pretrained(out / "vae").state_dict())
    learner = Learner({"unet": built.unet, "text": built.text}, settings.diffusion, device, dtype)
    loss = DiffusionLoss(settings, built, device, dtype)
    if compiled:
        loss.compile()
    loop = Loop(learner, loss, piece, {"settings": settings.as_dict()})
    return loop.run()

"""Makes an untrained sprites-dit: `python -m strop.models.sprites.dit --out DIR`.

It is a Flux in miniature: joint attention over text and picture with normed queries and keys and
rotary embedding, and flow matching. Autoencoder and text encoder are those of the sprites model.
Flux reads a pooled text from a CLIP and the tokens from a T5; here the same CLIP gives both.
`strop train text-to-image --config examples/sprites-dit.yaml --model DIR` trains the transformer.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
)
from torch import nn

from strop.models.sprites import WEIGHTS, load_from, vocabulary
from strop.models.sprites.settings import DIT, DitSettings

_PATCH = 4
"""Latents that Flux packs into a token: two rows of two."""


def transformer(
    settings: DitSettings, latent_channels: int, text_width: int
) -> FluxTransformer2DModel:
    """Return an untrained transformer; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = FluxTransformer2DModel(
            in_channels=latent_channels * _PATCH,
            num_layers=settings.double_blocks,
            num_single_layers=settings.single_blocks,
            attention_head_dim=settings.head_dim,
            num_attention_heads=settings.heads,
            joint_attention_dim=text_width,
            pooled_projection_dim=text_width,
            axes_dims_rope=settings.rotary_dims,
        )
    _close_gates(model)
    return model


def _close_gates(model: FluxTransformer2DModel) -> None:
    """Let every block begin as the identity, and the output at zero (Peebles and Xie 2023)."""
    norms = [block.norm1 for block in model.transformer_blocks]
    norms += [block.norm1_context for block in model.transformer_blocks]
    norms += [block.norm for block in model.single_transformer_blocks]
    for layer in (model.norm_out.linear, model.proj_out, *(norm.linear for norm in norms)):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


def pipeline(settings: DitSettings, base: StableDiffusionPipeline) -> FluxPipeline:
    """Join an untrained transformer with the autoencoder and the text encoder of `base`."""
    channels, width = base.vae.config.latent_channels, base.text_encoder.config.hidden_size
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=base.vae,
        text_encoder=base.text_encoder,
        tokenizer=base.tokenizer,
        text_encoder_2=base.text_encoder,
        tokenizer_2=base.tokenizer,
        transformer=transformer(settings, channels, width).eval(),
    )


def write(settings: DitSettings, base: Path, out: Path) -> None:
    """Write an untrained model as a diffusers folder.

    Args:
        settings: Sizes of the transformer.
        base: Folder of the sprites model whose other parts it takes.
        out: The folder to write.

    Raises:
        FileExistsError: `out` holds a model already.
    """
    if (out / "model_index.json").exists():
        raise FileExistsError(f"{out} holds a model already; choose another --out")
    pipeline(settings, load_from(base)).save_pretrained(out, safe_serialization=True)
    for name in ("tokenizer", "tokenizer_2"):
        vocabulary.write(out / name)
    for file in out.rglob("*.*"):
        file.chmod(0o644)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m strop.models.sprites.dit")
    parser.add_argument("--out", type=Path, required=True, help="the diffusers folder to write")
    parser.add_argument("--base", type=Path, default=WEIGHTS, help="a sprites model's folder")
    args = parser.parse_args(words)
    write(DIT, args.base, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

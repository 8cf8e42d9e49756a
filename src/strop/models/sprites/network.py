"""Builds the parts of the sprites pipeline: a Stable Diffusion 1.5 in miniature.

The parts are diffusers' and transformers' own classes, so that the shipped folder is an ordinary
`StableDiffusionPipeline` and whatever reads one reads this one.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DPMSolverMultistepScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from safetensors.torch import load_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from strop.models.sprites import vocabulary
from strop.models.sprites.settings import NetworkSettings, NoiseSettings, Settings
from strop.models.sprites.specs import TokenTables, token_tables


def tokenizer(settings: NetworkSettings) -> CLIPTokenizer:
    """Return the tokenizer whose tokens are the words of the grammar."""
    with tempfile.TemporaryDirectory() as folder:
        return vocabulary.build(Path(folder), settings.text_length)


def tables(tokens: CLIPTokenizer, device: torch.device) -> TokenTables:
    """Return the tables that write captions as the rows `tokens` would produce, on `device`."""
    return token_tables(
        vocabulary.word_ids(tokens),
        begin=tokens.bos_token_id,
        end=tokens.eos_token_id,
        length=tokens.model_max_length,
        device=device,
    )


def vae(settings: NetworkSettings) -> AutoencoderKL:
    """Return an untrained autoencoder of factor 4; its levels halve the picture twice."""
    levels = len(settings.vae_channels)
    return AutoencoderKL(
        sample_size=96,
        block_out_channels=settings.vae_channels,
        layers_per_block=settings.vae_layers,
        latent_channels=settings.latent_channels,
        norm_num_groups=settings.vae_groups,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        # `fold_statistics` brings latents to zero mean and unit variance per channel.
        scaling_factor=1.0,
        shift_factor=0.0,  # Flux adds it without asking whether there is one
    )


def unet(settings: NetworkSettings) -> UNet2DConditionModel:
    """Return an untrained UNet with cross-attention on every level."""
    levels = len(settings.unet_channels)
    return UNet2DConditionModel(
        sample_size=24,
        in_channels=settings.latent_channels,
        out_channels=settings.latent_channels,
        block_out_channels=settings.unet_channels,
        layers_per_block=settings.unet_layers,
        down_block_types=("CrossAttnDownBlock2D",) * levels,
        up_block_types=("CrossAttnUpBlock2D",) * levels,
        # diffusers reads this as the number of heads.
        attention_head_dim=settings.unet_heads,
        cross_attention_dim=settings.text_width,
        norm_num_groups=settings.unet_groups,
    )


def text_encoder(settings: NetworkSettings, tokens: CLIPTokenizer) -> CLIPTextModel:
    """Return an untrained CLIP text model over the vocabulary of `tokens`."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokens),
            hidden_size=settings.text_width,
            intermediate_size=settings.text_width * 4,
            projection_dim=settings.text_width,
            num_hidden_layers=settings.text_layers,
            num_attention_heads=settings.text_heads,
            max_position_embeddings=settings.text_length,
            bos_token_id=tokens.bos_token_id,
            eos_token_id=tokens.eos_token_id,
            pad_token_id=tokens.pad_token_id,
        )
    )


def scheduler(settings: NoiseSettings) -> DPMSolverMultistepScheduler:
    """Return the second-order DPM-Solver++ (Lu et al. 2022) over the training noise schedule."""
    return DPMSolverMultistepScheduler(
        num_train_timesteps=settings.steps,
        beta_start=settings.beta_start,
        beta_end=settings.beta_end,
        beta_schedule=settings.beta_schedule,
        prediction_type=settings.prediction_type,
        timestep_spacing=settings.timestep_spacing,
        rescale_betas_zero_snr=True,
        algorithm_type="dpmsolver++",
        solver_order=2,
        # Unused by trailing spacing; diffusers warns about any other value.
        steps_offset=1,
    )


def fold_statistics(model: AutoencoderKL, mean: torch.Tensor, std: torch.Tensor) -> None:
    """Rewrite `model` in place so that its latents have zero mean and unit deviation.

    The 1x1 convolutions on both sides of the latents take the shift and the scale, which leaves
    `scaling_factor` at 1; the pictures that the model decodes stay the same.

    Args:
        model: The autoencoder.
        mean: Mean of the latents per channel [channels].
        std: Standard deviation of the latents per channel [channels].
    """
    count = len(mean)
    with torch.no_grad():
        enter, leave = model.quant_conv, model.post_quant_conv
        enter.weight[:count] /= std[:, None, None, None]
        enter.bias[:count] = (enter.bias[:count] - mean) / std
        enter.bias[count:] -= 2 * std.log()
        leave.bias += leave.weight[:, :, 0, 0] @ mean
        leave.weight *= std[None, :, None, None]


@dataclass(frozen=True)
class Parts:
    """Hold the trainable parts of the pipeline and its tokenizer."""

    tokens: CLIPTokenizer
    text: CLIPTextModel
    unet: UNet2DConditionModel
    vae: AutoencoderKL


def parts(settings: Settings, seed: int = 0) -> Parts:
    """Build all parts with weights drawn from `seed`; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens = tokenizer(settings.network)
        return Parts(
            tokens=tokens,
            text=text_encoder(settings.network, tokens),
            unet=unet(settings.network),
            vae=vae(settings.network),
        )


def start_from(model: AutoencoderKL, folder: Path) -> None:
    """Replace the random weights of `model` by those of the autoencoder in a diffusers folder.

    Raises:
        FileNotFoundError: `folder` has no autoencoder.
    """
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; --init takes a folder that has been trained")
    model.load_state_dict({key: value.float() for key, value in load_file(file).items()})


def pipeline(built: Parts, noise: NoiseSettings) -> StableDiffusionPipeline:
    """Join the parts to a pipeline without safety checker."""
    extra: dict[str, Any] = {"safety_checker": None, "feature_extractor": None}
    return StableDiffusionPipeline(
        vae=built.vae.eval(),
        text_encoder=built.text.eval(),
        tokenizer=built.tokens,
        unet=built.unet.eval(),
        scheduler=scheduler(noise),
        requires_safety_checker=False,
        **extra,
    )

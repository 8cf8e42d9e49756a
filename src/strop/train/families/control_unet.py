"""Let a ControlNet steer a UNet (https://arxiv.org/abs/2302.05543)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from strop.train.families.control import Control, Encoding, check_shared, refuse_layers
from strop.train.families.family import factor_of

if TYPE_CHECKING:
    from strop.train.settings import Settings

_WIDTHS = (16, 32, 96, 256)  # of the layers that read the conditioning picture, by diffusers
_PIXELS = "pixels per latent"


class ControlledUNet(nn.Module):
    """Let a ControlNet steer a UNet: what it makes of a conditioning picture is added to what the
    UNet's second half gets from the first."""

    def __init__(self, unet: nn.Module, controlnet: nn.Module) -> None:
        super().__init__()
        self.unet, self.controlnet = unet, controlnet

    def forward(
        self, sample: Tensor, timestep: Tensor, controlnet_cond: Tensor, **given: Any
    ) -> tuple[Tensor, ...]:
        """Return what the UNet gives for noisy latents [rows, channels, height, width].

        ``controlnet_cond`` is [rows, 3, height, width] of pixels from 0 to 1; ``given`` are the
        other arguments of both networks.
        """
        added, middle = self.controlnet(sample, timestep, controlnet_cond=controlnet_cond, **given)
        found: tuple[Tensor, ...] = self.unet(
            sample,
            timestep,
            down_block_additional_residuals=tuple(added),
            mid_block_additional_residual=middle,
            **given,
        )
        return found


class ControlOfUNets(Control):
    """Describe ControlNets of Stable Diffusion 1 and 2, which are shown pixels."""

    pipeline = "StableDiffusionControlNetPipeline"
    kind = "ControlNetModel"
    picture = "image"
    shared = (
        "in_channels",
        "block_out_channels",
        "down_block_types",
        "layers_per_block",
        "cross_attention_dim",
        "addition_embed_type",
        "projection_class_embeddings_input_dim",
    )

    def begun(self, settings: Settings, pipe: Any) -> nn.Module:
        """Return a copy of the UNet's first half and new layers that read the picture."""
        import diffusers

        refuse_layers(settings, ("num_double_layers", "num_single_layers"), "UNets")
        halvings = factor_of(pipe.components).bit_length() - 1
        widths = (*_WIDTHS, *_WIDTHS[-1:] * halvings)[: halvings + 1]
        made: nn.Module = diffusers.ControlNetModel.from_unet(
            pipe.unet, conditioning_embedding_out_channels=widths
        )
        return made

    def check(self, folder: Path, config: Mapping[str, Any], pipe: Any) -> None:
        pixels = 2 ** (len(config["conditioning_embedding_out_channels"]) - 1)
        ours = {name: pipe.unet.config.get(name) for name in self.shared}
        ours[_PIXELS] = factor_of(pipe.components)
        check_shared(folder, {**config, _PIXELS: pixels}, ours, "UNet")

    def shown(self, net: Any, pixels: Tensor, encoded: Encoding) -> Tensor:
        return pixels

    def joined(self, denoiser: nn.Module, net: nn.Module) -> nn.Module:
        return ControlledUNet(denoiser, net)


class ControlOfLargeUNets(ControlOfUNets):
    """Describe ControlNets of SDXL."""

    pipeline = "StableDiffusionXLControlNetPipeline"

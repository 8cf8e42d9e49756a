"""Steer the transformer of Stable Diffusion 3 and 3.5 by a ControlNet of its own blocks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from strop.errors import OptionError, UnsupportedError
from strop.train.families.control import (
    Control,
    Encoding,
    check_shared,
    copy_first,
    counted_blocks,
    known_to,
    refuse_layers,
)

if TYPE_CHECKING:
    from strop.train.settings import Settings

_USUAL = 12  # blocks, by diffusers
_COPIED = ("pos_embed", "time_text_embed", "context_embedder")


class ControlledSD3(nn.Module):
    """Let a ControlNet steer a transformer of Stable Diffusion 3: what each of its blocks gives is
    added behind a share of the transformer's."""

    def __init__(self, transformer: nn.Module, controlnet: nn.Module) -> None:
        super().__init__()
        self.transformer, self.controlnet = transformer, controlnet
        self._reads_prompts = not _is_blind(controlnet)

    def forward(self, controlnet_cond: Tensor, **given: Any) -> tuple[Tensor, ...]:
        """Return the transformer's answer. ``controlnet_cond`` are latents of conditioning
        pictures, [rows, channels, height, width]; ``given`` are the arguments of both networks."""
        own = dict(given)
        if not self._reads_prompts:
            own["pooled_projections"] = torch.zeros_like(given["pooled_projections"])
        (added,) = self.controlnet(controlnet_cond=controlnet_cond, **own)
        found: tuple[Tensor, ...] = self.transformer(
            block_controlnet_hidden_states=list(added), **given
        )
        return found


class ControlOfSD3(Control):
    """Describe ControlNets that are shown latents.

    Those whose settings say ``force_zeros_for_pooled_projection`` are drawn with by diffusers
    without the vector of the prompt and without the autoencoder's shift, so they are trained
    without both; new ones read both.
    """

    pipeline = "StableDiffusion3ControlNetPipeline"
    kind = "SD3ControlNetModel"
    shared = (
        "patch_size",
        "in_channels",
        "attention_head_dim",
        "num_attention_heads",
        "joint_attention_dim",
        "caption_projection_dim",
        "pooled_projection_dim",
        "pos_embed_max_size",
        "qk_norm",
    )

    def begun(self, settings: Settings, pipe: Any) -> nn.Module:
        import diffusers

        refuse_layers(settings, ("num_single_layers",), "Stable Diffusion 3")
        transformer = pipe.transformer
        blocks = [one for one in transformer.transformer_blocks if not one.context_pre_only]
        count = counted_blocks(
            "num_double_layers",
            settings.num_double_layers,
            _USUAL,
            len(blocks),
            functools.partial(_read, transformer),
        )
        if not count:
            raise OptionError(
                "a ControlNet of no block steers nothing: give --num_double_layers of at least 1"
                if blocks
                else "the transformer has no block that a ControlNet may start from: all end in "
                "pictures alone"
            )
        kind = diffusers.SD3ControlNetModel
        config = known_to(
            kind,
            transformer.config,
            num_layers=count,
            extra_conditioning_channels=0,
            force_zeros_for_pooled_projection=False,
        )
        made: Any = kind(**config)
        for name in _COPIED:
            getattr(made, name).load_state_dict(getattr(transformer, name).state_dict())
        copy_first(made.transformer_blocks, blocks)
        net: nn.Module = made
        return net

    def check(self, folder: Path, config: Mapping[str, Any], pipe: Any) -> None:
        if not config.get("use_pos_embed", True) or config.get("joint_attention_dim") is None:
            raise UnsupportedError(
                f"{folder} holds a ControlNet that reads no texts and shares the transformer's "
                "first layer (use_pos_embed, joint_attention_dim), which is not trained; give "
                "another one, or none"
            )
        if config.get("extra_conditioning_channels"):
            raise UnsupportedError(
                f"{folder} holds a ControlNet that reads more than a picture "
                f"({config['extra_conditioning_channels']} extra_conditioning_channels), as for "
                "inpainting, which is not trained; give another one, or none"
            )
        own = pipe.transformer.config
        check_shared(folder, config, {name: own.get(name) for name in self.shared}, "transformer")

    def shown(self, net: Any, pixels: Tensor, encoded: Encoding) -> Tensor:
        return encoded(2.0 * pixels - 1.0, not _is_blind(net))

    def joined(self, denoiser: nn.Module, net: nn.Module) -> nn.Module:
        return ControlledSD3(denoiser, net)


def _read(transformer: Any, count: int) -> int:
    """Return how many of so many blocks' answers the transformer adds, in shares of all of its own
    blocks: behind those that end in pictures alone it adds none."""
    blocks = transformer.transformer_blocks
    places = [place for place, block in enumerate(blocks) if not block.context_pre_only]
    return len({int(place / (len(blocks) / count)) for place in places}) if count else 0


def _is_blind(net: Any) -> bool:
    """Tell whether diffusers draws with it without the prompt's vector and without a shift."""
    return bool(net.config.force_zeros_for_pooled_projection)

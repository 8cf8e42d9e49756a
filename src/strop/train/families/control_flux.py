"""Steer the transformer of Flux.1 by a ControlNet of its own blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from strop.errors import OptionError, UnsupportedError
from strop.train.families.control import (
    Control,
    Encoding,
    check_shared,
    copy_first,
    counted_blocks,
    known_to,
)
from strop.train.families.family import factor_of
from strop.train.families.tokens import PATCH, tokens_of

if TYPE_CHECKING:
    from strop.train.settings import Settings

_USUAL = 4  # blocks of each kind, by diffusers' script
_PIXELS = 8  # on a side of a latent, of the layers that read pixels
_COPIED = ("time_text_embed", "context_embedder", "x_embedder")


class ControlledFlux(nn.Module):
    """Let a ControlNet steer a transformer of Flux: what each of its blocks gives is added behind a
    share of the transformer's of the same kind."""

    def __init__(self, transformer: nn.Module, controlnet: nn.Module) -> None:
        super().__init__()
        self.transformer, self.controlnet = transformer, controlnet
        net: Any = controlnet
        self._reads_guidance = bool(net.config.guidance_embeds)
        self._reads_pixels = _reads_pixels(net)

    def forward(self, controlnet_cond: Tensor, **given: Any) -> tuple[Tensor, ...]:
        """Return the transformer's answer. ``controlnet_cond`` are tokens of conditioning pictures,
        or pixels where the ControlNet has layers for these; ``given`` are the arguments of both
        networks."""
        own = dict(given)
        if not self._reads_guidance:
            own.pop("guidance", None)
        double, single = self.controlnet(controlnet_cond=controlnet_cond, **own)
        found: tuple[Tensor, ...] = self.transformer(
            controlnet_block_samples=double,
            controlnet_single_block_samples=single,
            controlnet_blocks_repeat=self._reads_pixels,
            **given,
        )
        return found


class ControlOfFlux(Control):
    """Describe ControlNets that are shown latents as tokens, or pixels if they have layers that
    read them (``conditioning_embedding_channels``)."""

    pipeline = "FluxControlNetPipeline"
    kind = "FluxControlNetModel"
    shared = (
        "in_channels",
        "attention_head_dim",
        "num_attention_heads",
        "joint_attention_dim",
        "pooled_projection_dim",
        "axes_dims_rope",
    )

    def begun(self, settings: Settings, pipe: Any) -> nn.Module:
        import diffusers

        transformer = pipe.transformer
        double, single = transformer.transformer_blocks, transformer.single_transformer_blocks
        counts = [
            counted_blocks(
                name,
                getattr(settings, name),
                _USUAL,
                len(blocks),
                functools.partial(_read, len(blocks)),
            )
            for name, blocks in (("num_double_layers", double), ("num_single_layers", single))
        ]
        if not any(counts):
            raise OptionError(
                "a ControlNet of no block steers nothing: give --num_double_layers or "
                "--num_single_layers of at least 1"
            )
        kind = diffusers.FluxControlNetModel
        config = known_to(
            kind, transformer.config, num_layers=counts[0], num_single_layers=counts[1]
        )
        made: Any = kind(**config)
        for name in _COPIED:
            getattr(made, name).load_state_dict(getattr(transformer, name).state_dict())
        copy_first(made.transformer_blocks, double)
        copy_first(made.single_transformer_blocks, single)
        net: nn.Module = made
        return net

    def check(self, folder: Path, config: Mapping[str, Any], pipe: Any) -> None:
        if config.get("num_mode") is not None:
            raise UnsupportedError(
                f"{folder} holds a ControlNet for several kinds of pictures "
                f"(num_mode {config['num_mode']}), which is not trained; give one for a single "
                "kind, or none"
            )
        own = pipe.transformer.config
        if config.get("conditioning_embedding_channels") is not None:
            check_shared(
                folder,
                {**config, "pixels per latent": _PIXELS},
                {"pixels per latent": factor_of(pipe.components), "patch_size": PATCH},
                "model",
            )
        if config.get("guidance_embeds") and not own.guidance_embeds:
            raise OptionError(
                f"the ControlNet in {folder} reads the scale of guidance (guidance_embeds), and "
                "the transformer does not; give one of this model's, or none"
            )
        check_shared(folder, config, {name: own.get(name) for name in self.shared}, "transformer")

    def shown(self, net: Any, pixels: Tensor, encoded: Encoding) -> Tensor:
        pixels = 2.0 * pixels - 1.0
        return pixels if _reads_pixels(net) else tokens_of(encoded(pixels, True))

    def joined(self, denoiser: nn.Module, net: nn.Module) -> nn.Module:
        return ControlledFlux(denoiser, net)


def _read(have: int, count: int) -> int:
    """Return how many of so many blocks' answers a transformer with as many blocks adds: each
    behind a share that is rounded up."""
    return math.ceil(have / math.ceil(have / count)) if count else 0


def _reads_pixels(net: Any) -> bool:
    return net.config.conditioning_embedding_channels is not None

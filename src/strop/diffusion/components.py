"""What diffusers components need at their door."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strop.errors import UnsupportedError
from strop.frontend.capture import TensorSpec
from strop.runtime.dispatch import Adapter
from strop.runtime.signature import Shapes, Skeleton, tensor_numbers

# Arguments that a denoise loop passes unchanged from step to step
STEADY = ("encoder_hidden_states", "added_cond_kwargs", "class_labels", "timestep_cond",
          "attention_mask", "encoder_attention_mask")  # fmt: skip


class UNetAdapter(Adapter):
    """UNet2DConditionModel: one graph for every batch, size and prompt length.

    Latent height and width are ``factor * h`` and ``factor * w`` with the UNet's own
    down-sampling factor, so that every size in the graph is a monomial. Sizes off that grid need
    the interpolations that diffusers then does, and a ragged graph.
    """

    def __init__(self, unet: nn.Module) -> None:
        parameters = list(inspect.signature(type(unet).forward).parameters.values())[1:]
        self._names = tuple(p.name for p in parameters)
        self._required = {p.name for p in parameters if p.default is inspect.Parameter.empty}
        config: Any = unet.config
        self._has_classes = bool(config.get("num_class_embeds") or config.get("class_embed_type"))
        self.factor = 2 ** (len(config.block_out_channels) - 1)

    def normalise(self, args: tuple[Any, ...], kwargs: dict[str, Any]
                  ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
        """Timesteps as a float vector (B,): numbers and 0-d tensors would be other graphs."""
        named = dict(zip(self._names, args, strict=False)) | kwargs
        sample, timestep = named.get("sample"), named.get("timestep")
        if len(named) < len(args) + len(kwargs) or not isinstance(sample, Tensor):
            return args, kwargs  # eager says what is wrong
        if not isinstance(timestep, Tensor | int | float):
            return args, kwargs
        if not isinstance(timestep, Tensor):
            timestep = torch.tensor(timestep, dtype=torch.float32)
        if timestep.device != sample.device:
            timestep = timestep.to(sample.device)
        if timestep.dim() == 0 or timestep.shape == (1,):
            timestep = timestep.expand(sample.shape[0])
        named["timestep"] = timestep
        return (), {k: v for k, v in named.items() if v is not None or k in self._required}

    def steady(self, skeleton: Skeleton) -> tuple[int, ...]:
        _, _, (_, *named) = skeleton
        return tuple(n for name, part in named if name in STEADY for n in tensor_numbers(part))

    def timestep(self, skeleton: Skeleton) -> int | None:
        _, _, (_, *named) = skeleton
        found = [n for name, part in named if name == "timestep" for n in tensor_numbers(part)]
        return found[0] if len(found) == 1 else None

    def shapes(self, tensors: Sequence[Tensor]) -> Shapes:
        images = [t for t in tensors if t.dim() == 4]
        if not images:
            raise UnsupportedError("a UNet is called without a tensor of four dims")
        sample = max(images, key=lambda t: t.shape[-1] * t.shape[-2])
        batch, _, height, width = sample.shape
        factor = self.factor
        is_ragged = height % factor != 0 or width % factor != 0
        hints = {"b": max(batch, 2)}
        if is_ragged:
            hints |= {"H": height, "W": width}
            spatial = {height: "H", width: "W"}
        else:
            hints |= {"h": height // factor, "w": width // factor}
        specs = []
        for number, t in enumerate(tensors):
            sizes = [str(s) for s in t.shape]
            sizes[0] = "b" if t.shape[0] == batch else sizes[0]
            if t.dim() == 4 and is_ragged:
                sizes[2], sizes[3] = spatial.get(t.shape[2], sizes[2]), spatial.get(
                    t.shape[3], sizes[3])  # fmt: skip
                if t is sample:
                    sizes[2:] = ["H", "W"]
            elif t.dim() == 4:
                sizes[2] = f"{t.shape[2] * factor // height}*h"
                sizes[3] = f"{t.shape[3] * factor // width}*w"
            elif t.dim() == 3:
                sizes[1] = f"s{number}"
                hints[sizes[1]] = t.shape[1]
            is_timestep = t.dim() == 1 and not self._has_classes
            dtype = torch.float32 if is_timestep else t.dtype  # numbers up to 1000, of any type
            specs.append(TensorSpec(tuple(sizes), dtype, t.device))
        return Shapes(tuple(specs), hints, is_ragged)


def adapter_for(module: nn.Module) -> Adapter:
    """By class name, so that diffusers need not be imported."""
    names = {kind.__name__ for kind in type(module).__mro__}
    return UNetAdapter(module) if "UNet2DConditionModel" in names else Adapter()

"""Say what diffusers components need at their door."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strop.dispatch.adapter import Adapter
from strop.dispatch.signature import Shapes, Skeleton, tensor_numbers
from strop.dispatch.step_cache.structures import STEP
from strop.errors import UnsupportedError
from strop.ir.tensor_spec import TensorSpec

# Arguments that a denoise loop passes unchanged from step to step
STEADY = (
    "encoder_hidden_states",
    "added_cond_kwargs",
    "class_labels",
    "timestep_cond",
    "attention_mask",
    "encoder_attention_mask",
    "encoder_hidden_states_image",
    "encoder_hidden_states_mask",
    "pooled_projections",
    "guidance",
    "img_ids",
    "txt_ids",
)
# Arguments whose height and width are the latent's, or that many times as large. Others of four
# dims are none: the embeddings of IP-Adapter-Plus are (batch, pictures, tokens, features).
SPATIAL = frozenset(
    {
        "sample",
        "controlnet_cond",
        "down_block_additional_residuals",
        "mid_block_additional_residual",
        "down_intrablock_additional_residuals",
        STEP,
    }
)


class DenoiserAdapter(Adapter):
    """Say which arguments of a network in a denoise loop stay the same, and which is the timestep,
    by the names that diffusers gives them: transformers compute their modulations from it, and
    keys and values of the prompt."""

    def steady(self, skeleton: Skeleton) -> tuple[int, ...]:
        parts = [part for name, part in _named(skeleton) if name in STEADY]
        return tuple(n for part in parts for n in tensor_numbers(part))

    def timestep(self, skeleton: Skeleton) -> int | None:
        parts = [part for name, part in _named(skeleton) if name == "timestep"]
        found = [n for part in parts for n in tensor_numbers(part)]
        return found[0] if len(found) == 1 else None


class UNetAdapter(DenoiserAdapter):
    """Adapt UNets with a prompt, and ControlNets: one graph for every batch, size and prompt
    length.

    Latent height and width are ``factor * h`` and ``factor * w`` with the UNet's own
    down-sampling factor, so that every size in the graph is a monomial. Sizes off that grid need
    the interpolations that diffusers then does, and a ragged graph.
    """

    def __init__(self, unet: nn.Module) -> None:
        parameters = list(inspect.signature(type(unet).forward).parameters.values())[1:]
        self._names = tuple(p.name for p in parameters)
        self._required = {p.name for p in parameters if p.default is inspect.Parameter.empty}
        several = "MultiControlNetModel" in _class_names(unet)
        config: Any = unet.nets[0].config if several else unet.config  # type: ignore[index,union-attr]
        self._has_classes = bool(config.get("num_class_embeds") or config.get("class_embed_type"))
        self.factor = 2 ** (len(config.block_out_channels) - 1)

    def normalise(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make timesteps a float vector (B,): numbers and 0-d tensors would need other graphs."""
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
        kept = sorted(k for k, v in named.items() if v is not None or k in self._required)
        return (), {name: named[name] for name in kept}  # one graph for whatever order a caller has

    def shapes(self, tensors: Sequence[Tensor], skeleton: Skeleton = ()) -> Shapes:
        spatial = self._spatial(tensors, skeleton)
        if not spatial:
            raise UnsupportedError("a UNet is called without a tensor of four dims")
        sample = tensors[spatial[0]]
        batch, _, height, width = sample.shape
        factor = self.factor
        is_ragged = height % factor != 0 or width % factor != 0
        hints = {"b": max(batch, 2)}
        if is_ragged:
            hints |= {"H": height, "W": width}
            names = {height: "H", width: "W"}
        else:
            # as of a batch of 1: what holds of larger sizes holds of 1
            hints |= {"h": max(height // factor, 2), "w": max(width // factor, 2)}
        specs, pictures = [], self._pictures(tensors, skeleton)
        for number, t in enumerate(tensors):
            sizes = [str(s) for s in t.shape]
            sizes[0] = "b" if t.shape[0] == batch else sizes[0]
            if number == spatial[0] and is_ragged:
                sizes[2:] = ["H", "W"]
            elif number in spatial and is_ragged:
                sizes[2:] = [names.get(size, str(size)) for size in t.shape[2:]]
            elif number in spatial:
                sizes[2] = f"{t.shape[2] * factor // height}*h"
                sizes[3] = f"{t.shape[3] * factor // width}*w"
            elif t.dim() == 3 or number in pictures:
                sizes[1] = f"s{number}"
                hints[sizes[1]] = t.shape[1]
            is_timestep = t.dim() == 1 and not self._has_classes
            dtype = torch.float32 if is_timestep else t.dtype  # numbers up to 1000, of any type
            specs.append(TensorSpec(tuple(sizes), dtype, t.device))
        return Shapes(tuple(specs), hints, is_ragged)

    def _pictures(self, tensors: Sequence[Tensor], skeleton: Skeleton) -> set[int]:
        """Return the numbers of the tensors that are the embeddings of pictures, of any number of
        them: (batch, pictures, tokens, features)."""
        parts = [part for name, part in _named(skeleton) if name == "added_cond_kwargs"]
        return {n for part in parts for n in tensor_numbers(part) if tensors[n].dim() == 4}

    def _spatial(self, tensors: Sequence[Tensor], skeleton: Skeleton) -> tuple[int, ...]:
        """Return the numbers of the tensors in SPATIAL, the latent's first. In a call without
        names, which no pipeline makes, they are all of four dims, and the largest is the latent."""
        named = {name: tuple(tensor_numbers(part)) for name, part in _named(skeleton)}
        images = [n for n, t in enumerate(tensors) if t.dim() == 4]
        if "sample" not in named:
            areas = {n: tensors[n].shape[2] * tensors[n].shape[3] for n in images}
            return tuple(sorted(images, key=lambda n: -areas[n]))
        first = named.pop("sample")
        others = [n for name, found in named.items() if name in SPATIAL for n in found]
        return tuple(n for n in (*first, *others) if n in images)


def _named(skeleton: Skeleton) -> Sequence[tuple[str, Skeleton]]:
    """Return the arguments of a call that have names."""
    return skeleton[2][1:] if skeleton else ()


def _class_names(module: nn.Module) -> set[str]:
    """Return the class names, so that diffusers need not be imported."""
    return {kind.__name__ for kind in type(module).__mro__}


_OF_UNETS = {"UNet2DConditionModel", "ControlNetModel", "MultiControlNetModel"}


def adapter_for(module: nn.Module) -> Adapter:
    if _class_names(module) & _OF_UNETS:
        return UNetAdapter(module)
    names = inspect.signature(type(module).forward).parameters
    return DenoiserAdapter() if "timestep" in names else Adapter()

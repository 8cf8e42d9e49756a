"""Compare what a file with an adapter holds with the model that is to take it.

Every function returns what does not fit, or None.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from strop.frontend.module_parts import named_parts
from strop.wording import counted

Tensors = Mapping[str, Tensor]
_FACTOR = re.compile(r"(?P<path>.+)\.(?P<part>lora_A|lora_B)\.weight")
_PATH = re.compile(r"\.(lora_|lokr_|hada_|oft_|dora_)")
_MADE = "; it was made for another model"
# The width of the prompt that a model's cross-attention reads tells the architecture.
_CONTEXTS = {768: "Stable Diffusion 1.x", 1024: "Stable Diffusion 2.x", 2048: "SDXL"}


@dataclass(frozen=True, slots=True)
class Misfit:
    """Name a key of a file, and say in the rest of a sentence why it does not fit."""

    key: str
    why: str

    def __str__(self) -> str:
        return f"{self.key} {self.why}"


@dataclass
class FactorPair:
    """Hold the two factors of one layer."""

    factors: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


def lora_misfit(model: nn.Module, state: Tensors, name: str) -> Misfit | None:
    """Compare a LoRA, with keys as peft has them, with the layers of a model of this name."""
    layers = dict(named_parts(model))
    paths = [(key, _PATH.split(key, maxsplit=1)[0]) for key in state if _PATH.search(key)]
    absent = [key for key, path in paths if path not in layers]
    if paths and len(absent) == len(paths):
        why = (
            f"adapts a layer that the {name} ({type(model).__name__}) does not have, and so do all"
            f" {counted(len(absent), 'key')} of the file for it{_MADE}"
        )
        return Misfit(absent[0], why)
    pairs = _pairs(state).items()
    wrong = [m for path, pair in pairs if (m := _wrong(layers, path, pair)) is not None]
    if not wrong:
        return None
    more = f"; so it is with {counted(len(wrong), 'layer')} of the file" if len(wrong) > 1 else ""
    return Misfit(wrong[0].key, f"{wrong[0].why}{more}{_other_architecture(layers, state)}")


def _pairs(state: Tensors) -> dict[str, FactorPair]:
    found: dict[str, FactorPair] = {}
    for key, tensor in state.items():
        if match := _FACTOR.fullmatch(key):
            pair = found.setdefault(match["path"], FactorPair())
            pair.factors[match["part"]] = tensor
            pair.keys[match["part"]] = key
    return found


def _wrong(layers: Mapping[str, nn.Module], path: str, pair: FactorPair) -> Misfit | None:
    if path not in layers:
        return None  # diffusers warns of it, and loads the rest
    for part, other in (("lora_A", "lora_B"), ("lora_B", "lora_A")):
        if part not in pair.factors:
            return Misfit(pair.keys[other], f"has no {part} beside it; the file is not whole")
    layer = layers[path]
    rank, sizes = pair.factors["lora_A"].shape[:1], _sizes(getattr(layer, "base_layer", layer))
    if not rank:
        return Misfit(pair.keys["lora_A"], "is a single number, and no matrix")
    if sizes is None:
        return None
    inputs, outputs, kernel = sizes
    wanted = {
        "lora_A": (*rank, inputs, *kernel),
        "lora_B": (outputs, *rank, *(1 for _ in kernel)),
    }
    for part, shape in wanted.items():
        got = tuple(pair.factors[part].shape)
        if got != shape:
            why = (
                f"has the shape {got}; at rank {rank[0]}, the layer, of {inputs} inputs and"
                f" {outputs} outputs, takes {shape}"
            )
            return Misfit(pair.keys[part], why)
    return None


def _sizes(layer: Any) -> tuple[int, int, tuple[int, ...]] | None:
    """Return inputs, outputs and kernel of a layer, if these alone tell the shapes of factors."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features, ()
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.groups == 1:
        return layer.in_channels, layer.out_channels, tuple(layer.kernel_size)
    return None


def _other_architecture(layers: Mapping[str, nn.Module], state: Tensors) -> str:
    """Name the architectures of file and model, where cross-attention tells both."""
    for key, tensor in state.items():
        path = key.removesuffix(".lora_A.weight")
        if path != key and path.endswith("attn2.to_k") and path in layers and tensor.ndim:
            layer: Any = layers[path]
            made, own = (_CONTEXTS.get(n) for n in (tensor.shape[1], layer.in_features))
            if made and own and made != own:
                return f". The file is for {made}, and the model is {own}"
    return ""


def prompt_misfit(encoder: Any, tensors: Mapping[str, Any]) -> Misfit | None:
    """Compare the vectors of a textual inversion with a text encoder's."""
    width = encoder.get_input_embeddings().weight.shape[-1]
    held = tensors.get("string_to_param", tensors)
    for key, vectors in held.items() if isinstance(held, Mapping) else ():
        if isinstance(vectors, Tensor) and (not vectors.ndim or vectors.shape[-1] != width):
            why = (
                f"has the shape {tuple(vectors.shape)}; the text encoder"
                f" ({type(encoder).__name__}) takes vectors of {width} values{_MADE}"
            )
            return Misfit(key, why)
    return None


def ip_adapter_misfit(unet: Any, state: Mapping[str, Any]) -> Misfit | None:
    """Compare the weights of an IP-Adapter with a UNet's cross-attention."""
    for part in ("image_proj", "ip_adapter"):
        if not state.get(part):
            return Misfit(f"{part}.*", "is missing: every IP-Adapter has keys that begin so")
    wanted, held = dict(_ip_shapes(unet)), state["ip_adapter"]
    for key, shape in wanted.items():
        name = f"ip_adapter.{key}"
        if key not in held:
            count = counted(sum("to_k_ip" in k for k in held), "layer")
            why = (
                f"is missing: the file has weights for {count} of cross-attention, and the"
                f" model has {len(wanted) // 2}{_MADE}"
            )
            return Misfit(name, why)
        if (got := tuple(held[key].shape)) != shape:
            return Misfit(name, f"has the shape {got}; the model takes {shape}{_MADE}")
    return None


def _ip_shapes(unet: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the keys that diffusers asks an IP-Adapter for, with their shapes."""
    number = 1
    for name in unet.attn_processors:
        if name.endswith("attn1.processor") or "motion_modules" in name:
            continue
        attention = unet.get_submodule(name.removesuffix(".processor"))
        shape = (attention.inner_dim, unet.config.cross_attention_dim)
        for part in ("to_k_ip", "to_v_ip"):
            yield f"{number}.{part}.weight", shape
        number += 2

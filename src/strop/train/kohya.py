"""Name adapters as kohya's scripts and LyCORIS do, which ComfyUI and others read too."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from strop.train.families.kohya_layers import KohyaPlace
from strop.train.model import DiffusionModel
from strop.train.settings import Settings

# peft's name of a factor -> kohya's; LoHa and LoKr have the same in both.
_FACTORS = {
    "lora_A.weight": "lora_down.weight",
    "lora_B.weight": "lora_up.weight",
    "lora_magnitude_vector": "dora_scale",
    "lora_magnitude_vector.weight": "dora_scale",
}
# Factors [rows of the weight, rank].
_ACROSS = ("lora_up.weight", "hada_w1_a", "hada_w2_a")
_LENGTHS = "dora_scale"
_LOST = "text_model."  # left out of names of modules by transformers since kohya's format was made
_APART = "lycoris_"  # begins LyCORIS's names of layers of diffusers, which ComfyUI reads

Factors = dict[str, Tensor]
"""Holds the tensors of a layer's adapter, by kohya's names."""


def tensors(
    model: DiffusionModel, part: str, weights: dict[str, Tensor], alpha: float, rank: int
) -> dict[str, Tensor]:
    """Return kohya's names, with the alpha that was trained with.

    Adapters of layers that are one layer there become one of as many times the rank, with the same
    products. The alpha grows with the rank, since readers divide the one by the other.
    """
    family = model.family
    layers = _layers(weights, alpha / rank)
    places = {path: family.kohya_place(model.modules, part, path) for path in layers}
    apart = _apart(places, layers)
    found: dict[str, Tensor] = {}
    for path, factors in layers.items():
        place, base, times = places[path], _base(model, part, places[path].path), 1
        if path in apart:
            base = _APART + path.replace(".", "_")
        elif place.rows_of:
            if f"{base}.alpha" in found:
                continue
            times = len(place.rows_of)
            factors = _joined(place.rows_of, layers, model.modules[part])
        elif place.swaps:
            factors = {name: _swapped(name, tensor) for name, tensor in factors.items()}
        found |= {f"{base}.{name}": tensor for name, tensor in factors.items()}
        found[f"{base}.alpha"] = torch.tensor(alpha * times, dtype=torch.float32)
    return found


def _layers(weights: Mapping[str, Tensor], scale: float) -> dict[str, Factors]:
    """Return the factors of each layer by its path in diffusers, as LyCORIS reads them."""
    layers: dict[str, Factors] = {}
    for key, tensor in weights.items():
        path, name = _split(key)
        if name == _LENGTHS:  # one for each row of the weight, in as many dims
            tensor = tensor[:, None] if tensor.ndim == 1 else tensor.transpose(0, 1)
        layers.setdefault(path, {})[name] = tensor
    for factors in layers.values():
        if {"lokr_w1", "lokr_w2"} <= factors.keys():
            # LyCORIS reads an alpha where a factor is a product alone.
            factors["lokr_w1"] = factors["lokr_w1"] * scale
    return layers


def _apart(places: Mapping[str, KohyaPlace], layers: Mapping[str, Factors]) -> Collection[str]:
    """Return the layers that keep an adapter and a name of their own: all, where some that are one
    layer in kohya's form have no common adapter, so that no reader finds a share of a file.

    Kronecker products below each other are none. A length for each row is not known of rows without
    an adapter. ComfyUI swaps rows of products of such names by itself, but no lengths.
    """
    if any(name.startswith("lokr_") for factors in layers.values() for name in factors):
        is_apart = any(place.rows_of or place.swaps for place in places.values())
    else:
        is_apart = any(
            _LENGTHS in layers[path] and not layers.keys() >= set(place.rows_of)
            for path, place in places.items()
        )
    if not is_apart:
        return ()
    return [path for path in layers if not (places[path].swaps and _LENGTHS in layers[path])]


def _joined(rows_of: tuple[str, ...], layers: Mapping[str, Factors], module: nn.Module) -> Factors:
    """Return one adapter of layers below each other: some factors below each other, too, others on
    a diagonal. A layer without one gets zeros, because readers cut the file into as many equal
    ranks as there are layers."""
    known = [layers.get(path, {}) for path in rows_of]
    found: Factors = {}
    for name, like in next(factors for factors in known if factors).items():
        parts = [
            factors.get(name, like.new_zeros(_rows(module, path), like.shape[1]))
            if name in _ACROSS
            else factors.get(name, torch.zeros_like(like))
            for path, factors in zip(rows_of, known, strict=True)
        ]
        found[name] = torch.block_diag(*parts) if name in _ACROSS else torch.cat(parts)
    return found


def _rows(module: nn.Module, path: str) -> int:
    layer: Any = module.get_submodule(path)
    return int(getattr(layer, "base_layer", layer).out_features)


def _swapped(name: str, tensor: Tensor) -> Tensor:
    if name not in (*_ACROSS, _LENGTHS):
        return tensor
    first, second = tensor.chunk(2)
    return torch.cat([second, first])


def _split(key: str) -> tuple[str, str]:
    for ours, theirs in _FACTORS.items():
        if key.endswith(f".{ours}"):
            return key.removesuffix(f".{ours}"), theirs
    path, _, factor = key.rpartition(".")
    return path, factor


def _base(model: DiffusionModel, part: str, path: str) -> str:
    if part.startswith("text_encoder") and not path.startswith(_LOST):
        path = _LOST + path
    return model.family.kohya[part] + path.replace(".", "_")


def notes(settings: Settings, model: DiffusionModel, alpha: float) -> dict[str, str]:
    """Return kohya's words for what the file holds."""
    if settings.adapter == "lora":
        kind = {"ss_network_module": model.family.kohya_network}
    else:
        kind = {
            "ss_network_module": "lycoris.kohya",
            "ss_network_args": json.dumps({"algo": settings.adapter}),
        }
    return {
        "format": "pt",
        **kind,
        "ss_network_dim": str(settings.rank),
        "ss_network_alpha": str(alpha),
        **({"ss_base_weights": settings.base_weights} if settings.base_weights else {}),
        **model.family.kohya_notes(model.modules, model.process.prediction),
    }

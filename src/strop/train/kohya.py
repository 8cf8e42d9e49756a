"""Name adapters as kohya's scripts and LyCORIS do, which ComfyUI and others read too."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from strop.train.model import DiffusionModel
from strop.train.settings import Settings

# peft's name of a factor -> kohya's; LoHa and LoKr have the same in both.
_FACTORS = {
    "lora_A.weight": "lora_down.weight",
    "lora_B.weight": "lora_up.weight",
    "lora_magnitude_vector": "dora_scale",
    "lora_magnitude_vector.weight": "dora_scale",
}
_LOST = "text_model."  # left out of names of modules by transformers since kohya's format was made


def tensors(
    model: DiffusionModel, part: str, weights: dict[str, Tensor], alpha: float, rank: int
) -> dict[str, Tensor]:
    """Return kohya's names, with the alpha that was trained with."""
    found: dict[str, Tensor] = {}
    whole = _whole_products(weights)
    for key, tensor in weights.items():
        path, factor = _split(key)
        base = _base(model, part, path)
        if factor == "dora_scale":
            tensor = tensor[:, None]  # a scale for each row of the weight
        if path in whole and factor == "lokr_w1":
            # LyCORIS reads an alpha where a factor is a product alone.
            tensor = tensor * (alpha / rank)
        found[f"{base}.{factor}"] = tensor
        found[f"{base}.alpha"] = torch.tensor(alpha, dtype=torch.float32)
    return found


def _whole_products(weights: dict[str, Tensor]) -> set[str]:
    """Return the layers of LoKr neither of whose factors is a product."""
    factors: dict[str, set[str]] = {}
    for key in weights:
        path, factor = _split(key)
        factors.setdefault(path, set()).add(factor)
    return {path for path, names in factors.items() if {"lokr_w1", "lokr_w2"} <= names}


def _split(key: str) -> tuple[str, str]:
    for ours, theirs in _FACTORS.items():
        if key.endswith(f".{ours}"):
            return key.removesuffix(f".{ours}"), theirs
    path, _, factor = key.rpartition(".")
    return path, factor


def _base(model: DiffusionModel, part: str, path: str) -> str:
    family = model.family
    assert family.kohya is not None
    if part.startswith("text_encoder") and not path.startswith(_LOST):
        path = _LOST + path
    return family.kohya[part] + family.kohya_path(model.modules, part, path).replace(".", "_")


def notes(settings: Settings, model: DiffusionModel, alpha: float) -> dict[str, str]:
    """Return kohya's words for what the file holds."""
    if settings.adapter == "lora":
        kind = {"ss_network_module": "networks.lora"}
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

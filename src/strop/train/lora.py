"""Add adapters by peft, and write them as diffusers and as kohya and ComfyUI read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.errors import OptionError
from strop.train import files, kohya
from strop.train.draws import seed_of
from strop.train.model import DiffusionModel
from strop.train.settings import Settings

DIFFUSERS_NAME, KOHYA_NAME = "pytorch_lora_weights.safetensors", "kohya_lora_weights.safetensors"
_PEFT_PREFIX = "base_model.model."  # of names in peft's own files


def attach(settings: Settings, model: DiffusionModel) -> None:
    """Add adapters, whose weights are then all that is trained; their product starts at zero."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise OptionError("LoRA needs peft: pip install 'strop[train]'") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(settings.seed, "adapters", 0))
        for name in model.parts(settings):
            targets = list(model.family.adapted[name])
            if settings.lora_layers and name == model.family.denoiser:
                targets = [layer.strip() for layer in settings.lora_layers.split(",")]
            module: Any = model.modules[name]
            try:
                module.add_adapter(_config(settings, targets))
            except ValueError as error:
                raise OptionError(
                    f"no adapters of the {name}: {error}; --lora_layers names layers by the ends "
                    "of their paths, as in to_q,to_k"
                ) from error
            for parameter in module.parameters():
                if parameter.requires_grad:  # peft takes the type of the weights beside them
                    parameter.data = parameter.data.float()


def _config(settings: Settings, targets: list[str]) -> Any:
    """Return peft's settings of a part's adapters."""
    from peft import LoHaConfig, LoKrConfig, LoraConfig

    alpha = settings.rank if settings.lora_alpha is None else settings.lora_alpha
    common = {"r": settings.rank, "target_modules": targets}
    if settings.adapter == "loha":
        return LoHaConfig(alpha=alpha, **common)
    if settings.adapter == "lokr":
        return LoKrConfig(alpha=alpha, decompose_factor=settings.lokr_factor, **common)
    return LoraConfig(
        lora_alpha=alpha,
        lora_dropout=settings.lora_dropout,
        init_lora_weights="gaussian",
        use_dora=settings.use_dora,
        **common,
    )


def save(settings: Settings, model: DiffusionModel, folder: Path, dtype: torch.dtype) -> None:
    """Write adapters into ``folder``: as diffusers reads them, and in kohya's form."""
    if settings.adapter == "lora":
        _save_diffusers(settings, model, folder, dtype)
    else:
        for name in model.parts(settings):
            _save_peft(model, name, folder / f"{name}_{settings.adapter}", dtype)
    tensors: dict[str, Tensor] = {}
    for name in model.parts(settings):
        weights = _weights(model, name, dtype)
        tensors |= kohya.tensors(model, name, weights, _alpha(model, name), settings.rank)
    notes = kohya.notes(settings, model, _alpha(model, model.family.denoiser))
    files.write_tensors(folder / KOHYA_NAME, tensors, **notes)


def _alpha(model: DiffusionModel, name: str) -> float:
    config = _adapter(model, name)
    return float(config.lora_alpha if hasattr(config, "lora_alpha") else config.alpha)


def _adapter(model: DiffusionModel, name: str) -> Any:
    """Return peft's settings of a part."""
    module: Any = model.modules[name]
    return module.peft_config["default"]


def _weights(model: DiffusionModel, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return ``<path of the projection>.<peft's name of the factor>``."""
    from peft.utils import get_peft_model_state_dict

    found = get_peft_model_state_dict(model.modules[name])
    return {key: tensor.detach().cpu().to(dtype) for key, tensor in found.items()}


def _plain_config(model: DiffusionModel, name: str) -> dict[str, Any]:
    """Return peft's settings for JSON, without the folder that the model was loaded from."""
    config = {**_adapter(model, name).to_dict(), "base_model_name_or_path": None}
    loaded: dict[str, Any] = json.loads(json.dumps(config, default=_as_json))
    return loaded


def _save_diffusers(
    settings: Settings, model: DiffusionModel, folder: Path, dtype: torch.dtype
) -> None:
    from diffusers.utils import convert_state_dict_to_diffusers

    arguments: dict[str, Any] = {}
    for name in model.parts(settings):
        layers = _weights(model, name, dtype)
        if name != "transformer":  # whose loader reads peft's names alone
            layers = convert_state_dict_to_diffusers(layers)
        if name.startswith("text_encoder"):
            layers = {_as_transformers_reads(key): tensor for key, tensor in layers.items()}
        # The file names no dropout: diffusers leaves the layers that it makes from this in training
        # mode, and would drop while it draws.
        config = {**_plain_config(model, name), "lora_dropout": 0.0}
        arguments[f"{name}_lora_layers"] = layers
        arguments[f"{name}_lora_adapter_metadata"] = config

    base = {"base_weights": settings.base_weights} if settings.base_weights else {}

    def fill(part: Path) -> None:
        type(model.pipeline).save_lora_weights(
            part.parent, weight_name=part.name, safe_serialization=True, **arguments
        )
        files.sort_notes(part, **base)

    # diffusers adds its ending to names without one.
    files.write(folder / DIFFUSERS_NAME, fill)


def _as_transformers_reads(key: str) -> str:
    """Name DoRA's lengths so that transformers, which loads adapters of text encoders, finds
    them."""
    return f"{key}.weight" if key.endswith(".lora_magnitude_vector") else key


def _save_peft(model: DiffusionModel, name: str, folder: Path, dtype: torch.dtype) -> None:
    """Write a folder for ``peft.PeftModel.from_pretrained``: diffusers has no file of its own for
    these kinds."""
    fresh = folder.with_name(f"{folder.name}{files.PART}")
    fresh.mkdir(parents=True, exist_ok=True)
    weights = _weights(model, name, dtype)
    config = {**_plain_config(model, name), "inference_mode": True}
    files.write_tensors(
        fresh / "adapter_model.safetensors",
        {_PEFT_PREFIX + key: tensor for key, tensor in weights.items()},
    )
    files.write_json(fresh / "adapter_config.json", config)
    files.publish(fresh, folder)


def _as_json(value: object) -> object:
    """Return what JSON has in the place of sets and enumerations."""
    return sorted(value) if isinstance(value, set) else str(value)

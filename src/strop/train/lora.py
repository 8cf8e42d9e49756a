"""Add LoRA adapters by peft, and write them as diffusers and as kohya and ComfyUI read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.errors import OptionError
from strop.train import files
from strop.train.draws import seed_of
from strop.train.model import DiffusionModel, NoiseModel
from strop.train.settings import Settings

# Part of the model -> the projections that get an adapter, kohya's prefix, and what transformers
# has left out of the names of modules since kohya's format was made.
TARGETS = {
    "unet": ("to_k", "to_q", "to_v", "to_out.0"),
    "text_encoder": ("q_proj", "k_proj", "v_proj", "out_proj"),
}
_KOHYA = {"unet": ("lora_unet_", ""), "text_encoder": ("lora_te_", "text_model.")}
_SECOND_WIDTH = 1024  # of the text embeddings that Stable Diffusion 2 reads
DIFFUSERS_NAME, KOHYA_NAME = "pytorch_lora_weights.safetensors", "kohya_lora_weights.safetensors"


def attach(settings: Settings, model: DiffusionModel) -> None:
    """Add adapters, whose weights are then all that is trained; their product starts at zero."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise OptionError("LoRA needs peft: pip install 'strop[train]'") from error
    alpha = settings.rank if settings.lora_alpha is None else settings.lora_alpha
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(settings.seed, "adapters", 0))
        for name in model.parts(settings):
            module = model.modules[name]
            module.add_adapter(  # type: ignore[operator]
                LoraConfig(
                    r=settings.rank,
                    lora_alpha=alpha,
                    lora_dropout=settings.lora_dropout,
                    init_lora_weights="gaussian",
                    target_modules=list(TARGETS[name]),
                )
            )
            for parameter in module.parameters():
                if parameter.requires_grad:  # peft takes the type of the weights beside them
                    parameter.data = parameter.data.float()


def save(settings: Settings, model: DiffusionModel, folder: Path, dtype: torch.dtype) -> None:
    """Write both files into ``folder``."""
    _save_diffusers(settings, model, folder, dtype)
    tensors: dict[str, Tensor] = {}
    for name in model.parts(settings):
        tensors |= kohya_tensors(name, _weights(model, name, dtype), _alpha(model, name))
    assert isinstance(model, NoiseModel)  # loading has refused others
    notes = {
        "format": "pt",
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(settings.rank),
        "ss_network_alpha": str(_alpha(model, "unet")),
        **base_notes(model.unet.config.cross_attention_dim, model.prediction),
    }
    files.write_tensors(folder / KOHYA_NAME, tensors, **notes)


def base_notes(text_width: int, prediction: str) -> dict[str, str]:
    """Return kohya's words for the model that adapters belong to: 2 reads OpenCLIP, which is
    wider."""
    is_second = text_width == _SECOND_WIDTH
    version = f"sd_v{1 + is_second}{'_v' if prediction == 'v_prediction' else ''}"
    return {"ss_base_model_version": version, "ss_v2": str(is_second)}


def _alpha(model: DiffusionModel, name: str) -> float:
    return float(_adapter(model, name).lora_alpha)


def _adapter(model: DiffusionModel, name: str) -> Any:
    """Return peft's settings of a part."""
    module: Any = model.modules[name]
    return module.peft_config["default"]


def _weights(model: DiffusionModel, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return ``<path of the projection>.lora_A.weight`` and ``.lora_B.weight``."""
    from peft.utils import get_peft_model_state_dict

    found = get_peft_model_state_dict(model.modules[name])
    return {key: tensor.detach().cpu().to(dtype) for key, tensor in found.items()}


def _save_diffusers(
    settings: Settings, model: DiffusionModel, folder: Path, dtype: torch.dtype
) -> None:
    from diffusers import StableDiffusionPipeline
    from diffusers.utils import convert_state_dict_to_diffusers

    arguments: dict[str, Any] = {}
    for name in model.parts(settings):
        layers = convert_state_dict_to_diffusers(_weights(model, name, dtype))
        # The file names no folder that the model was loaded from, and no dropout: diffusers leaves
        # the layers that it makes from this in training mode, and would drop while it draws.
        config = {
            **_adapter(model, name).to_dict(),
            "base_model_name_or_path": None,
            "lora_dropout": 0.0,
        }
        arguments[f"{name}_lora_layers"] = layers
        arguments[f"{name}_lora_adapter_metadata"] = _plain(config)

    def fill(part: Path) -> None:
        StableDiffusionPipeline.save_lora_weights(
            part.parent, weight_name=part.name, safe_serialization=True, **arguments
        )
        files.sort_notes(part)

    # diffusers adds its ending to names without one.
    files.write(folder / DIFFUSERS_NAME, fill)


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    """Drop sets and enumerations, which JSON has not."""
    loaded: dict[str, Any] = json.loads(json.dumps(content, default=_as_json))
    return loaded


def _as_json(value: object) -> object:
    return sorted(value) if isinstance(value, set) else str(value)


def kohya_tensors(name: str, weights: dict[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Return the names of kohya's scripts, with the alpha that was trained with."""
    prefix, dropped = _KOHYA[name]
    tensors: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        path, side = key.removesuffix(".weight").rsplit(".", 1)
        if dropped and not path.startswith(dropped):
            path = dropped + path
        path = prefix + path.replace(".", "_")
        tensors[f"{path}.{'lora_down' if side == 'lora_A' else 'lora_up'}.weight"] = tensor
        tensors[f"{path}.alpha"] = torch.tensor(alpha, dtype=torch.float32)
    return tensors

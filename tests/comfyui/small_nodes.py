"""Nodes for tests: small transformers of ComfyUI's own code, with weights as users have them.

This is custom node code for a ComfyUI that tests start. Its loaders tell a family by sizes that
small models do not have, so these nodes tell the family by name; all else is the loaders' own way.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import comfy.ops
import comfy.sd
import folder_paths
import nodes
import torch
from comfy import model_detection, supported_models
from torch import Tensor

_FLUX = {"in_channels": 16, "out_channels": 16, "vec_in_dim": 16, "context_in_dim": 32}
_FLUX |= {"hidden_size": 64, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2, "patch_size": 2}
_FLUX |= {"depth_single_blocks": 2, "axes_dim": [8, 12, 12], "theta": 10000, "qkv_bias": True}
_FLUX |= {"txt_ids_dims": []}
_WAN = {"model_type": "t2v", "dim": 64, "ffn_dim": 96, "freq_dim": 32, "text_dim": 32}
_WAN |= {"num_heads": 2, "in_dim": 16, "out_dim": 16, "num_layers": 2, "text_len": 7}
_QWEN = {"in_channels": 64, "out_channels": 16, "num_layers": 2, "attention_head_dim": 32}
_QWEN |= {"num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (8, 12, 12)}
_Z = {"in_channels": 16, "dim": 256, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 8}
_Z |= {"cap_feat_dim": 32, "multiple_of": 32, "ffn_dim_multiplier": 2.0, "qk_norm": True}
_Z |= {"axes_dims": [8, 12, 12], "axes_lens": [64, 64, 64], "pad_tokens_multiple": 8}
# The class of a family, the name of its network, its sizes, its name in GGUF files.
FAMILIES: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "flux": (supported_models.Flux, "flux", {**_FLUX, "guidance_embed": True}, "flux"),
    "wan": (supported_models.WAN21_T2V, "wan2.1", _WAN, "wan"),
    "qwen_image": (supported_models.QwenImage, "qwen_image", _QWEN, "qwen_image"),
    "z_image": (supported_models.ZImage, "lumina2", {**_Z, "z_image_modulation": True}, "lumina2"),
}
WEIGHTS = ("fp32", "bf16", "fp8", "fp8 scaled", "Q8_0", "Q4_0")


@contextlib.contextmanager
def _told(config: Any) -> Iterator[None]:
    """Let the loader take a model for what it is."""
    own = model_detection.model_config_from_unet
    model_detection.model_config_from_unet = lambda *_, **__: config
    try:
        yield
    finally:
        model_detection.model_config_from_unet = own


def _config(family: str) -> Any:
    kind, name, sizes, _ = FAMILIES[family]
    return kind({"image_model": name, **sizes})


def _random_weights(family: str) -> dict[str, Tensor]:
    config = _config(family)
    config.set_inference_dtype(torch.float32, None)
    config.custom_operations = comfy.ops.disable_weight_init
    made = config.get_model({}, "").diffusion_model.state_dict()
    source = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(value.shape, generator=source) * (0.1 if value.ndim > 1 else 0.05)
        + ("norm" in name and value.ndim == 1)
        for name, value in made.items()
    }


def _is_linear(name: str, value: Tensor) -> bool:
    """Say whether a weight is one that files have in few bits."""
    is_inner = any(part in name for part in ("blocks.", "layers.", "refiner."))
    return is_inner and name.endswith(".weight") and value.ndim == 2 and value.shape[1] % 32 == 0


def _scaled(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a file of ComfyUI's own quantised format: fp8 codes with a scale for each layer."""
    found = dict(weights)
    for name, value in weights.items():
        if _is_linear(name, value):
            scale = value.abs().max() / 448
            layer = name.removesuffix("weight")
            found[name] = (value / scale).to(torch.float8_e4m3fn)
            found[f"{layer}weight_scale"] = scale
            text = json.dumps({"format": "float8_e4m3fn"}).encode()
            found[f"{layer}comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    return found


def _from_gguf(family: str, weights: dict[str, Tensor], kind: str) -> Any:
    import gguf

    folder = folder_paths.get_folder_paths("diffusion_models")[0]
    os.makedirs(folder, exist_ok=True)
    name = f"{family}-{kind}.gguf"
    writer = gguf.GGUFWriter(os.path.join(folder, name), FAMILIES[family][3])
    code = gguf.GGMLQuantizationType[kind]
    for key, value in weights.items():
        if _is_linear(key, value):
            data = gguf.quantize(value.numpy(), code)
            writer.add_tensor(key, data, raw_dtype=code)
        else:
            writer.add_tensor(key, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return nodes.NODE_CLASS_MAPPINGS["UnetLoaderGGUF"]().load_unet(name)[0]


def loaded(family: str, kind: str) -> Any:
    """Return the patcher of a small model whose weights are of a kind."""
    weights, config = _random_weights(family), _config(family)
    with _told(config):
        if kind in ("fp32", "bf16", "fp8"):
            dtypes = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
            how = {} if kind == "fp32" else {"dtype": dtypes[kind]}
            return comfy.sd.load_diffusion_model_state_dict(weights, model_options=how)
        if kind == "fp8 scaled":
            config.quant_config = {"mixed_ops": True}
            return comfy.sd.load_diffusion_model_state_dict(_scaled(weights))
        return _from_gguf(family, weights, kind)


class SmallModel:
    """This node makes a small model."""

    CATEGORY, FUNCTION, RETURN_TYPES = "tests", "make", ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"family": ([*FAMILIES],), "weights": ([*WEIGHTS],)}}

    def make(self, family: str, weights: str) -> Any:
        return (loaded(family, weights),)


class SmallPrompt:
    """This node makes a text's encoding: these families' own encoders have billions of weights."""

    CATEGORY, FUNCTION, RETURN_TYPES = "tests", "make", ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"seed": ("INT", {}), "length": ("INT", {"default": 7})}}

    def make(self, seed: int, length: int) -> Any:
        source = torch.Generator().manual_seed(seed)
        context = torch.randn(1, length, 32, generator=source)
        return ([[context, {"pooled_output": torch.randn(1, 16, generator=source)}]],)


NODE_CLASS_MAPPINGS = {"SmallModel": SmallModel, "SmallPrompt": SmallPrompt}

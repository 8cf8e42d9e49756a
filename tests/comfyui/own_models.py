"""Run small transformers of ComfyUI's own code with the node's wrapper and without it.

This is a program for the Python of ComfyUI: it takes the checkout and the node pack, and prints a
line of JSON for each model.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

CHECKOUT, PACK = sys.argv[1:3]
sys.argv = [sys.argv[0], "--cpu", "--use-pytorch-cross-attention"]
sys.path.insert(0, CHECKOUT)

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import torch  # noqa: E402
from comfy import ops, patcher_extension  # noqa: E402
from comfy.ldm.flux.model import Flux  # noqa: E402
from comfy.ldm.lumina.model import NextDiT  # noqa: E402
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel  # noqa: E402
from comfy.ldm.wan.model import WanModel  # noqa: E402
from torch import nn  # noqa: E402

MADE = {"operations": ops.disable_weight_init, "dtype": torch.float32, "device": "cpu"}
TIMES = torch.tensor([0.7, 0.7])
SIZES = ((8, 8), (8, 12), (12, 8))


def flux() -> nn.Module:
    sizes = {"in_channels": 4, "out_channels": 4, "vec_in_dim": 16, "context_in_dim": 24}
    sizes |= {"hidden_size": 64, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2, "patch_size": 2}
    sizes |= {"depth_single_blocks": 2, "axes_dim": [8, 12, 12], "theta": 10000, "qkv_bias": True}
    return Flux(**sizes, guidance_embed=True, txt_ids_dims=[], **MADE)


def wan() -> nn.Module:
    sizes = {"dim": 48, "ffn_dim": 96, "freq_dim": 32, "text_dim": 24, "num_heads": 2}
    return WanModel(in_dim=4, out_dim=4, num_layers=2, text_len=7, **sizes, **MADE)


def qwen_image() -> nn.Module:
    sizes = {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 32}
    sizes |= {"num_attention_heads": 2, "joint_attention_dim": 24}
    return QwenImageTransformer2DModel(**sizes, axes_dims_rope=(8, 12, 12), **MADE)


def z_image() -> nn.Module:
    sizes = {"in_channels": 4, "dim": 256, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 8}
    sizes |= {"cap_feat_dim": 24, "multiple_of": 32, "ffn_dim_multiplier": 2.0}
    axes = {"axes_dims": [8, 12, 12], "axes_lens": [64, 64, 64], "pad_tokens_multiple": 8}
    return NextDiT(**sizes, **axes, qk_norm=True, z_image_modulation=True, **MADE)


def given(name: str, height: int, width: int) -> dict[str, Any]:
    frames = (3,) if name == "wan" else (1,) if name == "qwen_image" else ()
    found = {"x": torch.randn(2, 4, *frames, height, width), "context": torch.randn(2, 7, 24)}
    if name == "flux":
        found |= {"y": torch.randn(2, 16), "guidance": torch.full((2,), 3.5)}
    if name == "z_image":
        found |= {"num_tokens": 7}
    return found


def compare(name: str, model: nn.Module, wrapper: Any) -> dict[str, Any]:
    kind = patcher_extension.WrappersMP.DIFFUSION_MODEL
    errors, spans = [], []
    for size in SIZES:
        call = given(name, *size)
        x = call["x"]
        options = {"cond_or_uncond": [1, 0], "sigmas": torch.tensor([0.7])}
        expected = model(call.pop("x"), TIMES, **call, transformer_options=dict(options))
        options |= {"wrappers": {kind: {"strop": [wrapper]}}, "sample_sigmas": torch.ones(3)}
        found = model(x, TIMES, **call, transformer_options=options)
        errors.append(float((found - expected).square().mean().sqrt()))
        spans.append(float(expected.max() - expected.min()))
    module = wrapper.module
    if module is None:
        return {"plain": wrapper.plain_calls, "errors": errors}
    counters = module.forward.counters
    graphs = len(module.forward.variants.all)
    return {
        "graphs": graphs,
        "eager": counters.eager_calls,
        "fallbacks": counters.fallbacks,
        "plain": wrapper.plain_calls,
        "errors": errors,
        "spans": spans,
    }


def main() -> None:
    place = {"submodule_search_locations": [PACK]}
    spec = importlib.util.spec_from_file_location("strop_pack", f"{PACK}/__init__.py", **place)
    assert spec is not None
    assert spec.loader is not None
    pack = importlib.util.module_from_spec(spec)
    sys.modules["strop_pack"] = pack
    spec.loader.exec_module(pack)
    wrapped = sys.modules["strop_pack.compiled_model"].CompiledModel
    for make in (flux, wan, qwen_image, z_image):
        with torch.inference_mode():
            torch.manual_seed(0)
            model = make().eval()
            for weight in model.parameters():
                weight.normal_(0, 0.1)
            print(json.dumps({"model": make.__name__, **compare(make.__name__, model, wrapped())}))


main()

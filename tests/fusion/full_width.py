"""Plans two blocks of transformers at full width for a GPU, without weights and without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from strop.backend import Compiled, compile_graph
from strop.bench.transformer_models import FLUX, WAN
from strop.codegen.assemble import Signature
from strop.diffusion.components import adapter_for
from strop.frontend.capture import capture
from strop.frontend.importer import import_graph
from strop.options import Options

BLOCKS = 2
Model = tuple[nn.Module, dict[str, Any]]


def _like(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _flux() -> Model:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(**FLUX, num_layers=BLOCKS, num_single_layers=BLOCKS)
    return model, {
        "hidden_states": _like(1, 4096, 64),
        "encoder_hidden_states": _like(1, 512, 4096),
        "pooled_projections": _like(1, 768),
        "timestep": _like(1),
        "img_ids": _like(4096, 3),
        "txt_ids": _like(512, 3),
        "guidance": _like(1, dtype=torch.float32),
    }


def _wan() -> Model:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(**WAN | {"num_layers": BLOCKS}), {
        "hidden_states": _like(1, 16, 9, 60, 104),
        "timestep": _like(1, dtype=torch.float32),
        "encoder_hidden_states": _like(1, 512, 4096),
    }


def _sd3(**others: Any) -> Model:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=128,
        num_layers=BLOCKS,
        num_attention_heads=24,
        caption_projection_dim=1536,
        pos_embed_max_size=192,
        **others,
    )
    return model, {
        "hidden_states": _like(2, 16, 128, 128),
        "timestep": _like(2),
        "encoder_hidden_states": _like(2, 333, 4096),
        "pooled_projections": _like(2, 2048),
    }


def _qwen() -> Model:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(num_layers=BLOCKS), {
        "hidden_states": _like(1, 4096, 64),
        "encoder_hidden_states": _like(1, 128, 3584),
        "timestep": _like(1),
        "img_shapes": [[(1, 64, 64)]],
    }


class _ZImage(nn.Module):
    """One picture and one text, which Z-Image takes in lists."""

    def __init__(self) -> None:
        from diffusers import ZImageTransformer2DModel

        super().__init__()
        self.inner = ZImageTransformer2DModel(n_layers=BLOCKS, n_refiner_layers=1)

    def forward(self, x: Tensor, t: Tensor, text: Tensor, return_dict: bool) -> Any:
        return self.inner([x], t, [text], return_dict=return_dict)


def _z_image() -> Model:
    return _ZImage(), {
        "x": _like(16, 1, 128, 128),
        "t": _like(1),
        "text": _like(64, 2560),
    }


def _vit() -> Model:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=BLOCKS, num_attention_heads=16, intermediate_size=4096
    )
    return ViTModel(config), {"pixel_values": _like(8, 3, 224, 224)}


def _t5() -> Model:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=BLOCKS, num_heads=16)
    return T5EncoderModel(config), {"input_ids": _like(2, 256, dtype=torch.int64)}


MODELS: dict[str, Callable[[], Model]] = {
    "flux": _flux,
    "wan": _wan,
    "sd3": _sd3,
    "sd35": partial(_sd3, dual_attention_layers=(0,), qk_norm="rms_norm"),
    "qwen": _qwen,
    "z-image": _z_image,
    "vit": _vit,
    "t5": _t5,
}


@cache
def planned(name: str, *numerics: str) -> Compiled:
    """The program in bf16, as ``strop.optimize`` makes it for a GPU, with what ``numerics``
    allow."""
    with torch.device("meta"):
        module, given = MODELS[name]()
    module = module.eval().to(torch.bfloat16).requires_grad_(False)
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    others = {key: value for key, value in given.items() if key not in tensors}
    shapes = adapter_for(module).shapes([*tensors.values()])

    def call(*values: Tensor) -> Any:
        return module(**dict(zip(tensors, values, strict=True)), **others, return_dict=False)

    with torch.no_grad():
        captured = capture(module, call, shapes.specs, shapes.hints)
    found = import_graph(
        captured.gm, captured.symbols, captured.hints, captured.origins, len(captured.state_names)
    )
    signature = Signature(found.returned, captured.guards)
    return compile_graph(found.graph, signature, "cuda", Options(numerics=numerics))

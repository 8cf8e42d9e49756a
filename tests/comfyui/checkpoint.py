"""Write small models in the formats that ComfyUI reads, with random weights.

A checkpoint of the original code holds a UNet, a CLIP and a VAE. ComfyUI tells which UNet it is by
320 channels and a context of 768; depth and levels it counts, so there are two levels here and few
blocks. CLIP and VAE have the sizes that it takes for granted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

CHANNELS, CONTEXT, TIME = 320, 768, 1280
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def layer(name: str, *shape: int, bias: bool = True) -> Shapes:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


def within(prefix: str, shapes: Shapes) -> Shapes:
    for name, shape in shapes:
        yield f"{prefix}.{name}", shape


def unet_block(wide: int, out: int) -> Shapes:
    yield from layer("in_layers.0", wide)
    yield from layer("in_layers.2", out, wide, 3, 3)
    yield from layer("emb_layers.1", out, TIME)
    yield from layer("out_layers.0", out)
    yield from layer("out_layers.3", out, out, 3, 3)
    if wide != out:
        yield from layer("skip_connection", out, wide, 1, 1)


def transformer(wide: int) -> Shapes:
    yield from layer("norm", wide)
    yield from layer("proj_in", wide, wide, 1, 1)
    yield from layer("proj_out", wide, wide, 1, 1)
    block = "transformer_blocks.0"
    for name, context in (("attn1", wide), ("attn2", CONTEXT)):
        yield from layer(f"{block}.{name}.to_q", wide, wide, bias=False)
        yield from layer(f"{block}.{name}.to_k", wide, context, bias=False)
        yield from layer(f"{block}.{name}.to_v", wide, context, bias=False)
        yield from layer(f"{block}.{name}.to_out.0", wide, wide)
    for number in (1, 2, 3):
        yield from layer(f"{block}.norm{number}", wide)
    yield from layer(f"{block}.ff.net.0.proj", 8 * wide, wide)
    yield from layer(f"{block}.ff.net.2", wide, 4 * wide)


def unet_inputs() -> Shapes:
    """Yield what a UNet and its ControlNet have in common: all up to the middle."""
    yield from layer("time_embed.0", TIME, CHANNELS)
    yield from layer("time_embed.2", TIME, TIME)
    yield from layer("input_blocks.0.0", CHANNELS, 4, 3, 3)
    yield from within("input_blocks.1.0", unet_block(CHANNELS, CHANNELS))
    yield from within("input_blocks.1.1", transformer(CHANNELS))
    yield from layer("input_blocks.2.0.op", CHANNELS, CHANNELS, 3, 3)
    yield from within("input_blocks.3.0", unet_block(CHANNELS, CHANNELS))
    yield from within("middle_block.0", unet_block(CHANNELS, CHANNELS))


def unet() -> Shapes:
    yield from unet_inputs()
    for number in range(4):
        yield from within(f"output_blocks.{number}.0", unet_block(2 * CHANNELS, CHANNELS))
    yield from layer("output_blocks.1.1.conv", CHANNELS, CHANNELS, 3, 3)
    for number in (2, 3):
        yield from within(f"output_blocks.{number}.1", transformer(CHANNELS))
    yield from layer("out.0", CHANNELS)
    yield from layer("out.2", 4, CHANNELS, 3, 3)


def control_net() -> Shapes:
    yield from unet_inputs()
    for number in range(4):
        yield from layer(f"zero_convs.{number}.0", CHANNELS, CHANNELS, 1, 1)
    yield from layer("middle_block_out.0", CHANNELS, CHANNELS, 1, 1)
    widths = (3, 16, 16, 32, 32, 96, 96, 256, CHANNELS)
    for number, (wide, out) in enumerate(itertools.pairwise(widths)):
        yield from layer(f"input_hint_block.{2 * number}", out, wide, 3, 3)


def clip() -> Shapes:
    yield "embeddings.token_embedding.weight", (49408, CONTEXT)
    yield "embeddings.position_embedding.weight", (77, CONTEXT)
    for number in range(12):
        name = f"encoder.layers.{number}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from layer(f"{name}.self_attn.{part}", CONTEXT, CONTEXT)
        yield from layer(f"{name}.layer_norm1", CONTEXT)
        yield from layer(f"{name}.layer_norm2", CONTEXT)
        yield from layer(f"{name}.mlp.fc1", 4 * CONTEXT, CONTEXT)
        yield from layer(f"{name}.mlp.fc2", CONTEXT, 4 * CONTEXT)
    yield from layer("final_layer_norm", CONTEXT)


def vae_block(wide: int, out: int) -> Shapes:
    yield from layer("norm1", wide)
    yield from layer("conv1", out, wide, 3, 3)
    yield from layer("norm2", out)
    yield from layer("conv2", out, out, 3, 3)
    if wide != out:
        yield from layer("nin_shortcut", out, wide, 1, 1)


def vae_half(
    name: str, first: int, levels: list[tuple[int, ...]], last: int, sampler: str
) -> Shapes:
    """Yield an encoder or a decoder. ``levels`` are the widths of the blocks, and ``sampler`` is
    what stands behind each of them but the last that runs."""
    middle = levels[-1][-1] if sampler == "downsample" else levels[-1][0]
    begin = levels[0][0] if sampler == "downsample" else middle
    yield from layer(f"{name}.conv_in", begin, first, 3, 3)
    for number, widths in enumerate(levels):
        level = f"{name}.{'down' if sampler == 'downsample' else 'up'}.{number}"
        for block, (wide, out) in enumerate(itertools.pairwise(widths)):
            yield from within(f"{level}.block.{block}", vae_block(wide, out))
        if number != (len(levels) - 1 if sampler == "downsample" else 0):
            yield from layer(f"{level}.{sampler}.conv", widths[-1], widths[-1], 3, 3)
    for block in (1, 2):
        yield from within(f"{name}.mid.block_{block}", vae_block(middle, middle))
    yield from layer(f"{name}.mid.attn_1.norm", middle)
    for part in ("q", "k", "v", "proj_out"):
        yield from layer(f"{name}.mid.attn_1.{part}", middle, middle, 1, 1)
    end = levels[-1][-1] if sampler == "downsample" else levels[0][-1]
    yield from layer(f"{name}.norm_out", end)
    yield from layer(f"{name}.conv_out", last, end, 3, 3)


def vae() -> Shapes:
    down = [(128,) * 3, (128, 256, 256), (256, 512, 512), (512,) * 3]
    up = [(256, 128, 128, 128), (512, 256, 256, 256), (512,) * 4, (512,) * 4]
    yield from vae_half("encoder", 3, down, 8, "downsample")
    yield from vae_half("decoder", 4, up, 3, "upsample")
    yield from layer("quant_conv", 8, 8, 1, 1)
    yield from layer("post_quant_conv", 4, 4, 1, 1)


def drawn(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    """Return random weights that keep the size of what goes through a layer, in fp16."""
    source, found = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes:
        scale = (
            0.02 if len(shape) == 1 or "embedding" in name else 1 / math.sqrt(math.prod(shape[1:]))
        )
        value = torch.randn(shape, generator=source) * scale
        is_norm = len(shape) == 1 and name.endswith("weight")
        found[name] = (value + 1 if is_norm else value).half()
    return found


def write_checkpoint(file: Path) -> None:
    parts = {
        "model.diffusion_model": unet(),
        "first_stage_model": vae(),
        "cond_stage_model.transformer.text_model": clip(),
    }
    weights: dict[str, Tensor] = {}
    for seed, (prefix, shapes) in enumerate(parts.items()):
        weights |= drawn(within(prefix, shapes), seed)
    save(file, weights)


def write_control_net(file: Path) -> None:
    save(file, drawn(within("control_model", control_net()), 7))


def write_lora(file: Path, seed: int, rank: int = 4) -> None:
    """Write an adapter on the attention and the convolutions of the UNet."""
    source, found = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, shape in unet():
        if len(shape) > 1 and ("attn" in name or "layers" in name):
            key = f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}"
            up = torch.randn(shape[0], rank, generator=source) * 0.05
            down = torch.randn(rank, *shape[1:], generator=source) * 0.05
            found[f"{key}.lora_up.weight"] = up.view(*up.shape, *[1] * (len(shape) - 2))
            found[f"{key}.lora_down.weight"] = down
            found[f"{key}.alpha"] = torch.tensor(float(rank))
    save(file, found)


def save(file: Path, weights: Mapping[str, Tensor]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights), file)

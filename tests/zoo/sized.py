"""Models whose calls have several sizes: text length, frames, height, width, batch.

They have random weights and two layers. A shape is what ``inputs`` takes, drawn from ``ranges``;
sides are counted in tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strop.bench.zoo_model import diffusers, hf

Inputs = dict[str, Any]
BATCH, TEXT, FRAMES, SIDE = range(1, 5), range(3, 40), range(1, 6), range(2, 9)
PICTURES, VIDEOS = (BATCH, TEXT, SIDE, SIDE), (BATCH, TEXT, FRAMES, SIDE, SIDE)
HEADS: Mapping[str, Any] = {"num_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Sized:
    """``most_graphs``: more than one where the model's own code asks about a size."""

    build: Callable[[], nn.Module]
    inputs: Callable[..., Inputs]
    ranges: tuple[range, ...]
    most_graphs: int = 1

    def made(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().eval().requires_grad_(False)

    def shapes(self, count: int) -> list[tuple[int, ...]]:
        """Return different shapes, the same in every run."""
        source, found = random.Random(0), dict[tuple[int, ...], None]()
        while len(found) < count:
            found[tuple(source.choice(each) for each in self.ranges)] = None
        return list(found)


def text(batch: int, length: int, width: int = 16) -> Inputs:
    return {"encoder_hidden_states": torch.randn(batch, length, width)}


def flux(batch: int, length: int, height: int, width: int) -> Inputs:
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ids = torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3)
    return {
        "hidden_states": torch.randn(batch, height * width, 16),
        **text(batch, length),
        "pooled_projections": torch.randn(batch, 16),
        "timestep": torch.rand(batch),
        "guidance": 5 * torch.rand(batch),
        "img_ids": ids.float(),
        "txt_ids": torch.zeros(length, 3),
    }


def sd3(batch: int, length: int, height: int, width: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 4, 2 * height, 2 * width),
        **text(batch, length),
        "pooled_projections": torch.randn(batch, 16),
        "timestep": 1000 * torch.rand(batch),
    }


def qwen(length: int, height: int, width: int) -> Inputs:
    """Frames, height and width come in a list for each picture of the batch, which is one here."""
    return {
        "hidden_states": torch.randn(1, height * width, 16),
        **text(1, length),
        "encoder_hidden_states_mask": torch.ones(1, length, dtype=torch.bool),
        "timestep": torch.rand(1),
        "img_shapes": [[(1, height, width)]],
    }


def wan(batch: int, length: int, frames: int, height: int, width: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 16, frames, 2 * height, 2 * width),
        **text(batch, length),
        "timestep": torch.full((batch,), 500.0),
    }


def hunyuan(batch: int, length: int, frames: int, height: int, width: int) -> Inputs:
    mask = torch.ones(batch, length)
    mask[0, -1] = 0
    return {
        "hidden_states": torch.randn(batch, 4, frames, 2 * height, 2 * width),
        **text(batch, length),
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(batch, 16),
        "timestep": torch.full((batch,), 500),
        "guidance": torch.full((batch,), 6000.0),
    }


def cogvideo(batch: int, frames: int, height: int, width: int) -> Inputs:
    """Frames come before channels; the length of the text is a setting of the model."""
    tokens = frames * height * width
    return {
        "hidden_states": torch.randn(batch, frames, 4, 2 * height, 2 * width),
        **text(batch, 16),
        "timestep": torch.full((batch,), 500),
        "image_rotary_emb": (torch.randn(tokens, 8), torch.randn(tokens, 8)),
    }


def ltx(batch: int, length: int, frames: int, height: int, width: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, frames * height * width, 8),
        **text(batch, length),
        "encoder_attention_mask": torch.ones(batch, length),
        "timestep": torch.full((batch,), 500.0),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


def latents(batch: int, length: int, height: int, width: int) -> Inputs:
    """Sides count blocks of eight: the least is one pixel where a UNet is deepest."""
    return {
        "sample": torch.randn(batch, 4, 8 * height, 8 * width),
        "timestep": torch.tensor(7),
        **text(batch, length, 32),
    }


def controlled(batch: int, length: int, height: int, width: int) -> Inputs:
    picture = torch.rand(batch, 3, 64 * height, 64 * width)
    return {**latents(batch, length, height, width), "controlnet_cond": picture}


def words(batch: int, length: int) -> Inputs:
    return {"input_ids": torch.randint(3, 90, (batch, length))}


def pixels(batch: int, height: int, width: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, height, width)}


UNET: Mapping[str, Any] = {
    "block_out_channels": (16, 16, 32, 32),
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "attention_head_dim": 2,
    "norm_num_groups": 8,
}
T5: Mapping[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
}
BERT: Mapping[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
unet = diffusers("UNet2DConditionModel", **UNET, sample_size=32)
controlnet = diffusers(
    "ControlNetModel", **UNET, conditioning_embedding_out_channels=(8, 16, 16, 16)
)
vit = hf("ViTModel", **{k: v for k, v in BERT.items() if k != "vocab_size"}, image_size=32)

MODELS: Mapping[str, Sized] = {
    "flux": Sized(
        diffusers(
            "FluxTransformer2DModel",
            **HEADS,
            in_channels=16,
            num_single_layers=2,
            attention_head_dim=16,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        ),
        flux,
        PICTURES,
    ),
    "sd3": Sized(
        diffusers(
            "SD3Transformer2DModel",
            **HEADS,
            sample_size=32,
            in_channels=4,
            out_channels=4,
            attention_head_dim=16,
            joint_attention_dim=16,
            caption_projection_dim=32,
            pooled_projection_dim=16,
            pos_embed_max_size=32,
        ),
        sd3,
        PICTURES,
    ),
    # the longer side decides where its text begins
    "qwen-image": Sized(
        diffusers(
            "QwenImageTransformer2DModel",
            **HEADS,
            in_channels=16,
            out_channels=4,
            attention_head_dim=16,
            joint_attention_dim=16,
            axes_dims_rope=(4, 4, 8),
        ),
        qwen,
        (range(65, 90), SIDE, SIDE),  # a text as long as the picture would be tied to its size
    ),
    "wan": Sized(
        diffusers(
            "WanTransformer3DModel",
            **HEADS,
            attention_head_dim=12,
            ffn_dim=32,
            text_dim=16,
            freq_dim=16,
            rope_max_seq_len=32,
        ),
        wan,
        VIDEOS,
    ),
    "hunyuan-video": Sized(
        diffusers(
            "HunyuanVideoTransformer3DModel",
            **HEADS,
            in_channels=4,
            out_channels=4,
            attention_head_dim=10,
            num_single_layers=2,
            num_refiner_layers=1,
            text_embed_dim=16,
            pooled_projection_dim=16,
            rope_axes_dim=(2, 4, 4),
        ),
        hunyuan,
        VIDEOS,
    ),
    "cogvideox": Sized(
        diffusers(
            "CogVideoXTransformer3DModel",
            **HEADS,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=16,
            max_text_seq_length=16,
            use_rotary_positional_embeddings=True,
        ),
        cogvideo,
        (BATCH, FRAMES, SIDE, SIDE),
    ),
    "ltx": Sized(
        diffusers(
            "LTXVideoTransformer3DModel",
            **HEADS,
            in_channels=8,
            out_channels=8,
            attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=16,
        ),
        ltx,
        VIDEOS,
    ),
    "sd15-unet": Sized(unet, latents, (BATCH, TEXT, range(1, 4), range(1, 4))),
    "controlnet": Sized(controlnet, controlled, (BATCH, TEXT, range(1, 4), range(1, 4))),
    "t5-encoder": Sized(hf("T5EncoderModel", **T5), words, (BATCH, TEXT)),
    "clip-text": Sized(
        hf("CLIPTextModel", **BERT, bos_token_id=1, eos_token_id=2), words, (BATCH, TEXT)
    ),
    "bert": Sized(hf("BertModel", **BERT), words, (BATCH, TEXT)),
    # a batch of one is asked for: transformers expands the places of others
    "gpt2": Sized(
        hf("GPT2Model", vocab_size=99, n_embd=32, n_layer=2, n_head=4, use_cache=False),
        words,
        (BATCH, TEXT),
        most_graphs=2,
    ),
    "vit": Sized(vit, pixels, (range(1, 30), range(32, 33), range(32, 33))),
    "resnet": Sized(
        hf("ResNetModel", embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1]),
        pixels,
        (BATCH, range(32, 130), range(32, 130)),
    ),
}


def leaves(found: Any) -> list[Tensor]:
    found = found.to_tuple() if hasattr(found, "to_tuple") else found
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, Tensor)]

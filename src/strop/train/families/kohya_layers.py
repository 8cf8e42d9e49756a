"""Name layers of transformers as their first releases do, whose names kohya's scripts follow.

There a block has one layer for queries, keys and values, where diffusers has one for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strop.errors import UnsupportedError


@dataclass(frozen=True)
class KohyaPlace:
    """Say where the adapter of a layer of diffusers belongs in kohya's form.

    path: of the layer there, with dots.
    rows_of: the layers of diffusers whose rows that layer has, from its first row on; empty where
        it is the same layer.
    swaps: tells whether the second half of its rows comes first there.
    """

    path: str
    rows_of: tuple[str, ...] = ()
    swaps: bool = False


@dataclass(frozen=True)
class BlockNames:
    """Name a list of blocks and the layers of each: those that are the same layer by diffusers'
    name, those that have rows of several by their own."""

    name: str
    same: Mapping[str, str]
    joined: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class LayerNames:
    """Name all layers of a transformer, by diffusers' lists of blocks and by paths outside."""

    blocks: Mapping[str, BlockNames]
    outside: Mapping[str, str]

    def place(self, path: str, swaps: bool) -> KohyaPlace:
        """Return the place of a layer. Raises UnsupportedError for one that has no name."""
        kind, number, layer = (*path.split(".", 2), "", "")[:3]
        found = self.blocks.get(kind)
        if found is None:
            return KohyaPlace(_name(self.outside, path, path), swaps=swaps)
        for name, layers in found.joined.items():
            if layer in layers:
                rows_of = tuple(f"{kind}.{number}.{one}" for one in layers)
                return KohyaPlace(f"{found.name}.{number}.{name}", rows_of)
        return KohyaPlace(f"{found.name}.{number}.{_name(found.same, layer, path)}", swaps=swaps)


def _name(names: Mapping[str, str], layer: str, path: str) -> str:
    if layer not in names:
        raise UnsupportedError(
            f"the layer {path} has no name in kohya's form; leave it out of --lora_layers"
        )
    return names[layer]


_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_SECOND_QKV = ("attn2.to_q", "attn2.to_k", "attn2.to_v")


def _embedders(**names: str) -> dict[str, str]:
    """Name the layers of embedders, each given as its own name and those of its two layers."""
    return {
        f"time_text_embed.{embedder}_embedder.linear_{number}": f"{name}.{layer}"
        for embedder, given in names.items()
        for name, *layers in (given.split(),)
        for number, layer in enumerate(layers, 1)
    }


_DOUBLE = BlockNames(
    "double_blocks",
    {
        "norm1.linear": "img_mod.lin",
        "norm1_context.linear": "txt_mod.lin",
        "attn.to_out.0": "img_attn.proj",
        "attn.to_add_out": "txt_attn.proj",
        "ff.net.0.proj": "img_mlp.0",
        "ff.net.2": "img_mlp.2",
        "ff_context.net.0.proj": "txt_mlp.0",
        "ff_context.net.2": "txt_mlp.2",
    },
    {"img_attn.qkv": _QKV, "txt_attn.qkv": _ADDED_QKV},
)
_SINGLE = BlockNames(
    "single_blocks",
    {"norm.linear": "modulation.lin", "proj_out": "linear2"},
    {"linear1": (*_QKV, "proj_mlp")},
)
_JOINT = BlockNames(
    "joint_blocks",
    {
        "norm1.linear": "x_block.adaLN_modulation.1",
        "norm1_context.linear": "context_block.adaLN_modulation.1",
        "attn.to_out.0": "x_block.attn.proj",
        "attn.to_add_out": "context_block.attn.proj",
        "attn2.to_out.0": "x_block.attn2.proj",
        "ff.net.0.proj": "x_block.mlp.fc1",
        "ff.net.2": "x_block.mlp.fc2",
        "ff_context.net.0.proj": "context_block.mlp.fc1",
        "ff_context.net.2": "context_block.mlp.fc2",
    },
    {
        "x_block.attn.qkv": _QKV,
        "x_block.attn2.qkv": _SECOND_QKV,
        "context_block.attn.qkv": _ADDED_QKV,
    },
)
_LAST = {
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}

FLUX = LayerNames(
    {"transformer_blocks": _DOUBLE, "single_transformer_blocks": _SINGLE},
    {
        **_embedders(
            timestep="time_in in_layer out_layer",
            text="vector_in in_layer out_layer",
            guidance="guidance_in in_layer out_layer",
        ),
        "context_embedder": "txt_in",
        "x_embedder": "img_in",
        **_LAST,
    },
)
"""Names those of Flux.1, https://github.com/black-forest-labs/flux."""

SD3 = LayerNames(
    {"transformer_blocks": _JOINT},
    {
        **_embedders(timestep="t_embedder mlp.0 mlp.2", text="y_embedder mlp.0 mlp.2"),
        "context_embedder": "context_embedder",
        "pos_embed.proj": "x_embedder.proj",
        **_LAST,
    },
)
"""Names those of Stable Diffusion 3 and 3.5, https://github.com/Stability-AI/sd3.5."""

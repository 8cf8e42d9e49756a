"""Write ControlNets with random weights for tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strop.bench.pipelines.parts import controlnet, stir
from strop.models.sprites import load_from


def write_controlnet(folder: Path, model: Path, **changes: Any) -> None:
    config = load_from(model).unet.config
    shared = ("block_out_channels", "down_block_types", "attention_head_dim", "norm_num_groups")
    same = {name: config[name] for name in (*shared, "layers_per_block", "cross_attention_dim")}
    halved = {"conditioning_embedding_out_channels": (8, 16, 32)}  # twice, as by the autoencoder
    net = controlnet(**(same | halved | changes))
    stir(net)
    net.save_pretrained(folder)

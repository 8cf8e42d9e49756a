"""Whole workflows of Flux, Wan, Qwen-Image and Z-Image in ComfyUI itself, with weights as users
have them.

COMFYUI_DIR names a checkout, as for the other tests of the real ComfyUI, and COMFYUI_GGUF_DIR one
of the node pack ComfyUI-GGUF. Models are small, and made by nodes of ``small_nodes.py``.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.comfyui import server
from tests.comfyui.test_real_comfyui import assert_same
from tests.comfyui.workflows import Graph, node

CHECKOUT = os.environ.get("COMFYUI_DIR", "")
OF_GGUF = os.environ.get("COMFYUI_GGUF_DIR", "")
PYTHON = os.environ.get("COMFYUI_PYTHON", sys.executable)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="COMFYUI_DIR names no checkout of ComfyUI"),
]
without_gguf = pytest.mark.skipif(
    not OF_GGUF, reason="COMFYUI_GGUF_DIR names no checkout of ComfyUI-GGUF"
)
LORA = "small.safetensors"
# A layer that each family has, and the rows and columns of its weight.
LAYERS = {
    "flux": ("double_blocks.0.img_attn.proj", 64, 64),
    "wan": ("blocks.0.self_attn.o", 64, 64),
    "qwen_image": ("transformer_blocks.0.attn.to_q", 64, 64),
    "z_image": ("layers.0.attention.out", 256, 256),
}
# Graphs of a batch of 1 and of a larger one; a frame of Qwen-Image is taken for a video's at first.
MOST_GRAPHS = {"flux": 2, "wan": 1, "qwen_image": 3, "z_image": 3}


def write_loras(folder: Path) -> None:
    source = torch.manual_seed(0)
    folder.mkdir(parents=True)
    for family, (layer, rows, columns) in LAYERS.items():
        key = f"diffusion_model.{layer}"
        up = torch.randn(rows, 4, generator=source)
        down = torch.randn(4, columns, generator=source)
        found = {f"{key}.lora_up.weight": up, f"{key}.lora_down.weight": down}
        save_file(found, folder / f"{family}-{LORA}")


@pytest.fixture(scope="module")
def comfy(
    tmp_path_factory: pytest.TempPathFactory, cache_folder: Path
) -> Iterator[server.ComfyServer]:
    folder = tmp_path_factory.mktemp("families")
    write_loras(folder / "models" / "loras")
    (folder / "custom_nodes" / "small").mkdir(parents=True)
    own = Path(__file__).with_name("small_nodes.py")
    shutil.copy(own, folder / "custom_nodes" / "small" / "__init__.py")
    if OF_GGUF:
        shutil.copytree(OF_GGUF, folder / "custom_nodes" / "ComfyUI-GGUF")
    flag = "--use-pytorch-cross-attention"
    with server.started(Path(CHECKOUT), PYTHON, folder, cache_folder, flag) as found:
        yield found


def workflow(
    family: str,
    weights: str,
    *,
    strop: bool,
    width: int = 64,
    batch: int = 1,
    words: tuple[int, int] = (7, 7),
    lora: bool = False,
) -> Graph:
    """Return a workflow that saves a latent of 64 x ``width`` pixels; Wan's has three frames."""
    size = {"width": width, "height": 64, "batch_size": batch}
    latent = node("EmptySD3LatentImage", **size)
    if family == "wan":
        latent = node("EmptyHunyuanLatentVideo", **size, length=9)
    graph = {
        "load": node("SmallModel", family=family, weights=weights),
        "prompt": node("SmallPrompt", seed=1, length=words[0]),
        "without": node("SmallPrompt", seed=2, length=words[1]),
        "latent": latent,
    }
    model = ["load", 0]
    if lora:
        name = f"{family}-{LORA}"
        graph["lora"] = node("LoraLoaderModelOnly", model=model, lora_name=name, strength_model=1.0)
        model = ["lora", 0]
    graph["strop"] = node("StropOptimizeModel", model=model, enabled=strop)
    how = {"seed": 3, "steps": 2, "cfg": 2.0, "sampler_name": "euler", "scheduler": "simple"}
    how |= {"positive": ["prompt", 0], "negative": ["without", 0], "latent_image": ["latent", 0]}
    graph["draw"] = node("KSampler", model=["strop", 0], denoise=1.0, **how)
    graph["save"] = node("SaveLatent", samples=["draw", 0], filename_prefix="latent")
    graph["report"] = node("StropReport", after=["draw", 0], model=["strop", 0])
    return graph


def drawn(comfy: server.ComfyServer, *args: str, **how: Any) -> tuple[Tensor, str]:
    shown = comfy.run(workflow(*args, **how))
    (file,) = comfy.saved(shown, "latents")
    return load_file(file)["latent_tensor"], shown["report"]["text"][0]


def num_graphs(report: str) -> int:
    """Return how many graphs a report says there are; none where nothing ran compiled."""
    found = re.search(r"^(\d+) graph", report, re.MULTILINE)
    return int(found[1]) if found else 0


CASES = ({}, {"width": 96, "words": (9, 9)}, {"words": (12, 4)}, {"batch": 2, "words": (30, 30)})


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize(
    "weights",
    [
        "fp32",
        "bf16",
        "fp8",
        "fp8 scaled",
        *(pytest.param(q, marks=without_gguf) for q in ("Q8_0", "Q4_0")),
    ],
)
def test_a_family_with_weights_of_a_kind(family: str, weights: str, comfy: Any) -> None:
    """Sizes, lengths of texts, batches and adapters: few graphs, and the latents of the plain
    model, those of GGUF within what its own fp16 leaves."""
    for how in CASES:
        found, report = drawn(comfy, family, weights, strop=True, **how)
        expected, _ = drawn(comfy, family, weights, strop=False, **how)
        assert_same(found, expected)
    assert "(0 eager" in report
    counted = num_graphs(report)
    assert 0 < counted <= MOST_GRAPHS[family]
    plain = drawn(comfy, family, weights, strop=True)[0]
    adapted, report = drawn(comfy, family, weights, strop=True, lora=True)
    expected, _ = drawn(comfy, family, weights, strop=False, lora=True)
    assert_same(adapted, expected)
    assert not torch.allclose(adapted, plain, rtol=0.05)
    assert "ran without Strop" not in report
    again, report = drawn(comfy, family, weights, strop=True)
    assert torch.equal(again, plain)
    # An adapter beside codes is another graph, and so may be fp32 weights that come back from one.
    more = 2 if weights == "fp32" or weights.startswith("Q") else 1
    assert num_graphs(report) <= more * counted, report

"""The node pack in ComfyUI itself, from the checkout that COMFYUI_DIR names, without a browser.

COMFYUI_PYTHON names the Python that has what ComfyUI needs, if that is another one. Models are
written here in its formats. Latents and pictures are those without the nodes.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tests.comfyui import checkpoint, server, workflows
from tests.comfyui.workflows import LORAS, text_to_latent

CHECKOUT = os.environ.get("COMFYUI_DIR", "")
PYTHON = os.environ.get("COMFYUI_PYTHON", sys.executable)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="COMFYUI_DIR names no checkout of ComfyUI"),
]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for ComfyUI: small models, and a picture."""
    folder = tmp_path_factory.mktemp("comfyui")
    checkpoint.write_checkpoint(folder / "models/checkpoints" / workflows.CHECKPOINT)
    checkpoint.write_control_net(folder / "models/controlnet" / workflows.CONTROL_NET)
    for seed, name in enumerate(LORAS):
        checkpoint.write_lora(folder / "models/loras" / name, seed)
    pixels = torch.randint(256, (32, 32, 3), generator=torch.manual_seed(0), dtype=torch.uint8)
    (folder / "input").mkdir()
    Image.fromarray(pixels.numpy()).save(folder / "input" / workflows.PICTURE)
    return folder


@pytest.fixture(scope="module")
def comfy(models: Path, cache_folder: Path) -> Iterator[server.ComfyServer]:
    """A server with torch's attention, which ComfyUI takes by itself on a GPU."""
    flag = "--use-pytorch-cross-attention"
    with server.started(Path(CHECKOUT), PYTHON, models, cache_folder, flag) as found:
        yield found


def latent(comfy: server.ComfyServer, **how: Any) -> tuple[Tensor, str]:
    """Return the latent that a workflow draws, and Strop's report."""
    shown = comfy.run(text_to_latent(**how))
    (file,) = comfy.saved(shown, "latents")
    return load_file(file)["latent_tensor"], shown["report"]["text"][0]


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Compare at 60 dB of the range, and at a spread that no empty picture has."""
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    span = float(expected.max() - expected.min())
    assert float(expected.std()) > span / 100
    error = float((found - expected).double().square().mean().sqrt())
    assert error <= span * 1e-3, (error, span)


def compare(comfy: server.ComfyServer, **how: Any) -> str:
    """Draw with the node and without it, and return the report of the former."""
    found, report = latent(comfy, **how)
    expected, _ = latent(comfy, **how, strop=False)
    assert_same(found, expected)
    return report


def graphs(report: str) -> int:
    """Return how many graphs the report says there are, none of which was compiled again."""
    found = re.search(r"(\d+) graphs?, 0 recompiles", report)
    assert found, report
    assert "(0 eager," in report
    return int(found[1])


def test_sizes_and_adapters_that_change_between_prompts(comfy) -> None:
    """Text to latent: other sizes, and LoRAs that come, change and go. One graph serves all."""
    first, second = LORAS
    seen = []
    for width, loras in (
        (32, ()),
        (48, (first,)),
        (32, (second,)),
        (32, ()),
        (32, (first, second)),
    ):
        report = compare(comfy, width=width, loras=loras)
        seen.append((graphs(report), latent(comfy, width=width, loras=loras)[0]))
    assert {count for count, _ in seen} == {1}
    assert not torch.allclose(seen[2][1], seen[3][1], rtol=0.05)
    assert torch.equal(seen[0][1], seen[3][1])


def test_batches_pictures_and_masks(comfy) -> None:
    compare(comfy, batch=2)
    compare(comfy, picture=True)
    report = compare(comfy, mask=True)
    assert graphs(report) == 1


def test_parts_of_a_picture_with_prompts_of_their_own(comfy) -> None:
    assert graphs(compare(comfy, area=True, width=96, height=64)) == 1


def test_a_controlnet_on_and_off(comfy) -> None:
    """One graph more, for calls with its lists."""
    without, _ = latent(comfy)
    for width in (32, 48, 32):
        report = compare(comfy, control=True, width=width)
    assert graphs(report) == 2
    assert_same(latent(comfy)[0], without)


def test_a_node_that_patches_the_model_is_named(comfy) -> None:
    found, report = latent(comfy, patch=True)
    expected, _ = latent(comfy, patch=True, strop=False)
    assert torch.equal(found, expected)
    assert "calls ran without Strop" in report
    assert "FreeU" in report
    assert comfy.said.count("Strop leaves the model as it is") >= 1


def test_an_interrupt_stops_a_prompt(comfy) -> None:
    expected, _ = latent(comfy, seed=5)
    done: list[Any] = []
    work = threading.Thread(target=lambda: done.append(comfy.run(text_to_latent(steps=5000))))
    work.start()
    time.sleep(5)
    comfy.ask("/interrupt", {})
    work.join(120)
    assert done == [None]
    assert_same(latent(comfy, seed=6)[0], latent(comfy, seed=6, strop=False)[0])
    assert not torch.equal(expected, latent(comfy, seed=6)[0])


def picture(comfy: server.ComfyServer, **how: Any) -> tuple[Tensor, Tensor, str]:
    shown = comfy.run(workflows.prompt_to_picture(**how))
    (file,), (saved,) = comfy.saved(shown, "images"), comfy.saved(shown, "latents")
    image = Image.open(file).convert("RGB")
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    shape = image.height, image.width, 3
    report = shown["last"]["text"][0]
    return pixels.view(shape).double(), load_file(saved)["latent_tensor"], report


def test_a_vae_and_clip(comfy) -> None:
    for width, text in ((32, "a red circle"), (48, "a much longer prompt about a blue square")):
        found, code, report = picture(comfy, strop=True, width=width, text=text)
        expected, plain, _ = picture(comfy, strop=False, width=width, text=text)
        assert_same(code, plain)
        assert float(expected.std()) > 5
        assert float((found - expected).square().mean()) <= 255**2 * 1e-6
    of_parts = re.findall(r"^(\d+) graphs?, 0 recompiles", report, re.MULTILINE)
    assert of_parts == ["1", "1", "1"], report
    assert report.count("(0 eager,") == 3, report


def test_the_switch(models, cache_folder) -> None:
    """Every model runs compiled without a node, and a node turns it off for a branch. This server
    has the attention that ComfyUI takes on a CPU."""
    with server.started(Path(CHECKOUT), PYTHON, models, cache_folder, COMFYUI_STROP="1") as comfy:
        graph = text_to_latent()
        graph["draw"]["inputs"]["model"] = graph["report"]["inputs"]["model"] = ["load", 0]
        del graph["strop"]
        shown = comfy.run(graph)
        (file,) = comfy.saved(shown, "latents")
        assert graphs(shown["report"]["text"][0]) == 1
        calls = int(re.search(r"(\d+) calls \(0 eager", shown["report"]["text"][0])[1])
        expected, report = latent(comfy, strop=False)
        assert f"{calls} calls (0 eager" in report
        assert_same(load_file(file)["latent_tensor"], expected)

"""The code of docs/lora.md runs, in a folder that holds what it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.scripts import run_script

ROOT = Path(__file__).parents[2]
(BLOCK,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/lora.md").read_text(), re.S | re.M)


def _save_adapter(model: Path, file: Path, rank: int) -> None:
    from diffusers import StableDiffusionPipeline
    from peft import LoraConfig, get_peft_model_state_dict

    pipe = StableDiffusionPipeline.from_pretrained(model, safety_checker=None)
    torch.manual_seed(rank)
    config = LoraConfig(r=rank, init_lora_weights=False, target_modules=["to_q", "to_v"])
    pipe.unet.add_adapter(config)
    layers = get_peft_model_state_dict(pipe.unet)
    StableDiffusionPipeline.save_lora_weights(
        file.parent, unet_lora_layers=layers, weight_name=file.name
    )


@pytest.mark.slow
def test_the_code_runs(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "my-model").symlink_to(tiny_model)
    for rank, name in enumerate(("style", "detail"), 2):
        _save_adapter(tiny_model, tmp_path / f"{name}.safetensors", rank)
    page = tmp_path / "page.py"
    page.write_text(BLOCK)
    run_script(page)
    assert {"both.png", "none.png"} <= {file.name for file in tmp_path.iterdir()}

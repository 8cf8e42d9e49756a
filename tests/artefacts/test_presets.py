"""``strop build --model sd15`` builds for the models that go by these names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import strop
from strop.api import dispatchers_of
from strop.artefacts.building import CARDS, _parts
from strop.artefacts.planning import PlanningDispatcher
from strop.artefacts.skeletons import PRESETS, model_folder, pipeline_of, usual_dtype
from strop.diffusion.pipeline import optimize_pipeline
from strop.runtime.build.ahead import AheadLoader
from strop.runtime.build.processors import target_name
from tests.artefacts.test_artefacts import forbid_compilers, forget, fresh_process, options
from tests.artefacts.test_building import forbid_gpu_compilers, needs_gpu

__all__ = ["fresh_process"]  # a fixture, which runs by itself
# as published
NUM_WEIGHTS = {
    "sd15": {"unet": 859_520_964, "vae": 83_653_863, "text_encoder": 123_060_480},
    "sdxl": {
        "unet": 2_567_463_684,
        "vae": 83_653_863,
        "text_encoder": 123_060_480,
        "text_encoder_2": 694_659_840,
    },
    "flux": {
        "transformer": 11_901_408_320,
        "vae": 83_819_683,
        "text_encoder": 123_060_480,
        "text_encoder_2": 4_762_310_656,
    },
}
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 32,
    "vocab_size": 49408,
}
_VAE = {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1, "sample_size": 64}
_UNET = {"layers_per_block": 1, "sample_size": 8}
TINY: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "sd15": {
        "unet": _UNET | {"block_out_channels": [32, 64, 64, 64], "cross_attention_dim": 32},
        "vae": _VAE,
        "text_encoder": _CLIP,
    },
    "sdxl": {
        "unet": _UNET
        | {
            "block_out_channels": [32, 64, 64],
            "attention_head_dim": [1, 2, 2],
            "transformer_layers_per_block": [1, 1, 1],
            "cross_attention_dim": 64,
            "projection_class_embeddings_input_dim": 6 * 256 + 32,
        },
        "vae": _VAE,
        "text_encoder": _CLIP,
        "text_encoder_2": _CLIP,
    },
    "flux": {
        "transformer": {
            "num_attention_heads": 1,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
        },
        "vae": _VAE,
        "text_encoder": _CLIP,
        "text_encoder_2": {
            "d_model": 32,
            "d_ff": 64,
            "d_kv": 16,
            "num_heads": 2,
            "num_layers": 2,
            "vocab_size": 64,
        },
    },
}


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def shrunk(name: str, folder: Path) -> Path:
    """The preset with few and narrow layers."""
    shutil.copytree(model_folder(name), folder)
    for part, changes in TINY[name].items():
        file = folder / part / "config.json"
        config = json.loads(file.read_text())
        assert config.keys() >= changes.keys()
        file.write_text(json.dumps(config | changes))
    return folder


def with_weights(folder: Path, whole: Path) -> Path:
    """The same model with small weights."""
    pipe, source = pipeline_of(folder, torch.float32), torch.Generator().manual_seed(0)
    for module in modules_of(pipe).values():
        for weight in module.parameters():
            weight.data.normal_(0, 0.05, generator=source)
    pipe.save_pretrained(whole)
    return whole


def planned_keys(pipe: Any, folder: Path, target: str, text: str) -> dict[str, set[str]]:
    """Where the plans of all modules are kept, by module."""
    pipe.set_progress_bar_config(disable=True)
    given = options(folder)
    loader = AheadLoader(target, CARDS[target], given)
    kind = partial(PlanningDispatcher, loader=loader, place=torch.device("cuda", 0))
    optimize_pipeline(pipe, given, kind=kind)
    with torch.no_grad():
        pipe(text, num_inference_steps=2, output_type="pt", height=64, width=64)
    found = {}
    for name, part in _parts(pipe).items():
        found[name] = {key for variant in part.variants.all for key in variant.stored_keys}
    return found


def test_there_is_a_test_for_each_preset() -> None:
    assert set(PRESETS) == {*NUM_WEIGHTS} == {*TINY}
    for name in PRESETS:
        assert (model_folder(name) / "model_index.json").is_file()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_weights_of_the_published_models(name: str) -> None:
    pipe = pipeline_of(model_folder(name), torch.bfloat16)
    parts = modules_of(pipe)
    counts = {part: sum(p.numel() for p in module.parameters()) for part, module in parts.items()}
    assert counts == NUM_WEIGHTS[name]
    tokenizers = [part for part in pipe.components if part.startswith("tokenizer")]
    lengths = {"tokenizer": 77, "tokenizer_2": 512 if name == "flux" else 77}
    for part in tokenizers:
        assert getattr(pipe, part).model_max_length == lengths[part]


@pytest.mark.filterwarnings("ignore")  # of diffusers: numpy's in a scheduler, a deprecated method
@pytest.mark.parametrize("name", PRESETS)
def test_a_pipeline_with_weights_finds_the_plans_of_a_preset(name: str, tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    folder = shrunk(name, tmp_path / "configs")
    dtype = usual_dtype(folder)
    ahead = planned_keys(pipeline_of(folder, dtype), tmp_path / "cache", "sm_90", "")
    whole = with_weights(folder, tmp_path / "whole")
    pipe = DiffusionPipeline.from_pretrained(whole, torch_dtype=dtype)
    there = planned_keys(pipe, tmp_path / "cache", "sm_90", "a red circle")
    assert there == ahead
    assert all(keys for part, keys in ahead.items() if part != "vae.encoder")


def test_the_usual_types() -> None:
    assert [usual_dtype(model_folder(name)) for name in PRESETS] == [
        torch.float16,
        torch.float16,
        torch.bfloat16,
    ]


def test_a_folder_of_the_same_name_is_named_by_its_path() -> None:
    assert model_folder("./sd15") == Path("sd15")
    assert model_folder("sd15").parent.name == "presets"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_shared_and_kept_in_fp32_as_from_pretrained_does(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    from diffusers import WanTransformer3DModel
    from transformers import T5Config, T5EncoderModel

    from strop.artefacts.skeletons import _part

    small = {"num_heads": 2, "num_layers": 1, "vocab_size": 64, "feed_forward_proj": "gated-gelu"}
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "num_layers": 1}
    wan = {"out_channels": 4, "text_dim": 8, "freq_dim": 8, "ffn_dim": 16}
    made = {
        "transformers": T5EncoderModel(T5Config(d_model=32, d_ff=64, d_kv=16, **small)),
        "diffusers": WanTransformer3DModel(**sizes, **wan),
    }
    for library, module in made.items():
        folder = tmp_path / library
        module.save_pretrained(folder)
        loaded = type(module).from_pretrained(folder, torch_dtype=dtype)
        ours = _part(folder, [library, type(module).__name__], dtype)
        weights = [
            {name: (weight.dtype, weight.shape) for name, weight in one.named_parameters()}
            for one in (loaded, ours)
        ]
        assert weights[0] == weights[1]
    assert any(kind == torch.float32 for kind, _ in weights[1].values())


@pytest.mark.filterwarnings("ignore")  # numpy's, of diffusers' scheduler
@pytest.mark.slow
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.nightly),
        pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu]),
    ],
)
def test_a_preset_that_was_built_elsewhere_draws(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import DiffusionPipeline

    folder, path = shrunk("sd15", tmp_path / "configs"), tmp_path / "x.strop"
    target = target_name()
    if device == "cuda":
        target = "sm_{}{}".format(*torch.cuda.get_device_capability())
        if target not in CARDS:
            pytest.skip(f"no card stands for {target}")
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "STROP_CACHE_DIR": str(tmp_path / "elsewhere"),
    }
    words = ["build", "--model", str(folder), "--target", target, "-o", str(path)]
    command = [sys.executable, "-c", "from strop.cli import main; main()", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    dtype = usual_dtype(folder) if device == "cuda" else torch.float32
    whole = with_weights(folder, tmp_path / "whole")
    pipe, eager = (
        DiffusionPipeline.from_pretrained(whole, torch_dtype=dtype).to(device) for _ in range(2)
    )
    (forbid_gpu_compilers if device == "cuda" else forbid_compilers)(monkeypatch)
    forget()
    strop.load(pipe, path, trust=True, options=options(tmp_path / "after"))
    call: dict[str, Any] = {"width": 128, "height": 64, "num_inference_steps": 2}
    pictures = [
        one("a red circle", generator=torch.manual_seed(0), output_type="pt", **call).images
        for one in (pipe, eager)
    ]
    # many layers of a network with random weights, in half types on a GPU
    atol = 5e-2 if device == "cuda" else 1e-3
    torch.testing.assert_close(*pictures, rtol=0, atol=atol)
    assert not any(part.variants.num_captures for part in dispatchers_of(pipe).values())

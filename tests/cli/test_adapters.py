"""LoRA, ControlNet and IP-Adapter from the command line, on tiny models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file, save_file

from strop.bench.pipelines.parts import clip_vision
from strop.bench.pipelines.stable import ip_adapter_state
from strop.cli import pictures
from strop.models.sprites import load_from
from tests.control_files import write_controlnet

from .conftest import Invoke, said

pytestmark = pytest.mark.filterwarnings("ignore")

COMMON = ("--steps", "2", "--size", "64x32", "--device", "cpu")
PROMPT = "a red circle above a blue square"


def write_lora(file: Path, model: Path, seed: int) -> None:
    unet: Any = load_from(model).unet
    torch.manual_seed(seed)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    config = LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False)
    unet.add_adapter(config, "made")
    layers = get_peft_model_state_dict(unet, adapter_name="made")
    save_file({f"unet.{key}": value.contiguous() for key, value in layers.items()}, file)


def write_ip_adapter(folder: Path, model: Path) -> None:
    state = ip_adapter_state(load_from(model).unet)
    flat = {f"{part}.{key}": value for part in state for key, value in state[part].items()}
    folder.mkdir(exist_ok=True)
    save_file(flat, folder / "ip.safetensors")
    clip_vision().save_pretrained(folder / "image_encoder")


def pixels(file: Path) -> torch.Tensor:
    with Image.open(file) as picture:
        return torch.tensor(list(picture.convert("RGB").tobytes())) / 255


@pytest.fixture(scope="module")
def made(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters for the tiny model, and some that are not for it."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed in (1, 2):
        write_lora(folder / f"style_{seed}.safetensors", tiny_model, seed)
    write_controlnet(folder / "net", tiny_model)
    write_controlnet(folder / "wide", tiny_model, cross_attention_dim=48)
    halved = {"conditioning_embedding_out_channels": (8, 16, 32, 32)}
    write_controlnet(folder / "eighths", tiny_model, **halved)
    write_ip_adapter(folder / "ip", tiny_model)
    shutil.copy(folder / "ip" / "ip.safetensors", folder / "bare.safetensors")
    state = load_file(folder / "style_1.safetensors")
    other = {key.replace("attentions", "other"): value for key, value in state.items()}
    save_file(other, folder / "other.safetensors")
    torch.save(state, folder / "old.bin")
    for name, size in (("edges.png", (64, 32)), ("square.png", (40, 40))):
        noise = torch.rand(3, *size[::-1], generator=torch.Generator().manual_seed(size[0]))
        pictures.to_picture(noise).save(folder / name)
    return folder


@pytest.fixture
def files(made: Path, as_sprites: Path, tmp_path: Path) -> Path:
    """The folder of the command line, with a copy of them."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def by_diffusers(model: Path, prepare: Any, **more: Any) -> torch.Tensor:
    """What a user's script of plain diffusers draws."""
    pipe: Any = load_from(model)
    pipe.set_progress_bar_config(disable=True)
    pipe = prepare(pipe) or pipe
    drawn = pipe(
        PROMPT,
        width=64,
        height=32,
        num_inference_steps=2,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        **more,
    ).images[0]
    return torch.tensor(list(pictures.to_picture(drawn).tobytes())) / 255


def test_several_loras_at_their_scales(invoke: Invoke, files: Path, as_sprites: Path) -> None:
    words = ("--lora", "style_1.safetensors:0.5", "--lora", "style_2.safetensors")
    result = invoke("generate", PROMPT, "--compare", *words, *COMMON)
    assert result.exit_code == 0, result.output
    assert "3 graphs" in said(result)
    assert "in eager" not in said(result)

    def load(pipe: Any) -> None:
        for name in ("style_1", "style_2"):
            pipe.load_lora_weights(files / f"{name}.safetensors", adapter_name=name)
        pipe.set_adapters(["style_1", "style_2"], [0.5, 1.0])

    wanted = by_diffusers(as_sprites, load)
    assert pictures.psnr_db(pixels(files / "out.png"), wanted) > 50
    assert invoke("generate", PROMPT, "-o", "none.png", *COMMON).exit_code == 0
    assert pictures.psnr_db(pixels(files / "none.png"), wanted) < 40


def test_a_controlnet_with_its_picture(invoke: Invoke, files: Path, as_sprites: Path) -> None:
    words = ("--controlnet", "net", "--control-image", "edges.png:0.7")
    result = invoke("generate", PROMPT, *words, *COMMON)
    assert result.exit_code == 0, result.output
    assert "4 graphs" in said(result)
    assert "warning" not in said(result)

    from diffusers import ControlNetModel, StableDiffusionControlNetPipeline

    def add(pipe: Any) -> Any:
        net = ControlNetModel.from_pretrained(files / "net")
        return StableDiffusionControlNetPipeline.from_pipe(pipe, controlnet=net)

    more = {"image": Image.open(files / "edges.png"), "controlnet_conditioning_scale": 0.7}
    wanted = by_diffusers(as_sprites, add, **more)
    assert pictures.psnr_db(pixels(files / "out.png"), wanted) > 50


def test_everything_at_once_with_a_picture_of_another_size(
    invoke: Invoke, files: Path, as_sprites: Path
) -> None:
    nets = ("--controlnet", "net", "--control-image", "square.png") * 2
    lora = ("--lora", "style_1.safetensors")
    ip = ("--ip-adapter", "ip", "--ip-image", "square.png:0.6")
    result = invoke("generate", PROMPT, *nets, *lora, *ip, *COMMON)
    assert result.exit_code == 0, result.output
    assert "square.png is 40x40: it is stretched to 64x32" in said(result)
    assert "in eager" not in said(result)
    assert Image.open(files / "out.png").size == (64, 32)


def test_an_ip_adapter_with_its_picture(invoke: Invoke, files: Path, as_sprites: Path) -> None:
    words = ("--ip-adapter", "ip/ip.safetensors", "--ip-image", "square.png:0.6")
    result = invoke("generate", PROMPT, *words, *COMMON)
    assert result.exit_code == 0, result.output

    def add(pipe: StableDiffusionPipeline) -> None:
        pipe.load_ip_adapter(str(files / "ip"), subfolder="", weight_name="ip.safetensors")
        pipe.set_ip_adapter_scale(0.6)

    wanted = by_diffusers(as_sprites, add, ip_adapter_image=Image.open(files / "square.png"))
    assert pictures.psnr_db(pixels(files / "out.png"), wanted) > 50


def test_a_lora_with_layers_that_the_model_lacks_is_said(invoke: Invoke, files: Path) -> None:
    state = load_file(files / "style_1.safetensors")
    extra = {f"unet.other.to_q.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    save_file(state | extra, files / "more.safetensors")
    result = invoke("generate", PROMPT, "--lora", "more.safetensors", "--no-optimize", *COMMON)
    assert result.exit_code == 0, result.output
    count = len(state) + 2
    assert f"more.safetensors: 2 tensors of {count} have no place in this model" in said(result)


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--lora", "absent.safetensors"], 1, "there is no file absent.safetensors"),
        (
            ["--lora", "style_1.safetensors:big"],
            2,
            "is no scale; write FILE, or FILE:0.8",
        ),
        (["--lora", "style_1.safetensors:nan"], 2, "is not within -100 and 100"),
        (["--lora", "edges.png"], 1, "edges.png is damaged: it does not begin as safetensors do"),
        (["--lora", "other.safetensors"], 1, "adapts a layer that the unet"),
        (["--lora", "old.bin"], 1, "old.bin is a pickle"),
        (["--controlnet", "net"], 2, "give one --control-image for each --controlnet"),
        (["--ip-image", "edges.png"], 2, "give one --ip-image for each --ip-adapter"),
        (["--controlnet", "net", "--control-image", "no.png"], 1, "there is no picture no.png"),
        (["--controlnet", "net", "--control-image", "old.bin"], 1, "old.bin is no picture"),
        (["--controlnet", "ip", "--control-image", "edges.png"], 1, "there is no ControlNet in ip"),
        (
            ["--controlnet", "wide", "--control-image", "edges.png"],
            1,
            "was made for another model: its cross_attention_dim is 48",
        ),
        (
            ["--controlnet", "eighths", "--control-image", "edges.png"],
            1,
            "its pixels per latent is 8, that of sprites is 4",
        ),
        (["--ip-adapter", "bare.safetensors", "--ip-image", "edges.png"], 1, "an image encoder"),
        (
            ["--ip-adapter", "style_1.safetensors", "--ip-image", "edges.png"],
            1,
            "is no IP-Adapter",
        ),
    ],
)
def test_mistakes(invoke: Invoke, files: Path, words: list[str], code: int, expected: str) -> None:
    result = invoke("generate", PROMPT, *words, *COMMON)
    assert result.exit_code == code, result.output
    assert expected in said(result)
    assert "Traceback" not in result.output
    assert not (files / "out.png").exists()

"""Writes a model as a diffusers folder in fp16."""

import shutil
from pathlib import Path

import torch
from torch import nn

from strop.models.sprites import network, vocabulary
from strop.models.sprites.settings import NoiseSettings

FILE_LIMIT, TOTAL_LIMIT = 16 * 1024 * 1024 - 1, 16_000_000
"""Most bytes that one weights file, and all of them together, may have."""


def export(built: network.Parts, noise: NoiseSettings, out: Path) -> Path:
    """Write `out/weights`, in place of an older one; returns the folder.

    Args:
        built: The parts of the model on the CPU; they are fp16 afterwards.
        noise: The noise schedule.
        out: The folder of the training.

    Raises:
        ValueError: a weight is not finite in fp16, or the files are too large to ship.
    """
    fresh, final = out / "weights.new", out / "weights"
    shutil.rmtree(fresh, ignore_errors=True)
    _write(built, noise, fresh)
    _check_size(fresh)
    shutil.rmtree(final, ignore_errors=True)
    fresh.rename(final)
    return final


def _write(built: network.Parts, noise: NoiseSettings, folder: Path) -> None:
    for name, module in (("unet", built.unet), ("text", built.text), ("vae", built.vae)):
        nn.Module.to(module, torch.float16)
        for key, tensor in module.state_dict().items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name}.{key} is not finite in fp16; train again with less rate")
    network.pipeline(built, noise).save_pretrained(folder, safe_serialization=True)
    vocabulary.write(folder / "tokenizer")
    for file in folder.rglob("*.*"):
        file.chmod(0o644)


def _check_size(folder: Path) -> None:
    sizes = {file: file.stat().st_size for file in folder.rglob("*.safetensors")}
    for file, size in sizes.items():
        if size > FILE_LIMIT:
            raise ValueError(f"{file} has {size} bytes, at most {FILE_LIMIT} may ship; shrink it")
    total = sum(sizes.values())
    if total > TOTAL_LIMIT:
        raise ValueError(f"{folder} has {total} bytes of weights, at most {TOTAL_LIMIT} may ship")

"""Writes the trained weights as a diffusers folder in fp16."""

import json
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import nn

from strop.models.sprites import checkpoint, network, vocabulary
from strop.models.sprites.settings import Settings

FILE_LIMIT, TOTAL_LIMIT = 16 * 1024 * 1024 - 1, 16_000_000
"""Most bytes that one weights file, and all of them together, may have."""


def export(settings: Settings, out: Path) -> Path:
    """Write `out/weights` from the averaged weights of the checkpoint; returns the folder."""
    found = checkpoint.find(out / "diffusion.ckpt")
    if found is None:
        raise FileNotFoundError(
            f"no checkpoint at {out / 'diffusion.ckpt'}; run the 'diffusion' verb with this --out"
        )
    average = checkpoint.group(found, "ema")
    built = network.parts(settings)
    built.vae.load_state_dict(AutoencoderKL.from_pretrained(out / "vae").state_dict())
    modules: dict[str, nn.Module] = {"unet": built.unet, "text": built.text}
    for prefix, module in modules.items():
        cut = len(prefix) + 1
        module.load_state_dict(
            {n[cut:]: t for n, t in average.items() if n.startswith(prefix + ".")}
        )
    state = checkpoint.state(found)
    fresh, final = out / "weights.new", out / "weights"
    shutil.rmtree(fresh, ignore_errors=True)
    _write(built, settings, fresh)
    record = {key: state[key] for key in ("step", "total", "images", "elapsed", "settings")}
    (fresh / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    _check_size(fresh)
    shutil.rmtree(final, ignore_errors=True)
    fresh.rename(final)
    return final


def _write(built: network.Parts, settings: Settings, folder: Path) -> None:
    for name, module in (("unet", built.unet), ("text", built.text), ("vae", built.vae)):
        nn.Module.to(module, torch.float16)
        for key, tensor in module.state_dict().items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name}.{key} is not finite in fp16; train again with less rate")
    network.pipeline(built, settings.noise).save_pretrained(folder, safe_serialization=True)
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

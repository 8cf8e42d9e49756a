"""Start and save a ControlNet, which is trained beside a frozen denoiser."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strop.errors import OptionError
from strop.train import files
from strop.train.draws import seed_of
from strop.train.families.control import Control
from strop.train.families.family import Family
from strop.train.settings import Settings

PART = "controlnet"  # its name among a model's parts
_CONFIG = "config.json"


def begin(settings: Settings, family: Family, pipe: Any) -> Any:
    """Return a pipeline with a ControlNet: the one that was given, or a copy of the denoiser's
    first blocks with outputs of zeros.

    Raises OptionError for a ControlNet that belongs to another model, and UnsupportedError for one
    of a kind that is not trained.
    """
    import diffusers

    control = family.control
    given = settings.controlnet_model_name_or_path
    if given:
        made = _loaded(control, settings, Path(given).expanduser(), pipe)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(settings.seed, PART, 0))
            made = control.begun(settings, pipe)
    return getattr(diffusers, control.pipeline).from_pipe(pipe, controlnet=made)


def _loaded(control: Control, settings: Settings, folder: Path, pipe: Any) -> nn.Module:
    import diffusers

    for name in ("num_double_layers", "num_single_layers"):
        if getattr(settings, name) is not None:
            raise OptionError(
                f"{name} is for a new ControlNet, and controlnet_model_name_or_path {folder} has "
                "its own blocks; leave one of the two out"
            )
    path = folder / _CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind = config.get("_class_name")
    except (OSError, ValueError, AttributeError) as error:
        raise OptionError(
            f"there is no ControlNet in {folder}, given as controlnet_model_name_or_path "
            f"({error}); give a diffusers folder, with {_CONFIG}"
        ) from error
    if kind != control.kind:
        raise OptionError(
            f"{folder} holds a {kind}; training is built for a {control.kind} of this model"
        )
    try:
        made: nn.Module = getattr(diffusers, control.kind).from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise OptionError(f"cannot load the ControlNet in {folder}: {error}") from error
    control.check(folder, made.config, pipe)  # type: ignore[arg-type]
    return made


def save(net: Any, output: Path) -> None:
    """Write a ControlNet as a diffusers folder into ``output``, where other files may lie.
    ``config.json`` comes last: a folder that has it is complete."""
    fresh = output / f"{PART}{files.PART}"
    shutil.rmtree(fresh, ignore_errors=True)
    net.save_pretrained(fresh, safe_serialization=True)
    (output / _CONFIG).unlink(missing_ok=True)
    for file in sorted(fresh.iterdir(), key=lambda path: path.name == _CONFIG):
        file.chmod(0o644)  # safetensors lets nobody else read
        files.sync(file)
        file.replace(output / file.name)
    fresh.rmdir()
    files.sync(output)

"""Find and load the ControlNets that ``strop serve --controlnet`` names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli.adapters import check_controlnet, load_controlnet
from strop.cli.mistakes import CommandError
from strop.drawing.request import ControlPicture, PictureRequest

if TYPE_CHECKING:
    import torch

    from strop.cli.models import ModelFolder

_NAME = re.compile(r"[\w.+-]{1,100}")
_POOLED = "global_pool_conditions"


def split_name(text: str) -> tuple[str, Path]:
    """Read "FOLDER" or "NAME=FOLDER"; without a name it is that of the folder. Raises CommandError
    for a name that no client could send."""
    whole = Path(text).expanduser()
    name, is_named, rest = text.partition("=")
    if whole.exists() or not is_named:
        name, folder = whole.resolve().name, whole
    else:
        folder = Path(rest).expanduser()
    if _NAME.fullmatch(name) is None:
        raise CommandError(
            f"{text!r}: a ControlNet is asked for by its name, which has letters, digits, and"
            " . + - _ only; give --controlnet NAME=FOLDER"
        )
    return name, folder


def find_controlnets(given: Sequence[str], model: ModelFolder) -> dict[str, Path]:
    """Return the folders of ControlNets by name. Raises CommandError for one that is not there, is
    not for this model, or has a name that another one has, too."""
    if given and model.is_flux:
        raise CommandError(
            "ControlNets are added to Stable Diffusion and SDXL only; leave out --controlnet"
        )
    found = dict[str, Path]()
    for text in given:
        name, folder = split_name(text)
        if name in found:
            raise CommandError(f"two ControlNets are called {name}; give one as NAME=FOLDER")
        config = check_controlnet(folder, model)
        if config.get(_POOLED):
            raise CommandError(
                f"the ControlNet in {folder} takes means over the whole picture ({_POOLED}), which"
                " strop serve does not build: strop generate --controlnet draws with it"
            )
        found[name] = folder
    return found


def controlled(pipe: Any, folders: Mapping[str, Path], dtype: torch.dtype) -> dict[str, Any]:
    """Return for each ControlNet an optimised pipeline of the parts of ``pipe`` and it. Each is
    compiled by itself, so that no group of them needs another graph."""
    from diffusers import AutoPipelineForText2Image

    import strop

    found = {}
    for name, folder in folders.items():
        net = load_controlnet(folder, dtype, pipe.device)
        made = AutoPipelineForText2Image.from_pipe(pipe, controlnet=net)
        made.set_progress_bar_config(disable=True)
        found[name] = strop.optimize(made)
    return found


def draw_with_each(pipe: Any, controlled: Mapping[str, Any], request: PictureRequest) -> None:
    """Draw with each ControlNet once, so that no request waits for the compiler."""
    from PIL import Image

    from strop.drawing.draw import draw

    picture = Image.new("RGB", (request.size.width, request.size.height))
    nets = {name: one.controlnet for name, one in controlled.items()}
    for name in nets:
        draw(pipe, [replace(request, controls=(ControlPicture(name, picture),))], nets=nets)

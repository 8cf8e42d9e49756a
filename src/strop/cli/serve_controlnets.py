"""Find and load the ControlNets that ``strop serve --controlnet`` names."""

from __future__ import annotations

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


def find_controlnets(given: Sequence[str], model: ModelFolder) -> dict[str, Path]:
    """Return folders by their names, of "FOLDER" or "NAME=FOLDER". Raises CommandError for one that
    has no ControlNet for this model, or a name that another one has, too."""
    if given and model.is_flux:
        raise CommandError("ControlNets are for Stable Diffusion and SDXL; leave out --controlnet")
    found = dict[str, Path]()
    for text in given:
        name, is_named, rest = text.partition("=")
        folder = Path(rest if is_named else text).expanduser().resolve()
        name = name if is_named else folder.name
        if name in found or not name:
            raise CommandError(f"{text}: {name!r} is no name, or taken; give NAME={folder}")
        if check_controlnet(folder, model).get("global_pool_conditions"):
            raise CommandError(
                f"the ControlNet in {folder} takes means over the whole picture, which strop serve"
                " does not build: strop generate --controlnet draws with it"
            )
        found[name] = folder
    return found


def controlled(pipe: Any, folders: Mapping[str, Path], dtype: torch.dtype) -> dict[str, Any]:
    """Return for each ControlNet an optimised pipeline of the parts of ``pipe`` and it: compiled by
    itself, so that no group of them needs another graph."""
    from diffusers import AutoPipelineForText2Image

    import strop

    found = {}
    for name, folder in folders.items():
        net = load_controlnet(folder, dtype, pipe.device)
        found[name] = strop.optimize(AutoPipelineForText2Image.from_pipe(pipe, controlnet=net))
    return found


def draw_with_each(pipe: Any, controlled: Mapping[str, Any], request: PictureRequest) -> None:
    """Draw with each ControlNet once, so that no request waits for the compiler."""
    from PIL import Image

    from strop.drawing.draw import draw

    picture = Image.new("RGB", (request.size.width, request.size.height))
    for name, one in controlled.items():
        asked = replace(request, controls=(ControlPicture(name, picture),))
        draw(pipe, [asked], nets={name: one.controlnet})

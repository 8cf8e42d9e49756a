"""Check arguments that several verbs take, before anything slow starts."""

from __future__ import annotations

import os
import re
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strop.cli.mistakes import CommandError, warn
from strop.drawing.prompts import unread
from strop.drawing.request import PictureSize
from strop.errors import OptionError
from strop.options import Options, use_arch

if TYPE_CHECKING:
    import torch

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
MOST_PIXELS = 4096 * 4096


class DeviceName(StrEnum):
    """Say where a model runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    """Name the type of weights and computation."""

    auto = "auto"
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


def parse_size(text: str | PictureSize) -> PictureSize:
    """Read "96x64": width, then height."""
    found = re.fullmatch(r"(\d{1,5})\s*[xX*]\s*(\d{1,5})", str(text).strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no size; write WIDTHxHEIGHT in pixels, like 96x64")
    return PictureSize(int(found[1]), int(found[2]))


SizeOption = Annotated[
    PictureSize | None,
    typer.Option(
        parser=parse_size,
        metavar="WxH",
        help="Use this width and height in pixels: multiples of 16 for sprites, of 8 for other "
        "models. "
        r"[dim]\[default: 96x64 for sprites, else the model's own][/]",
    ),
]
DeviceOption = Annotated[
    DeviceName, typer.Option(help="Run on this device; auto takes a GPU if there is one.")
]


def parse_arch(text: str | int) -> int:
    """Read "86". Whatever makes Options from now on knows it, in processes started later too."""
    if not str(text).isdigit():
        raise typer.BadParameter(
            f"{text!r} is no architecture; write a number, like 86 for compute capability 8.6"
        )
    arch = int(text)
    if arch:
        try:
            use_arch(arch)
        except OptionError as error:
            raise typer.BadParameter(str(error)) from error
    return arch


ArchOption = Annotated[
    int,
    typer.Option(
        "--arch",
        parser=parse_arch,
        metavar="SM",
        help="Compile, and run on a newer GPU, as if on one of this architecture: 80, 86, 87 or 89."
        r" [dim]\[default: that of the GPU][/]",
        show_default=False,
    ),
]


def nearest_sizes(side: int, factor: int) -> tuple[int, ...]:
    """Return the multiples of ``factor`` around ``side``, or ``side`` itself."""
    if side % factor == 0 and side > 0:
        return (side,)
    below = side // factor * factor
    return (below, below + factor) if below else (factor,)


def check_size(size: PictureSize, factor: int) -> None:
    """Raise BadParameter unless both sides are multiples of ``factor``; names the nearest sizes."""
    widths, heights = (nearest_sizes(side, factor) for side in (size.width, size.height))
    if widths != (size.width,) or heights != (size.height,):
        near = ", ".join(f"{w}x{h}" for w in widths for h in heights)
        raise typer.BadParameter(
            f"{size}: this model draws multiples of {factor} pixels; the nearest: {near}",
            param_hint="'--size'",
        )
    if size.width * size.height > MOST_PIXELS:
        raise typer.BadParameter(
            f"{size} has more than {MOST_PIXELS:,} pixels", param_hint="'--size'"
        )


def check_folder(folder: Path | None) -> None:
    """Raise CommandError unless files can be written into ``folder``; None: nothing is written."""
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"{folder} is a file; give the name of a folder")
    if not folder.exists():
        raise CommandError(f"there is no folder {folder}; create it: mkdir -p {folder}")
    if not os.access(folder, os.W_OK):
        raise CommandError(f"the folder {folder} is not writable; choose another")


def make_folder(folder: Path | None) -> None:
    """Make the folder of results, unless it is there; for behind all that can be wrong with other
    arguments. Raise CommandError where that fails."""
    if folder is not None and not folder.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)  # another rank may be as far
        except OSError as error:
            raise CommandError(f"no folder {folder} can be made: {error.strerror}") from None
    check_folder(folder)


def check_file(path: Path | None) -> None:
    """Raise CommandError unless ``path`` can be written; None: nothing is written."""
    if path is None:
        return
    if path.is_dir():
        raise CommandError(f"{path} is a folder; give the name of a file")
    check_folder(path.parent)


def check_output(path: Path, suffixes: tuple[str, ...] = SUFFIXES) -> None:
    """Raise unless ``path`` can be written: its ending, its folder, and what lies there now."""
    if path.suffix.lower() not in suffixes:
        raise typer.BadParameter(
            f"{path}: the name must end in {', '.join(suffixes)}", param_hint="output file"
        )
    check_file(path)


def chosen_device(device: DeviceName) -> str:
    """ "cpu" or "cuda"; raises BadParameter where there is no GPU, or where it cannot stand in for
    the architecture that --arch or STROP_ARCH names."""
    import torch

    with warnings.catch_warnings(record=True) as said:  # an old driver, say
        warnings.simplefilter("always")
        is_there = torch.cuda.is_available()
    if device is DeviceName.auto:
        device = DeviceName.cuda if is_there else DeviceName.cpu
    if device is DeviceName.cuda and not is_there:
        why = "this torch has no CUDA" if torch.version.cuda is None else "torch finds no GPU"
        why = " ".join(str(said[0].message).split()) if said else why
        raise typer.BadParameter(f"cuda: {why}; use --device cpu", param_hint="'--device'")
    if arch := Options.from_environment().arch:
        _check_arch(arch, device)
    return device.value


def _check_arch(arch: int, device: DeviceName) -> None:
    """Raise BadParameter where the GPU cannot stand in for it, which the first call would find."""
    if device is DeviceName.cpu:
        warn(f"arch={arch} has no effect on a CPU")
        return
    import torch

    from strop.runtime.build.devices import gpu

    try:
        gpu(torch.cuda.current_device()).as_arch(arch)
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint="'--arch'") from error


def chosen_dtype(dtype: Dtype, device: str) -> torch.dtype:
    """Return fp16 on a GPU and fp32 on a CPU unless another type was asked for. A CPU that lacks
    bf16 computes in it all the same, with a warning."""
    import torch

    if dtype is Dtype.auto:
        return torch.float16 if device == "cuda" else torch.float32
    if dtype is Dtype.fp16 and device == "cpu":
        raise typer.BadParameter(
            "fp16: CPUs compute in fp32 or bf16; use --dtype fp32 or --device cuda",
            param_hint="'--dtype'",
        )
    if dtype is Dtype.bf16 and device == "cpu" and not has_bf16():
        warn("this processor multiplies no bf16: fp32 is faster (--dtype fp32)")
    return {Dtype.fp16: torch.float16, Dtype.bf16: torch.bfloat16}.get(dtype, torch.float32)


def has_bf16() -> bool:
    """Tell whether this processor multiplies bf16 as fast as Strop's kernels want it."""
    from strop.runtime.build.processors import processor

    return processor().has_bf16


def check_length(pipe: Any, prompt: str, what: str = "prompt") -> None:
    """Say what a model will not read: diffusers cuts long prompts, in a message of its own."""
    if text := unread(pipe, prompt, what):
        warn(text)


def check_weights(prompt: str, is_sprites: bool, hint: str) -> str:
    """Return a prompt whose brackets are weights, in the spelling of the sprites model if it is one
    for it.

    Raises BadParameter for syntax that is not built, and for words that the model does not know.
    """
    from strop.drawing.emphasis import respelled
    from strop.models.sprites.spelling import spelled

    try:
        text, note = respelled(prompt, spelled if is_sprites else lambda words: (words, ""))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=hint) from error
    if note:
        warn(note)
    return text


def check_prompt(prompt: str, hint: str = "'PROMPT'") -> str:
    """Return a prompt for the sprites model in the spelling it was trained on.

    Raises BadParameter for words that it does not know; warns of captions outside its grammar.
    """
    from strop.models.sprites.spelling import spelled

    try:
        text, note = spelled(prompt)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=hint) from error
    if note:
        warn(note)
    return text

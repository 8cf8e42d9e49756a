"""Options that add to a model: LoRA, ControlNets, IP-Adapters, with their files and scales."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strop.cli.mistakes import CommandError, warn
from strop.drawing.request import PictureSize
from strop.wording import counted

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from strop.cli.models import ModelFolder

PANEL = "Adapters"
_MOST_SCALE = 100.0
# What a ControlNet and a UNet must have in common: the one adds its layers' results to the other's.
_SHARED = ("block_out_channels", "cross_attention_dim", "layers_per_block", "in_channels")
_DOWN = "conditioning_embedding_out_channels"  # one for each halving of its picture, and one more
_NO_LAYERS = (".alpha",)  # ends of keys of a LoRA file that are not tensors of a layer


@dataclass(frozen=True)
class ScaledFile:
    """Hold a path, and how strong the effect of what lies there is to be."""

    path: Path
    scale: float = 1.0


def parse_scaled(text: str | ScaledFile) -> ScaledFile:
    """Read "style.safetensors" or "style.safetensors:0.8"."""
    whole = Path(str(text)).expanduser()
    name, colon, end = str(text).rpartition(":")
    if not colon or whole.exists():
        return ScaledFile(whole)
    try:
        scale = float(end)
    except ValueError as error:
        raise typer.BadParameter(
            f"{end!r} in {str(text)!r} is no scale; write FILE, or FILE:0.8"
        ) from error
    if not math.isfinite(scale) or abs(scale) > _MOST_SCALE:
        raise typer.BadParameter(f"the scale {end} in {str(text)!r} is not within -100 and 100")
    return ScaledFile(Path(name).expanduser(), scale)


LoraOption = Annotated[
    list[ScaledFile] | None,
    typer.Option(
        "--lora",
        parser=parse_scaled,
        metavar="FILE[:SCALE]",
        help="Add this LoRA, a .safetensors file of diffusers, kohya or strop train, or a folder"
        " with one, at this scale (1 if left out). Give it several times for several.",
        rich_help_panel=PANEL,
    ),
]
ControlNetOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--controlnet",
        metavar="FOLDER",
        help="Add the ControlNet in this diffusers folder. It needs a --control-image.",
        rich_help_panel=PANEL,
    ),
]
ControlImageOption = Annotated[
    list[ScaledFile] | None,
    typer.Option(
        "--control-image",
        parser=parse_scaled,
        metavar="FILE[:SCALE]",
        help="Give the ControlNet this picture, such as edges or a depth map, at this scale. It is"
        " made as large as the picture to draw.",
        rich_help_panel=PANEL,
    ),
]
IpAdapterOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--ip-adapter",
        metavar="FILE",
        help="Add this IP-Adapter, a .safetensors file or a folder with one. Its image encoder is"
        " that of the model, or lies beside the file in the folder image_encoder. It needs an"
        " --ip-image.",
        rich_help_panel=PANEL,
    ),
]
IpImageOption = Annotated[
    list[ScaledFile] | None,
    typer.Option(
        "--ip-image",
        parser=parse_scaled,
        metavar="FILE[:SCALE]",
        help="Draw in the manner of this picture, at this scale.",
        rich_help_panel=PANEL,
    ),
]


@dataclass(frozen=True)
class Additions:
    """Hold what a command line adds to a model. ``controls`` and ``prompts`` are folders or files
    of weights, each with its picture."""

    loras: Sequence[ScaledFile] = ()
    controls: Sequence[tuple[Path, ScaledFile]] = ()
    prompts: Sequence[tuple[Path, ScaledFile]] = ()
    pictures: Mapping[Path, Image] = field(default_factory=dict)


def find_additions(
    loras: Sequence[ScaledFile] | None,
    controls: tuple[Sequence[Path] | None, Sequence[ScaledFile] | None],
    prompts: tuple[Sequence[Path] | None, Sequence[ScaledFile] | None],
    model: ModelFolder,
) -> Additions:
    """Read and check all files before anything slow starts. Raises BadParameter for options that
    lack another, CommandError or AdapterError for files."""
    if model.is_flux and any((loras, *controls, *prompts)):
        raise CommandError(
            "LoRAs, ControlNets and IP-Adapters are added to Stable Diffusion only; for Flux, load"
            " them from Python, and call strop.optimize(pipe)"
        )
    nets = _paired(controls, "--controlnet", "--control-image")
    adapters = _paired(prompts, "--ip-adapter", "--ip-image")
    pictures = {file.path: _picture(file.path) for _, file in (*nets, *adapters)}
    nets = [(folder.expanduser(), file) for folder, file in nets]
    for folder, _ in nets:
        check_controlnet(folder, model)
    adapters = [(_adapter_file(path.expanduser()), file) for path, file in adapters]
    if loras:
        from strop.diffusion.adapter_files import LORA, find_source

        for lora in loras:
            if not lora.path.exists():
                raise CommandError(
                    f"there is no file {lora.path}; --lora takes a .safetensors file"
                )
            find_source(lora.path, LORA)
    return Additions(loras or (), nets, adapters, pictures)


def _paired(
    given: tuple[Sequence[Path] | None, Sequence[ScaledFile] | None], first: str, second: str
) -> list[tuple[Path, ScaledFile]]:
    weights, files = list(given[0] or ()), list(given[1] or ())
    if len(weights) != len(files):
        raise typer.BadParameter(
            f"{first} and {second} belong together, and there are {len(weights)} of the one and"
            f" {len(files)} of the other; give one {second} for each {first}, in the same order"
        )
    return list(zip(weights, files, strict=True))


def _picture(path: Path) -> Image:
    from PIL import Image, UnidentifiedImageError

    if not path.is_file():
        raise CommandError(f"there is no picture {path}; check the path")
    try:
        with Image.open(path) as opened:
            return opened.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise CommandError(f"{path} is no picture, or is damaged: {error}") from error


def check_controlnet(folder: Path, model: ModelFolder) -> dict[str, Any]:
    """Return the configuration of the ControlNet in a folder. Raises CommandError unless one lies
    there, and is for models of this shape."""
    file = folder / "config.json"
    if not file.is_file():
        raise CommandError(
            f"there is no ControlNet in {folder}; give a diffusers folder, with config.json and"
            " diffusion_pytorch_model.safetensors"
        )
    config = _read(file)
    if (kind := config.get("_class_name")) != "ControlNetModel":
        raise CommandError(f"{folder} holds a {kind}, and no ControlNetModel")
    if not list(folder.glob("*.safetensors")):
        raise CommandError(
            f"{folder} has no weights in safetensors; a pickle, which may run any code when it is"
            " opened, is not read: save the ControlNet again with save_pretrained"
        )
    own = _read(model.folder / "unet" / "config.json")
    latent = len(_read(model.folder / "vae" / "config.json").get("block_out_channels", ()))
    own |= {"pixels per latent": 2 ** (latent - 1)}
    config |= {"pixels per latent": 2 ** (len(config.get(_DOWN, range(4))) - 1)}
    for name in (*_SHARED, "pixels per latent"):
        ours, theirs = own.get(name), config.get(name)
        if None not in (ours, theirs) and ours != theirs:
            raise CommandError(
                f"the ControlNet in {folder} was made for another model: its {name} is {theirs},"
                f" that of {model.name} is {ours}"
            )
    return config


def _read(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CommandError(f"{file} is no JSON ({error}); save the model again") from error
    return content


def _adapter_file(path: Path) -> Path:
    """Return the file with an IP-Adapter that a user means."""
    from strop.diffusion.adapter_files import IP_ADAPTER, find_source

    if path.is_dir():
        there = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
        if len(there) != 1:
            has = ", ".join(file.name for file in there) or "none"
            raise CommandError(
                f"{path} has no single .safetensors file ({has}); name the file of the IP-Adapter"
            )
        path = there[0]
    if not path.is_file():
        raise CommandError(f"there is no file {path}; --ip-adapter takes a .safetensors file")
    tensors = find_source(path, IP_ADAPTER).tensors or {}
    if not any(key.startswith("image_proj.") for key in tensors):
        raise CommandError(f"{path} is no IP-Adapter: it has no key that begins with image_proj.")
    return path


def add_to(pipe: Any, additions: Additions, dtype: torch.dtype) -> Any:
    """Return the pipeline with all that the command line adds. Raises AdapterError for what does
    not fit, and CommandError for what does not open."""
    _add_loras(pipe, additions.loras)
    if additions.controls:
        pipe = _with_controlnets(pipe, [folder for folder, _ in additions.controls], dtype)
    if additions.prompts:
        _add_ip_adapters(pipe, additions.prompts)
    return pipe


def load_lora(pipe: Any, path: Path, name: str) -> None:
    """Load a LoRA under a name, and say what of it the model has no place for. Raises AdapterError
    for a file that does not fit."""
    from strop.diffusion.adapter_loading import load_checked

    with warnings.catch_warnings():  # several LoRAs are what the user wants
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        load_checked(pipe, "load_lora_weights", str(path), adapter_name=name)
    _warn_of_rest(pipe, path, name)


def _add_loras(pipe: Any, loras: Sequence[ScaledFile]) -> None:
    names: list[str] = []
    for number, lora in enumerate(loras):
        name = f"{re.sub(r'[^A-Za-z0-9]', '_', lora.path.stem)}_{number + 1}"
        load_lora(pipe, lora.path, name)
        names.append(name)
    if names:
        pipe.set_adapters(names, [lora.scale for lora in loras])


def _warn_of_rest(pipe: Any, path: Path, name: str) -> None:
    """Say what of a file the model has no place for, of which diffusers would warn."""
    from strop.diffusion.adapter_files import LORA, find_source
    from strop.diffusion.snapshots import modules_of

    tensors = find_source(path, LORA).tensors or {}
    given = sum(not key.endswith(_NO_LAYERS) for key in tensors)
    paths = [(*at.split("."), key) for at, part in modules_of(pipe) for key in _weights(part)]
    if (lost := given - len({p for p in paths if name in p})) > 0:
        warn(f"{path}: {counted(lost, 'tensor')} of {given} have no place in this model")


def _weights(part: Any) -> list[str]:
    return [key for key, weight in part._parameters.items() if weight is not None]


def _with_controlnets(pipe: Any, folders: Sequence[Path], dtype: torch.dtype) -> Any:
    from diffusers import AutoPipelineForText2Image

    nets = [load_controlnet(folder, dtype, pipe.device) for folder in folders]
    made = AutoPipelineForText2Image.from_pipe(pipe, controlnet=nets if len(nets) > 1 else nets[0])
    made.set_progress_bar_config(disable=True)
    return made


def load_controlnet(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the ControlNet in a folder. Raises CommandError for one that does not open."""
    from diffusers import ControlNetModel

    try:
        net = ControlNetModel.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, local_files_only=True
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise CommandError(f"cannot load the ControlNet in {folder}: {error}") from error
    return net.to(device)


def _add_ip_adapters(pipe: Any, prompts: Sequence[tuple[Path, ScaledFile]]) -> None:
    from strop.diffusion.adapter_loading import load_checked

    files = [file for file, _ in prompts]
    encoder = files[0].parent / "image_encoder"
    if getattr(pipe, "image_encoder", None) is None and not (encoder / "config.json").is_file():
        raise CommandError(
            f"{files[0]} needs an image encoder, and neither the model nor {encoder} has one; put"
            " the folder image_encoder beside the file"
        )
    load_checked(
        pipe,
        "load_ip_adapter",
        [str(file.parent) for file in files],
        subfolder="",
        weight_name=[file.name for file in files],
    )
    pipe.set_ip_adapter_scale([file.scale for _, file in prompts])


def call_arguments(additions: Additions, size: PictureSize) -> dict[str, Any]:
    """Return what a call of the pipeline is given for ControlNets and IP-Adapters."""
    found: dict[str, Any] = {}
    if additions.controls:
        files = [file for _, file in additions.controls]
        images = [_as_large(additions.pictures[file.path], file.path, size) for file in files]
        scales = [file.scale for file in files]
        is_one = len(files) == 1
        found["image"] = images[0] if is_one else images
        found["controlnet_conditioning_scale"] = scales[0] if is_one else scales
    if additions.prompts:
        found["ip_adapter_image"] = [additions.pictures[file.path] for _, file in additions.prompts]
    return found


def _as_large(picture: Image, path: Path, size: PictureSize) -> Image:
    """Return a picture in the size to draw, and say if that changes its proportions."""
    if picture.width * size.height != picture.height * size.width:
        warn(
            f"{path} is {picture.width}x{picture.height}: it is stretched to {size}; --size gives"
            " the picture to draw its proportions"
        )
    return picture.resize((size.width, size.height))

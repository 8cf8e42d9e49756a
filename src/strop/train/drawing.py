"""Draw pictures between steps: of the class, and for validation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from strop.errors import OptionError
from strop.train import files
from strop.train.crops import Crop, Placement
from strop.train.draws import generator
from strop.train.folders import Folder, open_rgb, read_subject
from strop.train.model import DiffusionModel
from strop.train.ranks import Ranks
from strop.train.settings import Settings

_SPRITES_GUIDANCE = 4.0
_GAP = 4


@dataclass(frozen=True)
class Style:
    """Say how pictures are drawn: side in pixels, guidance, denoising steps."""

    side: int
    guidance: float
    steps: int


def style_of(settings: Settings, model: DiffusionModel, side: int) -> Style:
    guidance = settings.validation_guidance_scale
    if guidance is None:
        guidance = _SPRITES_GUIDANCE if settings.is_sprites else model.family.guidance
    return Style(side, guidance, settings.validation_inference_steps)


@torch.no_grad()
def draw(
    model: DiffusionModel,
    prompts: Sequence[str],
    sources: Sequence[torch.Generator],
    style: Style,
    condition: Image.Image | None = None,
) -> list[Image.Image]:
    """Draw a picture for each prompt, all by the same conditioning picture if there is a
    ControlNet. The modules should be in evaluation mode."""
    pipe = model.pipeline
    pipe.set_progress_bar_config(disable=True)
    more = {}
    if condition is not None:
        more[model.family.control.picture] = [condition] * len(prompts)
        torch.manual_seed(sources[0].initial_seed())  # SD3's pipeline draws their latents so
    with model.autocast(), _plain(model), _autoencoder_in_full(model):
        found: list[Image.Image] = pipe(
            list(prompts),
            width=style.side,
            height=style.side,
            num_inference_steps=style.steps,
            generator=list(sources),
            **model.family.drawing(pipe, list(prompts), style.guidance),
            **more,
        ).images
    return found


@contextmanager
def _plain(model: DiffusionModel) -> Iterator[None]:
    """Run the UNet and a ControlNet without compiled passes: under autocast torch would trace them
    for these pictures, which takes longer than to draw them."""
    networks = model.denoisers if model.half else ()
    compiled = [(one, vars(one).pop("forward")) for one in networks if "forward" in vars(one)]
    try:
        yield
    finally:
        for network, forward in compiled:
            network.forward = forward


@contextmanager
def _autoencoder_in_full(model: DiffusionModel) -> Iterator[None]:
    """Decode, and encode conditioning pictures, in fp32 with an autoencoder that has stayed in it:
    autocast would compute in the half type, in which such a one overflows."""
    vae = model.vae
    if model.half is None or vae.dtype != torch.float32:
        yield
        return

    def in_full(run: Callable[..., Any]) -> Callable[..., Any]:
        def runs(given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(model.device.type, enabled=False):
                return run(given.float(), *args, **kwargs)

        return runs

    vae.encode, vae.decode = in_full(vae.encode), in_full(vae.decode)
    try:
        yield
    finally:
        del vae.encode, vae.decode


def validate(
    settings: Settings, model: DiffusionModel, style: Style, ranks: Ranks
) -> list[list[Image.Image]]:
    """Draw a row of pictures for each validation prompt, from the same noise every time. Each rank
    draws its share of each row."""

    def drawn(
        prompt: str, condition: Image.Image | None, numbers: Sequence[int]
    ) -> list[Image.Image]:
        sources = [generator(settings.seed, "validation", number) for number in numbers]
        return draw(model, [prompt] * len(numbers), sources, style, condition) if numbers else []

    count, prompts = settings.num_validation_images, settings.validation_prompt
    conditions = conditions_to_draw(settings, style.side)
    return [
        ranks.dealt(range(count), partial(drawn, prompt, condition))
        for prompt, condition in zip(prompts, conditions, strict=True)
    ]


def conditions_to_draw(settings: Settings, side: int) -> list[Image.Image | None]:
    """Return the conditioning picture of each validation prompt as a square of this side, or None
    where there are none. Raises OptionError for one that cannot be read."""
    prompts, paths = settings.validation_prompt, settings.validation_image
    found: list[Image.Image | None] = []
    for path in map(Path, paths):
        try:
            opened = open_rgb(path.expanduser())
        except OptionError as error:
            raise OptionError(f"validation_image {path} {error}") from error
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise OptionError(f"validation_image {path} cannot be read: {error}") from error
        cut = Placement.of(opened.size, (side, side), Crop())
        pixels = cut.cut(opened, settings.image_interpolation_mode)
        found.append(Image.fromarray(pixels.numpy()))
    if not found:
        return [None] * len(prompts)
    return found * len(prompts) if len(found) == 1 else found


def write_sheet(rows: Sequence[Sequence[Image.Image]], path: Path) -> Image.Image:
    """Write pictures as one sheet, in rows."""
    page = sheet(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, lambda part: page.save(part, format="png"))
    return page


def sheet(rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    """Lay out pictures of one size in rows, on white."""
    wide, high = rows[0][0].size
    size = (len(rows[0]) * (wide + _GAP) + _GAP, len(rows) * (high + _GAP) + _GAP)
    page = Image.new("RGB", size, (255, 255, 255))
    for down, row in enumerate(rows):
        for right, picture in enumerate(row):
            page.paste(picture, (_GAP + right * (wide + _GAP), _GAP + down * (high + _GAP)))
    return page


def class_pictures(
    settings: Settings,
    model: DiffusionModel,
    style: Style,
    on_progress: Callable[[str, int, int], None],
    ranks: Ranks,
) -> Folder:
    """Return the folder of class pictures, after the model has drawn those that it lacks. Each rank
    draws its share; rank 0 writes them in their order, so that whatever ends this leaves the
    first ones."""
    folder = Path(settings.class_data_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"class_data_dir {folder} is a file; give a folder")

    def drawn(numbers: Sequence[int]) -> list[Image.Image]:
        sources = [generator(settings.seed, "class", number) for number in numbers]
        prompts = [settings.class_prompt] * len(numbers)
        return draw(model, prompts, sources, style) if numbers else []

    def write(numbers: Sequence[int], pictures: Sequence[Image.Image]) -> None:
        for number, picture in zip(numbers, pictures, strict=True):
            path = folder / f"class-{number:05d}.png"
            files.write(path, partial(picture.save, format="png"))

    ranks.alone(lambda: _make(folder))
    found = read_subject(folder, settings.class_prompt, may_be_empty=True, ranks=ranks)
    wanted, have, first = settings.num_class_images, len(found.pictures), _free_number(folder)
    while have < wanted:
        on_progress("drawing class pictures", have, wanted)
        size = settings.sample_batch_size * ranks.count
        numbers = range(first, first + min(size, wanted - have))
        pictures = ranks.dealt(numbers, drawn)
        ranks.alone(partial(write, numbers, pictures))
        have, first = have + len(numbers), first + len(numbers)
    return read_subject(folder, settings.class_prompt, ranks=ranks)


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files.sweep(folder)


def _free_number(folder: Path) -> int:
    """Return a number after all that were drawn: what somebody has removed is not to be drawn
    again."""
    matches = (re.fullmatch(r"class-(\d+)\.png", path.name) for path in folder.iterdir())
    return max((int(match[1]) + 1 for match in matches if match), default=0)

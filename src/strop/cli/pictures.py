"""Save pictures whole or not at all, compare them, and lay them out with captions."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from torch import Tensor

_PAPER, _INK, _FAINT = (255, 255, 255), (28, 30, 36), (110, 114, 124)
_GAP = 16
_MOST_DB = 120.0  # what rounding in fp32 allows is shown as "at least"


@dataclass(frozen=True)
class Panel:
    """Hold a picture with a bold line and fainter ones below."""

    picture: Image
    title: str
    lines: tuple[str, ...] = ()


def save(picture: Image, path: Path) -> None:
    """Write ``picture`` under a temporary name and rename it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    kind = {"jpg": "jpeg"}.get(path.suffix.lower()[1:], path.suffix.lower()[1:])
    try:
        picture.save(part, format=kind)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def to_picture(pixels: Tensor) -> Image:
    """Convert RGB [3, height, width] from 0 to 1 to 8 bit."""
    from PIL import Image

    rounded = (pixels.detach().float().cpu() * 255).round().clamp(0, 255).byte()
    return Image.fromarray(rounded.permute(1, 2, 0).contiguous().numpy())


def psnr_db(first: Tensor, second: Tensor) -> float:
    """Return the peak signal-to-noise ratio of two pictures from 0 to 1 in dB; infinite if
    equal."""
    error = float((first.double() - second.double()).square().mean())
    return -10 * math.log10(error) if error else math.inf


def psnr_text(value: float) -> str:
    if math.isinf(value):
        return "PSNR infinite (equal)"
    return f"PSNR {'> ' if value > _MOST_DB else ''}{min(value, _MOST_DB):.1f} dB"


def enlarged(picture: Image, height: int) -> Image:
    """Enlarge by a whole factor to at least ``height`` pixels, so that pixels stay squares."""
    factor = max(1, math.ceil(height / picture.height))
    return picture.resize((picture.width * factor, picture.height * factor), resample=0)


def sheet(panels: Sequence[Panel], columns: int, text_size: int = 15) -> Image:
    """Lay out panels in a grid of equal cells on white, each picture in the middle of its cell."""
    from PIL import Image, ImageDraw

    wide = max(p.picture.width for p in panels)
    high = max(p.picture.height for p in panels)
    line = round(text_size * 1.4)
    wrapped = [_wrap(p, wide, text_size) for p in panels]
    cell_high = high + max(len(w) for w in wrapped) * line + text_size // 2 + _GAP
    rows = -(-len(panels) // columns)
    size = (columns * (wide + _GAP) + _GAP, rows * cell_high + _GAP)
    page = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(page)
    for number, (panel, words) in enumerate(zip(panels, wrapped, strict=True)):
        left = _GAP + number % columns * (wide + _GAP)
        top = _GAP + number // columns * cell_high
        inset = (wide - panel.picture.width) // 2, (high - panel.picture.height) // 2
        page.paste(panel.picture, (left + inset[0], top + inset[1]))
        _write(draw, words, left + wide / 2, top + high + text_size // 2, text_size)
    return page


Words = list[tuple[str, bool]]


def _write(draw: ImageDraw, words: Words, middle: float, top: int, text_size: int) -> None:
    from PIL import ImageFont

    for number, (text, is_title) in enumerate(words):
        font = ImageFont.load_default(text_size if is_title else text_size - 2)
        place = (middle, top + number * round(text_size * 1.4))
        draw.text(place, text, fill=_INK if is_title else _FAINT, font=font, anchor="ma")


def _wrap(panel: Panel, wide: int, text_size: int) -> Words:
    """Return lines that fit under a picture, and whether each belongs to the title."""
    from PIL import ImageFont

    found: Words = []
    for text, is_title in ((panel.title, True), *((line, False) for line in panel.lines)):
        font = ImageFont.load_default(text_size if is_title else text_size - 2)
        current = ""
        for word in text.split():
            longer = f"{current} {word}".strip()
            if current and font.getlength(longer) > wide:
                found.append((current, is_title))
                longer = word
            current = longer
        found.append((current, is_title))
    return found

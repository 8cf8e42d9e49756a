"""Read a picture that a client has sent, and no more than its header if that asks for too much."""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from strop.serve.refused import Refused

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG")  # a WebP picture takes the memory of its size when it is opened
_DATA_URL = re.compile(r"data:image/[a-z+]{1,12};base64,")
_ADVICE = "send a PNG or JPEG picture"


def from_text(text: str, most_pixels: int, name: str = "image", is_mask: bool = False) -> Image:
    """Read a picture in base64, with "data:image/png;base64," before it or without, or a mask.
    Raises Refused for anything else: a path or an address is never opened."""
    found = _DATA_URL.match(text[:64])
    try:
        data = base64.b64decode(text[found.end() if found else 0 :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong(name, "it is no base64; paths and addresses are not opened") from error
    return from_bytes(data, most_pixels, name, marked if is_mask else _opaque)


def from_bytes(
    data: bytes,
    most_pixels: int,
    name: str = "image",
    convert: Callable[[Image], Image] | None = None,
) -> Image:
    """Read a picture, as RGB, white where it is transparent, unless ``convert`` makes something
    else of it. Its size is looked at before any pixel is decoded. Raises Refused for what is no
    picture, damaged, or too large."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings(), io.BytesIO(data) as source:
            warnings.simplefilter("ignore")  # of damaged metadata; the size is checked here
            with Image.open(source, formats=_FORMATS) as opened:
                if opened.width * opened.height > most_pixels:
                    size = f"{opened.width}x{opened.height}"
                    text = f"{name}: {size} has more than {most_pixels} pixels"
                    raise Refused(400, "picture_too_large", text, field=name)
                turned = ImageOps.exif_transpose(opened)
                return (convert or _opaque)(turned)
    except (OSError, SyntaxError, ValueError, EOFError, ArithmeticError, LookupError) as error:
        raise _wrong(name, f"it is no picture, or is damaged; {_ADVICE}") from error
    except (Image.DecompressionBombError, TypeError, AttributeError) as error:
        raise _wrong(name, f"its size or its metadata is damaged; {_ADVICE}") from error


def _opaque(picture: Image) -> Image:
    from PIL import Image

    if _alpha(picture) is None:
        return picture.convert("RGB")
    layers = picture.convert("RGBA")
    page = Image.new("RGBA", layers.size, (255, 255, 255, 255))
    return Image.alpha_composite(page, layers).convert("RGB")


def marked(picture: Image) -> Image:
    """Return a mask in grey: white, or opaque where a part is transparent, as in A1111."""
    alpha = _alpha(picture)
    if alpha is None or alpha.getextrema() == (255, 255):
        return picture.convert("L")
    return alpha.point(lambda value: 255 if value > 128 else 0)


def erased(picture: Image) -> Image:
    """Return a mask in grey, white where a picture is transparent, as OpenAI's clients mark it.
    Raises Refused where nothing is."""
    alpha = _alpha(picture)
    if alpha is None or alpha.getextrema()[0] >= 128:
        text = (
            "nothing of it is transparent, so there is nothing to draw; send a PNG that has holes"
        )
        raise _wrong("mask", text)
    return alpha.point(lambda value: 255 if value < 128 else 0)


def _alpha(picture: Image) -> Image | None:
    if "A" not in picture.getbands() and "transparency" not in picture.info:
        return None
    return picture.convert("RGBA").getchannel("A")


def _wrong(name: str, message: str) -> Refused:
    return Refused(400, "invalid_picture", f"{name}: {message}", field=name)

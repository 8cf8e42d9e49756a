"""Prepare a picture of which a part is drawn anew, and put the rest over what was drawn.

All of it is what A1111's web UI does with a mask, by the functions that diffusers has for it. The
rest of the picture keeps its bytes, where the mask is black.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.drawing.request import PictureSize
from strop.serve.refused import Refused

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

RESIZES = ("default", "crop", "fill")  # diffusers' words: stretched, cut, or with longer edges


@dataclass(frozen=True)
class MaskWish:
    """Hold a mask, white where the picture is drawn anew, and how it is used.

    ``blur`` has pixels along x and y, in which the edge fades. ``is_filled`` puts the colours from
    around in place of what is drawn anew, so that nothing of it shines through. ``is_close`` draws
    the surroundings of the mask alone, as large as the request says, with ``padding`` pixels
    around, and puts them back into the picture, which keeps its size.
    """

    mask: Image
    blur: tuple[int, int] = (0, 0)
    is_filled: bool = False
    is_close: bool = False
    padding: int = 0


@dataclass(frozen=True)
class Overlay:
    """Put a picture over what was drawn, but where its mask is white. ``box`` is the part of it
    that was drawn; None: all."""

    picture: Image
    mask: Image
    box: tuple[int, int, int, int] | None

    def over(self, drawn: Image) -> Image:
        """Return the whole, as large as the picture."""
        made: Image = _processor().apply_overlay(self.mask, self.picture, drawn, self.box)
        return made

    @property
    def num_bytes(self) -> int:
        num_pixels: int = self.picture.width * self.picture.height
        return 4 * num_pixels


@dataclass(frozen=True)
class Canvas:
    """Hold what a call of the model begins with: a start and its mask, both as large as the
    request, and what comes over the result."""

    start: Image
    mask: Image
    overlay: Overlay


_MOST_CUT = 16  # times the pixels of the result, while a picture is cut


def resized(picture: Image, size: PictureSize, how: str, name: str = "start") -> Image:
    """Return a picture in a size, by one of ``RESIZES``. Raises Refused for one so narrow that
    nothing of it would be left, or that nearly all of it would be cut off: diffusers makes it large
    before."""
    if (size.width, size.height) == picture.size:
        return picture
    if how == "default":
        return picture.resize((size.width, size.height))
    (w, h), text = picture.size, f"{name}: a part of {picture.width}x{picture.height} is too narrow"
    is_empty = how == "fill" and not (w * size.height // h and h * size.width // w)
    whole = max(size.width * size.width * h // w, size.height * size.height * w // h)
    if is_empty or (how == "crop" and whole > _MOST_CUT * size.num_pixels):
        text = f"{text} to be drawn as {size}; take another size"
        raise Refused(400, "invalid_picture", text, field=name)
    made: Image = _processor().resize(picture, size.height, size.width, how)
    return made


def canvas(start: Image, wish: MaskWish, size: PictureSize, how: str = "default") -> Canvas | None:
    """Return what is drawn for a picture and a mask; None where nothing of the mask is white."""
    from PIL import ImageFilter

    mask = wish.mask.convert("L")
    mask = mask if mask.size == start.size else mask.resize(start.size)
    if any(wish.blur):
        mask = mask.filter(ImageFilter.GaussianBlur(wish.blur))
    if mask.getbbox() is None:
        return None
    if wish.is_close:
        box = _processor().get_crop_region(mask, size.width, size.height, wish.padding)
        overlay = Overlay(start, mask, box)
        part = resized(start.crop(box), size, "fill")
        hidden = resized(mask.crop(box), size, "fill").convert("L")
    else:
        part, hidden = resized(start, size, how), resized(mask, size, how).convert("L")
        overlay = Overlay(part, hidden.point(lambda value: min(2 * value, 255)), None)
    return Canvas(_filled(part, hidden) if wish.is_filled else part, hidden, overlay)


def _filled(picture: Image, mask: Image) -> Image:
    """Replace what is under a mask by colours from around: means over ever larger squares, of what
    is known in them (pull-push, Gortler et al., The Lumigraph, 1996)."""
    from PIL import Image
    from torch.nn.functional import avg_pool2d, interpolate

    known = (_pixels(mask.convert("L")) < 0.5).float()
    levels = [(_pixels(picture) * known, known)]
    while max(levels[-1][1].shape[-2:]) > 1:
        pair = (avg_pool2d(one, 2, ceil_mode=True) for one in levels[-1])
        levels.append((next(pair), next(pair)))
    page: Any = 0.5
    for colours, share in reversed(levels):
        if not isinstance(page, float):
            page = interpolate(page, colours.shape[-2:], mode="bilinear")
        page = (colours / share.clamp(min=1e-6)).where(share > 0, page)
    rounded = (page[0] * 255).round().clamp(0, 255).byte().permute(1, 2, 0).contiguous()
    return Image.frombytes("RGB", picture.size, rounded.numpy().tobytes())


def _pixels(picture: Image) -> Tensor:
    """Return values [1, channels, height, width] from 0 to 1."""
    import torch

    values = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    shape = (1, picture.height, picture.width, len(picture.getbands()))
    return values.view(shape).permute(0, 3, 1, 2).float() / 255


def _processor() -> Any:
    from diffusers.image_processor import VaeImageProcessor

    return VaeImageProcessor()

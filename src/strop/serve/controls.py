"""Bring the pictures that ControlNets see to the sizes of the passes that they have effect in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.drawing.request import ControlPicture, PictureSize
from strop.serve.masks import Overlay, resized

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class ControlWish:
    """Hold a control whose picture ``resize`` brings to its size. Where a part of the client's
    picture is drawn, ``is_cut`` takes the same part. ``passes`` says in which ones it has effect.
    """

    net: str
    picture: Image
    weight: float
    begin: float
    end: float
    resize: str
    is_cut: bool
    passes: tuple[bool, bool]


def seen_in(
    number: int, wishes: Sequence[ControlWish], size: PictureSize, overlay: Overlay | None
) -> tuple[ControlPicture, ...]:
    """Return the controls of the pass 0 or 1. One without weight is left out, so that the picture
    has the bits of one without it."""
    return tuple(
        ControlPicture(one.net, _seen(one, size, overlay), one.weight, one.begin, one.end)
        for one in wishes
        if one.weight and one.passes[number]
    )


def _seen(wish: ControlWish, size: PictureSize, overlay: Overlay | None) -> Image:
    if overlay is None or overlay.box is None or not wish.is_cut:
        return resized(wish.picture, size, wish.resize, "controls")
    whole = PictureSize(overlay.picture.width, overlay.picture.height)
    part = resized(wish.picture, whole, wish.resize, "controls").crop(overlay.box)
    return resized(part, size, "fill", "controls")

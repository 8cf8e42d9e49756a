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
    """Hold a control with a picture of any size, which ``resize`` brings to that of a pass.

    Where only a part of the client's picture is drawn, ``is_cut`` takes the same part of this one.
    ``in_first`` and ``in_second`` say in which passes it has effect.
    """

    net: str
    picture: Image
    weight: float = 1.0
    begin: float = 0.0
    end: float = 1.0
    resize: str = "crop"
    is_cut: bool = True
    in_first: bool = True
    in_second: bool = True


def seen_in(
    wishes: Sequence[ControlWish],
    size: PictureSize,
    overlay: Overlay | None,
    *,
    is_second: bool = False,
) -> tuple[ControlPicture, ...]:
    """Return the controls of one pass, each with a picture of its size. One without weight has no
    effect, and is left out, so that the picture has the bits of one that has no ControlNet."""
    return tuple(
        ControlPicture(one.net, _seen(one, size, overlay), one.weight, one.begin, one.end)
        for one in wishes
        if one.weight and (one.in_second if is_second else one.in_first)
    )


def _seen(wish: ControlWish, size: PictureSize, overlay: Overlay | None) -> Image:
    name = "controls"
    if overlay is None or overlay.box is None or not wish.is_cut:
        return resized(wish.picture, size, wish.resize, name)
    whole = PictureSize(overlay.picture.width, overlay.picture.height)
    part = resized(wish.picture, whole, wish.resize, name).crop(overlay.box)
    return resized(part, size, "fill", name)

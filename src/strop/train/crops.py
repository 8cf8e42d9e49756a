"""Scale pictures and cut out what the network is shown, and their masks alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from strop.train.folders import open_rgb


@dataclass(frozen=True)
class Crop:
    """Say how a picture becomes one of another aspect: shares of the free room to the left and
    above, a mirror."""

    left: float = 0.5
    top: float = 0.5
    mirrored: bool = False


@dataclass(frozen=True)
class Placement:
    """Hold pixels: sizes of the file, of the picture once it is resized and of what is cut out of
    it, as width and height, and where the cut begins."""

    file: tuple[int, int]
    resized: tuple[int, int]
    shown: tuple[int, int]
    left: int
    top: int
    mirrored: bool

    @staticmethod
    def of(file: tuple[int, int], shown: tuple[int, int], crop: Crop) -> Placement:
        """Scale so that the picture covers what is shown."""
        scale = max(wanted / edge for wanted, edge in zip(shown, file, strict=True))
        width, height = (
            max(wanted, int(edge * scale)) for wanted, edge in zip(shown, file, strict=True)
        )
        left = round((width - shown[0]) * crop.left)
        top = round((height - shown[1]) * crop.top)
        return Placement(file, (width, height), shown, left, top, crop.mirrored)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return what SDXL is told: height and width of the file, top and left of the cut (in the
        mirror image, if that is shown), height and width of what is shown."""
        free = self.resized[0] - self.shown[0]
        left = free - self.left if self.mirrored else self.left
        return (*self.file[::-1], self.top, left, *self.shown[::-1])

    def cut(self, picture: Image.Image, resample: str) -> Tensor:
        """Return the numbers from 0 to 255, [height, width] or [height, width, channels]."""
        if self.resized != picture.size:
            picture = picture.resize(self.resized, resample=Image.Resampling[resample.upper()])
        right, bottom = self.left + self.shown[0], self.top + self.shown[1]
        picture = picture.crop((self.left, self.top, right, bottom))
        rows = torch.from_numpy(numpy.asarray(picture).copy())
        return rows.flip(1) if self.mirrored else rows


def pixels_of(path: Path, shown: tuple[int, int], crop: Crop, resample: str = "lanczos") -> Tensor:
    """Scale a picture so that it covers ``shown``, width and height, and cut that out of it:
    [3, height, width]."""
    picture = open_rgb(path)
    return shown_pixels(picture, Placement.of(picture.size, shown, crop), resample)


def shown_pixels(picture: Image.Image, placement: Placement, resample: str) -> Tensor:
    """Return [3, height, width] from -1 to 1."""
    return placement.cut(picture, resample).permute(2, 0, 1).float() / 127.5 - 1.0


def mask_of(path: Path, placement: Placement, factor: int) -> Tensor:
    """Return how white a mask is, [1, height, width] of the latents, from 0 to 1: the mean over the
    pixels of each."""
    grey = open_rgb(path).convert("L").resize(placement.file, Image.Resampling.BOX)
    rows = placement.cut(grey, "box").float()[None] / 255.0
    return functional.avg_pool2d(rows, factor)

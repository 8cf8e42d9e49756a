"""Sizes of convolutions, and the boxes of pixels that the tensor memory accelerator brings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Box = tuple[int, int, int]  # pictures, lines and columns of pixels


@dataclass(frozen=True, slots=True)
class Picture:
    """Sizes of a convolution with a square, odd window, around which there are as many zeros as
    keep height and width where it goes on by one pixel."""

    size: int  # of the window
    ins: int
    outs: int
    batch: int
    height: int  # of the result
    width: int
    stride: int = 1  # pixels from one place of the window to the next

    @property
    def pixels(self) -> int:
        """Of the result."""
        return self.batch * self.height * self.width


def picture_of(x: Sequence[int], weight: Sequence[int], stride: int = 1) -> Picture:
    """From the sizes (B, CI, H, W) and (CO, CI, size, size)."""
    batch, ins, *sides = x
    height, width = (-(-side // stride) for side in sides)
    return Picture(weight[2], ins, weight[0], batch, height, width, stride)


def boxes_along(box: Box, of: Picture) -> Box:
    """How many lie side by side: of pictures, down, right."""
    count, height, width = box
    return -(-of.batch // count), -(-of.height // height), -(-of.width // width)


def box_of(boxes: Sequence[Box], of: Picture) -> Box:
    """The one that wastes the fewest pixels."""

    def wasted(box: Box) -> tuple[int, int, int]:
        count, _, width = box
        return math.prod((*box, *boxes_along(box, of))), count, -width

    return min(boxes, key=wasted)

"""Compute sizes of convolutions, and the boxes of pixels that the tensor memory accelerator
brings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

Box = tuple[int, int, int]  # pictures, lines and columns of pixels
FOUR_WINDOWS = 2  # the size of each
MOST_REACH = 256  # of a box in the input, by dim: the accelerator's limit


def windows_of(size: int) -> int:
    return 4 if size == FOUR_WINDOWS else 1


@dataclass(frozen=True, slots=True)
class ConvShape:
    """Sizes of a convolution with a square, odd window, around which there are as many zeros as
    keep height and width where it goes on by one pixel. A window of 2: four of them, of which
    results are twice as high and wide (``passes.upsampled_conv``)."""

    size: int  # of the window
    ins: int
    outs: int
    batch: int
    height: int  # of the result, or of what it is twice as high as
    width: int
    stride: int = 1  # pixels from one place of the window to the next
    further: int = 0  # channels of a second input that the sum of a linear goes on over

    @property
    def windows(self) -> int:
        """Return the number of windows of each place."""
        return windows_of(self.size)

    @property
    def result(self) -> tuple[int, ...]:
        """Sizes of what leaves by boxes, channels last: of four windows odd lines apart from even
        ones, and of a pair of columns one as long as both."""
        if self.windows == 1:
            return self.batch, self.height, self.width, self.outs
        return self.batch, self.height, 2, self.width, 2 * self.outs

    @property
    def pixels(self) -> int:
        """Count the pixels of the result, for each window."""
        return self.batch * self.height * self.width


def picture_of(x: Sequence[int], weight: Sequence[int], stride: int = 1) -> ConvShape:
    """Describe a picture from the sizes (B, CI, H, W) and (CO, CI, size, size)."""
    batch, ins, *sides = x
    height, width = (-(-side // stride) for side in sides)
    of = ConvShape(weight[2], ins, weight[0], batch, height, width, stride)
    return replace(of, outs=of.outs // of.windows)


def boxes_along(box: Box, of: ConvShape) -> Box:
    """Return how many boxes lie side by side: of pictures, down, right."""
    count, height, width = box
    return -(-of.batch // count), -(-of.height // height), -(-of.width // width)


def box_of(rows: int, of: ConvShape) -> Box:
    """Return the box, of no more pixels than rows, of which as few as possible cover all pictures;
    among such boxes the one with the fewest pictures, and then the widest."""
    return _best(rows, (of.batch, of.height, of.width), of.stride)


@lru_cache(maxsize=4096)  # many tiles have as many rows, many convolutions the same pictures
def _best(rows: int, sizes: Box, stride: int) -> Box:
    of = ConvShape(3, 0, 0, *sizes, stride)

    def cost(box: Box) -> tuple[int, int, int]:
        count, _, width = box
        return math.prod(boxes_along(box, of)), count, -width

    return min(_boxes(rows, of), key=cost)


def _boxes(rows: int, of: ConvShape) -> Iterator[Box]:
    """Yield, for each number of boxes per line, the narrowest box that gives that count. It is as
    high as there is room, and spans several pictures where it is as high as they are."""
    most = MOST_REACH // of.stride
    for right in range(1, of.width + 1):
        width = -(-of.width // right)
        if width <= min(rows, most):
            height = min(rows // width, of.height, most)
            count = min(rows // (width * height), of.batch) if height == of.height else 1
            yield count, height, width
        if width == 1:
            return

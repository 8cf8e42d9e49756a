"""Say how eager finds the places of a resized image when a call gives a factor, by mode and device.

A place is ``i / factor`` wherever a factor is given, even where it leaves the size as it is:
[0, 1, 2] by 1.3 to three elements is [0, 0, 1]. Some of ATen's kernels look at the sizes first.
Where no factor is given (``size=``, or ``recompute_scale_factor``) the ratio of the sizes says the
same as these shortcuts. Found in ATen's UpSample.h and by experiment, for a GPU on an H100;
tests/frontend/test_resize.py compares every row of a CPU with eager. Gradients are ATen's own
calls, which have rules of their own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shortcut:
    """Say where the sizes decide although a factor is given.

    A dim that keeps its size is copied; one that doubles is read twice if ``doubles``. Either
    happens at any size, or only where the sizes of the result add up to ``most`` at most or the
    images lie channels-last and have more than ``CHANNELS``. With ``together`` a dim is copied only
    where every dim keeps its size.
    """

    doubles: bool = False
    most: int | None = None
    together: bool = False


CHANNELS = 3  # of images for which ATen has no channels-last kernel

# (device, mode, number of dims); the factor is used where there is no row
SHORTCUTS: dict[tuple[str, str, int], Shortcut] = {
    ("cpu", "nearest", 2): Shortcut(doubles=True, most=128),
    ("cpu", "nearest", 3): Shortcut(doubles=True, most=0),
    ("cpu", "linear", 1): Shortcut(),
    ("cpu", "bilinear", 2): Shortcut(),
    ("cpu", "trilinear", 3): Shortcut(),
    ("cuda", "nearest", 2): Shortcut(),
    ("cuda", "nearest-exact", 2): Shortcut(),
    ("cuda", "linear", 1): Shortcut(together=True),
    ("cuda", "bilinear", 2): Shortcut(together=True),
    ("cuda", "trilinear", 3): Shortcut(together=True),
    ("cuda", "bicubic", 2): Shortcut(together=True),
}

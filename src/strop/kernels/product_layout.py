"""Tiles of products in PTX, and where things lie in a program's shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from strop.kernels.ptx import LINE_BYTES, ROWS

MOST_SHARED = 227 * 1024  # of a program


@dataclass(frozen=True, slots=True)
class Tile:
    """``groups`` of 64 rows, ``cols`` of the product, ``stages`` of 64 channels on the way. The sum
    in ``split`` parts; or programs that ``keep_on``, one a processor."""

    groups: int
    cols: int
    stages: int
    split: int = 1
    keeps_on: bool = False


@dataclass(frozen=True, slots=True)
class Product:
    """``size`` of the window, 1 or odd: of one place, rows are a line; else pixels of a box, whose
    sizes the launch tells. ``gated``: the result is value * gelu(gate), of two halves of the
    weights' rows, with biases. ``stride``: pixels of the input from one of the result to the next.
    """

    tile: Tile
    size: int
    gated: bool = False
    stride: int = 1

    @property
    def rows(self) -> int:
        return ROWS * self.tile.groups

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.tile.cols // 2 if self.gated else self.tile.cols

    @property
    def has_box(self) -> bool:
        return self.size > 1

    @property
    def threads(self) -> int:
        """That multiply."""
        return 2 * self.rows

    @property
    def stage(self) -> int:
        return (self.rows + self.tile.cols) * LINE_BYTES

    @property
    def barriers(self) -> int:
        """The first stage's, which tells that it is there; behind it the one that tells that it is
        free again; then those of the others."""
        return self.tile.stages * self.stage

    @property
    def half_row(self) -> int:
        """Bytes of a row of results on their way out: eight rows meet no bank twice."""
        return 2 * self.width + 16

    @property
    def part_row(self) -> int:
        """Bytes of a row of a part: four rows of 32 bytes meet no bank twice."""
        return 4 * self.tile.cols + (32 if self.tile.cols % 16 == 0 else 0)

    @property
    def results_at(self) -> int:
        """Where results are on their way out: where operands were, unless others come there."""
        return self.barriers + 16 * self.tile.stages if self.tile.keeps_on else 0

    @property
    def shared(self) -> int:
        staged = self.rows * (self.part_row if self.tile.split > 1 else self.half_row)
        return max(self.barriers + 16 * self.tile.stages, self.results_at + staged)

"""Tiles of products in PTX, and where things lie in a program's shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from strop.ir.contractions import ColumnNorm, Gate
from strop.kernels.gemm.implicit import FOUR_WINDOWS
from strop.kernels.ptx import LINE, LINE_BYTES, ROWS

GEGLU = Gate()
NO_NORM = ColumnNorm()
MOST_SHARED = 227 * 1024  # of a program
MOST_SUMMED = 152  # columns of codes whose sums leave registers for all else
MIXED = 1024  # bytes after which lines of shared memory are mixed as before
# What becomes of the sums: they are the results; values times the activation of gates, biases
# added; they and biases are added, rounded, to what lies where the results go.
PLAIN, GATED, SUM = ENDS = ("", "gated", "sum")
# The results are the activation of sums and biases.
ACTIVATED = "activated"
# The results are sums whose columns are normalised, what is added to them, and an activation.
NORMED = "normed"
NARROW = "narrow"  # the kind of a plain product with few columns
CODES = "codes"  # the kind of products of e4m3 codes
GATED_CODES = "gated_codes"  # of those that end in gates
CODE_CONV = "code_conv"  # and of 3x3 convolutions of them


@dataclass(frozen=True, slots=True)
class GemmTile:
    """Describe a tile: ``groups`` of 64 rows, ``cols`` of the product, ``stages`` of 64 channels on
    the way. The sum is in ``split`` parts; or programs ``keep_on``, one a processor, whose groups,
    two, may be ``apart``: each has all rows of every second tile, and writes its results while the
    other multiplies."""

    groups: int
    cols: int
    stages: int
    split: int = 1
    keeps_on: bool = False
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Product:
    """Describe a product. ``size`` of the window, 1 or odd: of one place, rows are a line; else
    pixels of a box, whose sizes the launch tells. A size of 2: four windows, whose results lie
    between each other. ``end``: one of ENDS, ACTIVATED or NORMED; ``gate`` says by what activation,
    and which half of the weights' rows are gates, ``norm`` how columns are normalised. ``stride``:
    pixels of the input from one of the result to the next. ``paired``: the sum of a linear goes on
    over a second input with weights of its own, as of an adapter's factors. ``codes``: operands are
    e4m3, and results their sums times a scale of each row and one of each column; of a window, each
    pixel's products are scaled by its own. ``any_width``: a linear whose dense result may have an
    odd number of columns: its rows begin anywhere, so that programs store it themselves, 2 bytes at
    a time."""

    tile: GemmTile
    size: int
    end: str = PLAIN
    stride: int = 1
    paired: bool = False
    gate: Gate = GEGLU
    has_biases: bool = True  # of values and gates, or of columns that are scaled
    codes: bool = False
    any_width: bool = False
    norm: ColumnNorm = NO_NORM

    @property
    def normed(self) -> bool:
        return self.end == NORMED

    @property
    def gated(self) -> bool:
        return self.end == GATED

    @property
    def adds(self) -> bool:
        return self.end == SUM

    @property
    def has_four_windows(self) -> bool:
        return self.size == FOUR_WINDOWS

    @property
    def begins_with_biases(self) -> bool:
        return (self.adds and not self.has_parts) or self.end == ACTIVATED

    @property
    def scales_pixels(self) -> bool:
        """Tell whether what is summed up comes of pixels with scales of their own."""
        return self.codes and self.has_box

    @property
    def line(self) -> int:
        """Count the elements in a line of shared memory."""
        return LINE_BYTES if self.codes else LINE

    @property
    def rows(self) -> int:
        return ROWS * self.tile.groups

    @property
    def width(self) -> int:
        """Return the columns of the result."""
        return self.tile.cols // 2 if self.gated else self.tile.cols

    @property
    def has_box(self) -> bool:
        return self.size > 1

    @property
    def threads(self) -> int:
        """Count the threads that multiply."""
        return 2 * self.rows

    @property
    def blocks(self) -> int:
        """Count the blocks of 64 rows of a group."""
        return self.tile.groups if self.tile.apart else 1

    @property
    def num_warps(self) -> int:
        """One fetches; four where they leave registers to those that multiply."""
        return self.threads // 32 + (4 if self.moves_registers else 1)

    @property
    def moves_registers(self) -> bool:
        """Tell whether those that fetch leave registers to two groups that multiply."""
        is_large = self.scales_pixels or (self.codes and self.tile.cols > MOST_SUMMED)
        return self.tile.apart or (is_large and self.tile.groups > 1)

    @property
    def team(self) -> int:
        """Warps that multiply one tile."""
        return 4 if self.tile.apart else 4 * self.tile.groups

    @property
    def stage(self) -> int:
        return (self.rows + self.tile.cols) * LINE_BYTES

    @property
    def barriers(self) -> int:
        """The first stage's, which tells that it is there; behind it the one that tells that it is
        free again; then those of the others."""
        return self.tile.stages * self.stage

    @property
    def has_parts(self) -> bool:
        """Tell whether programs share a sum."""
        return self.tile.split > 1

    @property
    def leaves_by_boxes(self) -> bool:
        """Tell whether the tensor memory accelerator stores results."""
        return not (self.has_parts or self.any_width)

    @property
    def unit(self) -> int:
        """Columns of a box of results on their way out, as many as divide the tile's."""
        return next(unit for unit in (64, 32, 16, 8) if self.width % unit == 0)

    @property
    def part_row(self) -> int:
        """Return the bytes of a row of a part: four rows of 32 bytes meet no bank twice."""
        return 4 * self.tile.cols + (32 if self.tile.cols % 16 == 0 else 0)

    @property
    def results_at(self) -> int:
        """Return where results are on their way out: where operands were, unless others come
        there."""
        end = self.barriers + 16 * self.tile.stages
        return -(-end // MIXED) * MIXED if self.tile.keeps_on else 0

    @property
    def results_apart(self) -> int:
        """Return the bytes between the results of two groups on their way out."""
        return self.rows * 2 * self.width if self.tile.apart else 0

    @property
    def scales_at(self) -> int:
        """Return where scales and biases of codes lie, or factors and shifts of a norm, behind all
        else."""
        staged = self.rows * (self.part_row if self.has_parts else 2 * self.width * self.blocks)
        return max(self.barriers + 16 * self.tile.stages, self.results_at + staged)

    @property
    def scales(self) -> dict[str, int]:
        """Return how many bytes the scales of a tile's columns take, its biases and the scales of
        its rows, where they lie in shared memory, in their order; or factors and shifts, in fp32,
        side by side for each column."""
        if self.normed:
            return {"norms": 8 * self.tile.cols}
        columns, rows = 4 * self.tile.cols, 4 * self.rows
        sizes = {"columns": columns, "biases": columns // 2 * self.has_biases}
        sizes |= {"rows": rows * (not self.scales_pixels)}
        return sizes if self.codes else {}

    @property
    def scales_apart(self) -> int:
        """Return the bytes between those of two tiles at work."""
        return sum(self.scales.values()) if self.tile.apart else 0

    @property
    def shared(self) -> int:
        return self.scales_at + sum(self.scales.values()) * self.blocks

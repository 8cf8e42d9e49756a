"""Matrix product whose operands the tensor memory accelerator brings, from sm_90 on: x w^T.

It can be launched before the kernel in front of it has ended, and lets the one behind it be, which
a library's cannot. Its programs are few and long: as with cuBLAS, a tile is what gives each
multiprocessor one, or a whole number of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from strop.ir.dims import symbol
from strop.ir.functions import EARLY, HALVES
from strop.ir.source import MOST_EARLY_PROGRAMS, KernelSource
from strop.kernels.box_conv import add_parts

GROUP = 8  # row tiles whose programs lie next to each other: they read the same weights

_TEXT = """\
import triton
import triton.language as tl


@triton.jit
def box_linear(PARAMS, s0, s1, s2, s3, ROWS: tl.constexpr, COLS: tl.constexpr, REST: tl.constexpr,
               DEPTH: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
               EARLY: tl.constexpr):
AHEADEARLY_LINES    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    first = tile // (s1 * GROUP) * GROUP
    height = tl.minimum(s0 - first, GROUP)
    row = (first + tile % (s1 * GROUP) % height) * ROWS
    col = tile % (s1 * GROUP) // height * (COLS + REST)
    acc = tl.full([ROWS, COLS], 0.0, tl.float32)
    if REST:
        beside = tl.full([ROWS, REST], 0.0, tl.float32)
    for step in tl.range(0, s2, num_stages=STAGES):
        depth = (part * s2 + step) * DEPTH
        x = p0.load([row, depth])
        acc = tl.dot(x, p1.load([col, depth]).T, acc)
        if REST:
            beside = tl.dot(x, p3.load([col + COLS, depth]).T, beside)
    row += part * s0 * ROWS
    p2.store([row, col], acc.to(OUT))
    if REST:
        p4.store([row, col + COLS], beside.to(OUT))
"""
# The L2 cache is one for all and never stale: asking it for weights is no access of the program's,
# so it may come before the wait. A line has 128 bytes.
_AHEAD = f"""\
    if EARLY:
        if tl.num_programs(0) <= {MOST_EARLY_PROGRAMS}:
            for at in tl.range(tl.program_id(0) * 128, s3, tl.num_programs(0) * 128):
                line = tl.minimum(at + tl.arange(0, 128), s3 - 1)
                tl.inline_asm_elementwise(
                    "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [WEIGHTS + line * 64],
                    dtype=tl.int32, is_pure=False, pack=1)
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes: ``rows`` of ``cols`` + ``rest`` columns, as sizes of one product
    are powers of two: 128 x (64 + 16) cuts 2048 x 640 into 128 tiles, for 132 processors. ``depth``
    of a step. The sum is cut into ``split`` parts, fp32, which ``add_parts`` adds."""

    rows: int
    cols: int
    rest: int
    depth: int
    stages: int
    num_warps: int
    split: int = 1
    ahead: bool = False  # the weights come to the L2 cache while the kernel before still runs

    def scalars(self, rows: int, depth: int, width: int) -> tuple[int, int, int, int]:
        """Tiles of rows, tiles of columns, steps of a part, cache lines of the weights."""
        down, right = -(-rows // self.rows), -(-width // (self.cols + self.rest))
        return down, right, -(-depth // self.depth) // self.split, width * depth // 64

    def num_programs(self, rows: int, depth: int, width: int) -> int:
        down, right, *_ = self.scalars(rows, depth, width)
        return down * right * self.split

    def views(self, rows: int, depth: int, width: int) -> Iterator[tuple[int, int]]:
        """Sizes of the dense tensors behind the params."""
        down = -(-rows // self.rows)
        written = rows if self.split == 1 else self.split * down * self.rows
        yield from ((rows, depth), (width, depth), (written, width))
        if self.rest:
            yield from ((width, depth), (written, width))

    def params(self, x: Any, weight: Any, out: Any) -> list[Any]:
        """What the kernel is given, of what stands for these three."""
        beside = [weight, out] if self.rest else []
        return [x, weight, out, *beside, *([weight] if self.ahead else [])]


def box_linear(tile: Tile, dtype: torch.dtype) -> KernelSource:
    """out[m, n] = sum over k of x[m, k] w[n, k].

    Params: x (M, K), weights (N, K) and the result (M, N), all dense; weights and result again
    where there is a rest; the weights, last, if they come ahead. Rows are multiples of 16 bytes;
    whole steps make up a part. With parts the result is fp32, (parts * tiles of rows * rows of a
    tile, N). Sums are fp32. Scalars: ``Tile.scalars``.
    """
    out = dtype if tile.split == 1 else torch.float32
    boxes: list[tuple[int, ...]] = [
        (tile.rows, tile.depth),
        (tile.cols, tile.depth),
        (tile.rows, tile.cols),
    ]
    if tile.rest:
        boxes += [(tile.rest, tile.depth), (tile.rows, tile.rest)]
    params = [dtype, dtype, out, dtype, out][: len(boxes)]
    ahead = ""
    if tile.ahead:
        ahead = _AHEAD.replace("WEIGHTS", f"p{len(boxes)}")
        boxes.append(())
        params.append(dtype)
    text = _TEXT.replace("PARAMS", ", ".join(f"p{n}" for n in range(len(boxes))))
    text = text.replace("AHEAD", ahead).replace("EARLY_LINES", EARLY)
    text = text.replace("OUT", HALVES.get(out, "tl.float32"))
    constants = {"ROWS": tile.rows, "COLS": tile.cols, "REST": tile.rest, "DEPTH": tile.depth,
                 "SPLIT": tile.split, "GROUP": GROUP, "STAGES": tile.stages,
                 "EARLY": 1}  # fmt: skip
    return KernelSource(
        "box_linear", "triton", text, tuple(params), (1,) * 4,
        (symbol("s0") * symbol("s1") * tile.split,), constants=tuple(constants.items()),
        num_warps=tile.num_warps, boxes=tuple(boxes),
    )  # fmt: skip


def sources_of(tile: Tile, dtype: torch.dtype) -> list[KernelSource]:
    parts = [add_parts(tile.split, dtype)] if tile.split > 1 else []
    return [box_linear(tile, dtype), *parts]

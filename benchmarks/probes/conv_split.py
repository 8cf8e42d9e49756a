"""Is a 3x3 convolution of ours faster than cuDNN's where pictures are small and weights large?

python benchmarks/probes/conv_split.py --out FOLDER [--seconds 120]

One H100, fp16, channels-last, stride 1: the lowest levels of SD1.5's UNet, where the weights are
most of what is read (1280 -> 1280 at 8x8: 29.5 MB, 9.9 us at 2.98 TB/s). An implicit GEMM whose
depth, the nine places times the channels, is cut between programs; the last of a tile adds the
parts in order. cuDNN is measured as it is called today, or with its own search (benchmark=True),
which has to be the first call of a shape in the process. Errors are against fp64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import contest
import torch
from torch import Tensor

from strop.ir.dims import symbol
from strop.ir.source import KernelSource, Scratch

# pictures, height and width, channels in and out
SHAPES = (
    (2, 8, 1280, 1280),
    (2, 8, 2560, 1280),
    (2, 16, 1280, 1280),
    (2, 16, 2560, 1280),
    (2, 16, 1920, 1280),
    (2, 16, 640, 1280),
    (2, 32, 640, 640),
    (8, 8, 1280, 1280),
    (1, 8, 1280, 1280),
    (2, 12, 1280, 1280),
)
# rows, cols, depth, stages, warps
TILES = (
    (128, 64, 64, 5, 4),
    (128, 64, 64, 4, 8),
    (128, 128, 64, 4, 8),
    (64, 64, 64, 6, 4),
    (128, 32, 64, 6, 4),
    (64, 128, 64, 5, 4),
    (128, 64, 128, 3, 4),
)
WAVES = (1, 2)  # programs of a multiprocessor
NUM_SMS, SETS = 132, 6

TEXT = """\
import triton
import triton.language as tl


@triton.jit
def conv_split(x, w, out, partials, arrivals, m, height, width, splits, C: tl.constexpr,
               CO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
               STAGES: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(1)
    tile = tl.program_id(0)
    rows = tile // (CO // BN) * BM + tl.arange(0, BM)
    cols = tile % (CO // BN) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    place = rows % m
    line = place // width % height
    column = place % width
    per = (9 * C // BK + splits - 1) // splits
    begin = split * per
    end = tl.minimum(9 * C // BK, begin + per)
    weights = w + cols[None, :] * (9 * C) + depth[:, None]
    acc = tl.full([BM, BN], 0.0, tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        tap = step // (C // BK)
        down = tap // 3 - 1
        right = tap % 3 - 1
        inside = (line + down >= 0) & (line + down < height)
        inside = inside & (column + right >= 0) & (column + right < width)
        at = (place + down * width + right) * C + step % (C // BK) * BK
        a = tl.load(x + at[:, None] + depth[None, :], mask=inside[:, None], other=0.0)
        acc = tl.dot(a, tl.load(weights + step * BK), acc)
    at = rows[:, None] * CO + cols[None, :]
    known = (rows < m)[:, None]
    if splits == 1:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=known)
    else:
        tl.store(partials + split * (m * CO) + at, acc, mask=known)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            tl.store(arrivals + tile, 0)
            total = tl.full([BM, BN], 0.0, tl.float32)
            for part in range(splits):
                total += tl.load(partials + part * (m * CO) + at, mask=known, other=0.0,
                                 cache_modifier=".cg")
            tl.store(out + at, total.to(out.dtype.element_ty), mask=known)
"""


def source_of(channels: int, outs: int, tiles: tuple[int, ...], dtype: torch.dtype) -> KernelSource:
    bm, bn, bk, stages, warps = tiles
    constants = {
        "C": channels,
        "CO": outs,
        "BM": bm,
        "BN": bn,
        "BK": bk,
        "STAGES": stages,
        "EARLY": 1,
    }
    tiles_of = (symbol("s0") + (bm - 1)) // bm * (outs // bn)
    return KernelSource(
        "conv_split",
        "triton",
        TEXT,
        (dtype,) * 3,
        (1,) * 4,
        grid=(tiles_of, symbol("s3")),
        scratch=(
            Scratch(torch.float32, symbol("s0") * symbol("s3") * outs),
            Scratch(torch.int32, tiles_of, zeroed=True),
        ),
        constants=tuple(constants.items()),
        num_warps=warps,
    )


def candidates(
    shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[tuple[str, KernelSource, int]]:
    """Names, sources and splits."""
    n, side, channels, outs = shape
    for tiles in TILES:
        bm, bn, bk, *_ = tiles
        if channels % bk or outs % bn:
            continue
        programs = -(-n * side * side // bm) * (outs // bn)
        steps = 9 * channels // bk
        for splits in sorted({max(1, min(NUM_SMS * waves // programs, steps)) for waves in WAVES}):
            yield f"{tiles} / {splits}", source_of(channels, outs, tiles, dtype), splits


def arguments(shape: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    n, side, channels, outs = shape
    found, order = [], torch.channels_last
    for seed in range(SETS):
        torch.manual_seed(seed)
        x = torch.randn(n, channels, side, side, device="cuda", dtype=torch.float16)
        w = torch.randn(outs, channels, 3, 3, device="cuda", dtype=torch.float16)
        w *= (9 * channels) ** -0.5
        out = torch.empty(n, outs, side, side, device="cuda", dtype=torch.float16)
        found.append(tuple(t.to(memory_format=order) for t in (x, w, out)))
    return found


def library_call(sets: list[tuple[Tensor, ...]], *, search: bool) -> Callable[[], None]:
    numbers, conv = itertools.cycle(sets), torch.ops.aten.cudnn_convolution.out

    def call() -> None:
        x, w, out = next(numbers)
        conv(x, w, [1, 1], [1, 1], [1, 1], 1, search, False, True, out=out)

    return call


def bound(
    source: KernelSource, splits: int, sets: list[tuple[Tensor, ...]], library: Any, stream: int
) -> tuple[Callable[[], None], list[Tensor]]:
    n, _, height, width = sets[0][0].shape
    sizes = [n * height * width, height, width, splits]
    scratch = contest.scratch_of(source, sizes)
    launches = itertools.cycle(
        [
            library.bind(source, [t.data_ptr() for t in (*tensors, *scratch)], sizes, stream)
            for tensors in sets
        ]
    )
    return lambda: next(launches)(), scratch


def measure(shape: tuple[int, ...], library: Any, *, search: bool) -> dict[str, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        sets, kept = arguments(shape), []
        x, w, out = sets[0]
        truth = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
        calls = {"cudnn search" if search else "cudnn": library_call(sets, search=search)}
        for name, source, splits in candidates(shape, x.dtype):
            calls[name], scratch = bound(source, splits, sets, library, stream.cuda_stream)
            kept.append(scratch)
        return contest.judged(calls, SETS, out, truth, stream)


def main() -> None:
    parser = contest.arguments_of(__doc__, seconds=120)
    parser.add_argument("--search", action="store_true", help="let cuDNN search its plans")
    args = parser.parse_args()
    sources = [s for shape in SHAPES for _, s, _ in candidates(shape, torch.float16)]
    contest.hold(
        "conv_split-search" if args.search else "conv_split",
        args,
        sources,
        SHAPES,
        partial(measure, search=args.search),
    )


if __name__ == "__main__":
    main()

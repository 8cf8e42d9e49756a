"""Is a GEMM of ours that ends in GEGLU faster than the library's GEMM and a kernel for GEGLU?

python benchmarks/probes/gemm_geglu.py --out FOLDER [--seconds 120]

One H100, fp16, the feed-forward layers of SD1.5 (512x512, batch 2 and 8) and SDXL (1024x1024, batch
2). value * gelu(gate) with [value, gate] = x w^T + b: both halves of a tile are accumulated by one
program, so that [rows, 2 * width] is never written. Every contender runs in a CUDA graph of many
calls over several sets of arguments; the errors are against fp64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import contest
import torch
from torch import Tensor, nn

import strop
from strop.ir.dims import symbol
from strop.ir.functions import FUNCTIONS
from strop.ir.source import KernelSource

SHAPES = (
    (8192, 320),
    (2048, 640),
    (512, 1280),
    (128, 1280),
    (32768, 320),
    (8192, 640),
    (2048, 1280),
)
# rows, cols of each half, depth, stages, warps
TILES = (
    (128, 64, 64, 3, 4),
    (128, 64, 64, 4, 4),
    (128, 64, 64, 4, 8),
    (128, 128, 64, 3, 8),
    (128, 128, 64, 4, 8),
    (128, 128, 32, 4, 8),
    (64, 64, 64, 4, 4),
    (64, 128, 64, 3, 4),
    (64, 128, 64, 4, 8),
    (256, 64, 64, 3, 8),
    (64, 32, 64, 5, 4),
    (128, 32, 64, 5, 4),
)
SETS = 4

TEXT = (
    """\
import triton
import triton.language as tl


@triton.jit
"""
    + FUNCTIONS["half_gelu"]
    + """


@triton.jit
def gemm_geglu(x, w, b, out, m, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
               EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    row_tiles = (m + BM - 1) // BM
    group = program // (GROUP * (N // BN))
    first = group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    inside = program % (GROUP * (N // BN))
    rows = (first + inside % height) * BM + tl.arange(0, BM)
    cols = (inside // height) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    x_at = x + (rows % m)[:, None] * K + depth[None, :]
    value_at = w + cols[None, :] * K + depth[:, None]
    gate_at = value_at + N * K
    value = tl.full([BM, BN], 0.0, tl.float32)
    gate = tl.full([BM, BN], 0.0, tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        a = tl.load(x_at + start)
        value = tl.dot(a, tl.load(value_at + start), value)
        gate = tl.dot(a, tl.load(gate_at + start), gate)
    value += tl.load(b + cols).to(tl.float32)[None, :]
    gate += tl.load(b + N + cols).to(tl.float32)[None, :]
    result = value * half_gelu(gate)
    tl.store(out + rows[:, None] * N + cols[None, :], result.to(out.dtype.element_ty),
             mask=(rows < m)[:, None])
"""
)


class Activation(nn.Module):
    """What follows the library's GEMM."""

    def forward(self, found: Tensor, bias: Tensor) -> Tensor:
        value, gate = (found + bias).chunk(2, -1)
        return value * torch.nn.functional.gelu(gate)


def source_of(width: int, depth: int, tiles: tuple[int, ...], dtype: torch.dtype) -> KernelSource:
    bm, bn, bk, stages, warps = tiles
    constants = {
        "N": width,
        "K": depth,
        "BM": bm,
        "BN": bn,
        "BK": bk,
        "STAGES": stages,
        "GROUP": 8,
        "EARLY": 1,
    }
    grid = ((symbol("s0") + (bm - 1)) // bm * (width // bn),)
    return KernelSource(
        "gemm_geglu",
        "triton",
        TEXT,
        (dtype,) * 4,
        (1,),
        grid=grid,
        constants=tuple(constants.items()),
        num_warps=warps,
    )


def sources(width: int, depth: int, dtype: torch.dtype) -> Iterator[tuple[str, KernelSource]]:
    for tiles in TILES:
        if width % tiles[1] == 0 and depth % tiles[2] == 0:
            yield str(tiles), source_of(width, depth, tiles, dtype)


def arguments(rows: int, depth: int) -> list[tuple[Tensor, ...]]:
    """Sets of x, weight, bias, the GEMM's result and GEGLU's."""
    found = []
    for seed in range(SETS):
        torch.manual_seed(seed)
        shapes = (
            (rows, depth),
            (8 * depth, depth),
            (8 * depth,),
            (rows, 8 * depth),
            (rows, 4 * depth),
        )
        x, w, b, y, out = (torch.randn(s, device="cuda", dtype=torch.float16) for s in shapes)
        found.append((x, w * depth**-0.5, b, y, out))
    return found


def error(result: Tensor, x: Tensor, w: Tensor, b: Tensor) -> float:
    truth = Activation()(x[:64].double() @ w.double().T, b.double())
    return contest.error(result[:64], truth)


def contenders(
    sets: list[tuple[Tensor, ...]], library: Any, stream: int
) -> tuple[dict[str, Callable[[], None]], dict[str, float]]:
    activation = strop.optimize(
        Activation().eval(), options=strop.Options(cuda_graphs=False, strict=True)
    )
    numbers = itertools.cycle(sets)

    def plain() -> None:
        x, w, b, y, _ = next(numbers)
        torch.mm(x, w.t(), out=y)
        activation(y, b)

    def gemm_alone() -> None:
        x, w, _, y, _ = next(numbers)
        torch.mm(x, w.t(), out=y)

    x, w, b, _, out = sets[0]
    errors = {"library": error(activation(torch.mm(x, w.t()), b), x, w, b)}
    calls: dict[str, Callable[[], None]] = {"library": plain, "gemm alone": gemm_alone}
    for name, source in sources(w.shape[0] // 2, w.shape[1], x.dtype):
        bound = [
            library.bind(
                source, [t.data_ptr() for t in (a[0], a[1], a[2], a[4])], [a[0].shape[0]], stream
            )
            for a in sets
        ]
        bound[0]()
        torch.cuda.synchronize()
        errors[name] = error(out, x, w, b)
        launches = itertools.cycle(bound)
        calls[name] = lambda launches=launches: next(launches)()
    return calls, errors


def measure(shape: tuple[int, ...], library: Any) -> dict[str, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        calls, errors = contenders(arguments(*shape), library, stream.cuda_stream)
        return {"us": contest.us_in_turns(calls, stream), "errors": errors}


def main() -> None:
    args = contest.arguments_of(__doc__, seconds=120).parse_args()
    found = [s for _, depth in SHAPES for _, s in sources(4 * depth, depth, torch.float16)]
    contest.hold("gemm_geglu", args, found, SHAPES, measure)


if __name__ == "__main__":
    main()

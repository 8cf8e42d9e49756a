"""Is a GEMM of ours that reads by TMA and ends in what follows faster than library and kernel?

python benchmarks/probes/gemm_tma.py --out FOLDER [--seconds 120]

One H100, fp16: linear layers of SD1.5 (512x512, batch 2) and SDXL (1024x1024, batch 2). Two ends:
"geglu", value * gelu(gate) with [value, gate] = x w^T + b: one program accumulates both halves, so
[rows, 2 * width] is never written; "residual", x w^T + b + r. Beside the library's GEMM
with a kernel of Strop's behind it, and the GEMM alone. ``gemm_geglu.py`` asked the first with
pointers. Errors are against fp64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import contest
import torch
import triton
import triton.language as tl
from conv_narrow import SETS
from gemm_geglu import Activation
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

import strop

# end, rows, depth, width of the result
SHAPES = (
    ("geglu", 8192, 320, 1280),
    ("geglu", 2048, 640, 2560),
    ("geglu", 512, 1280, 5120),
    ("residual", 8192, 320, 320),
    ("residual", 8192, 1280, 320),
    ("residual", 2048, 640, 640),
    ("residual", 2048, 2560, 640),
    ("residual", 512, 1280, 1280),
    ("residual", 512, 5120, 1280),
    ("geglu", 8192, 640, 2560),
    ("geglu", 2048, 1280, 5120),
    ("residual", 2048, 1280, 1280),
    ("residual", 2048, 5120, 1280),
    ("residual", 8192, 640, 640),
)


@dataclass(frozen=True)
class Tile:
    """``cols`` of the result, of each half for GEGLU."""

    rows: int
    cols: int
    stages: int
    warps: int
    depth: int = 64


TILES = tuple(
    Tile(*each)
    for each in (
        (128, 128, 4, 8),
        (128, 128, 3, 8),
        (128, 64, 4, 4),
        (128, 64, 5, 8),
        (64, 128, 5, 4),
        (64, 64, 6, 4),
        (128, 32, 6, 4),
        (64, 32, 6, 4),
        (256, 64, 4, 8),
        (128, 256, 3, 8),
        (64, 256, 4, 8),
        (256, 128, 3, 8),
        (128, 64, 3, 4),
        (64, 128, 2, 4),
        (128, 64, 2, 4),
        (128, 64, 3, 8),
        (64, 64, 3, 4),
        (128, 128, 2, 8),
    )
)


@triton.jit
def half_gelu(x):
    """As in strop.codegen.triton_text, where it is text."""
    a = tl.abs(x)
    p = (5.14027517e-05 - 1.16784452e-06 * a) * a - 8.70034642e-04
    p = ((p * a + 8.33262074e-03) * a - 5.37043910e-02) * a - 4.58637588e-01
    chance = tl.exp2((p * a - 1.15120849) * a - 0.999996922)
    return x * tl.where(x > 0, 1.0 - chance, chance)


@triton.jit(do_not_specialize=["row_tiles"])
def gemm_tma(
    x,
    w,
    out,
    more,
    bias,
    row_tiles,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    END: tl.constexpr,
):
    tiles: tl.constexpr = GROUP * (N // COLS)
    first = tl.program_id(0) // tiles * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    row = (first + tl.program_id(0) % tiles % height) * ROWS
    col = tl.program_id(0) % tiles // height * COLS
    acc = tl.zeros([ROWS, COLS], tl.float32)
    gate = tl.zeros([ROWS, COLS], tl.float32)
    for step in tl.range(0, K // DEPTH, num_stages=STAGES):
        a = x.load([row, step * DEPTH])
        acc = tl.dot(a, w.load([col, step * DEPTH]).T, acc)
        if END == "geglu":
            gate = tl.dot(a, w.load([N + col, step * DEPTH]).T, gate)
    acc += tl.load(bias + col + tl.arange(0, COLS)).to(tl.float32)[None, :]
    if END == "geglu":
        gate += tl.load(bias + N + col + tl.arange(0, COLS)).to(tl.float32)[None, :]
        acc = acc * half_gelu(gate)
    else:
        acc += more.load([row, col]).to(tl.float32)
    out.store([row, col], acc.to(out.dtype))


class Residual(nn.Module):
    """What follows the library's GEMM."""

    def forward(self, found: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return found + bias + residual


def tiles(shape: tuple[Any, ...]) -> Iterator[Tile]:
    end, rows, _, width = shape
    for tile in TILES:
        accumulated = tile.rows * tile.cols * (1 + (end == "geglu"))
        programs = rows * width / (tile.rows * tile.cols)
        if width % tile.cols == 0 and accumulated <= 128 * 256 and programs >= 32:
            yield tile


def arguments(shape: tuple[Any, ...]) -> list[tuple[Tensor, ...]]:
    """Sets of x, weight, bias, residual, the GEMM's result and the last one."""
    end, rows, depth, width = shape
    wide, found = width * (1 + (end == "geglu")), []
    for seed in range(SETS):
        torch.manual_seed(seed)
        sizes = ((rows, depth), (wide, depth), (wide,), (rows, width), (rows, wide), (rows, width))
        x, w, *others = (torch.randn(s, device="cuda", dtype=torch.float16) for s in sizes)
        found.append((x, w * depth**-0.5, *others))
    return found


def call_of(
    end: str,
    tile: Tile,
    x: Tensor,
    w: Tensor,
    bias: Tensor,
    residual: Tensor,
    _: Tensor,
    out: Tensor,
) -> Callable[[], None]:
    described = TensorDescriptor.from_tensor
    reads, weights = described(x, [tile.rows, tile.depth]), described(w, [tile.cols, tile.depth])
    writes, more = (described(t, [tile.rows, tile.cols]) for t in (out, residual))
    (rows, depth), width = x.shape, out.shape[1]
    row_tiles = triton.cdiv(rows, tile.rows)

    def call() -> None:
        gemm_tma[(row_tiles * (width // tile.cols),)](
            reads,
            weights,
            writes,
            more,
            bias,
            row_tiles,
            width,
            depth,
            tile.rows,
            tile.cols,
            tile.depth,
            tile.stages,
            8,
            end,
            num_warps=tile.warps,
        )

    return call


def run(shape: tuple[Any, ...], tile: Tile) -> None:
    call_of(shape[0], tile, *arguments(shape)[0])()


def truth_of(end: str, x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    found = x.double() @ w.double().T
    return Activation()(found, b.double()) if end == "geglu" else found + b.double() + r.double()


def measure(shape: tuple[Any, ...], good: Sequence[Tile]) -> dict[str, Any]:
    stream, errors, end = torch.cuda.Stream(), {}, shape[0]
    after = strop.optimize(
        (Activation() if end == "geglu" else Residual()).eval(),
        options=strop.Options(cuda_graphs=False, strict=True),
    )
    with torch.cuda.stream(stream), torch.no_grad():
        sets = arguments(shape)
        numbers = itertools.cycle(sets)

        def alone() -> None:
            x, w, _, _, y, _ = next(numbers)
            torch.mm(x, w.t(), out=y)

        def library() -> Tensor:
            x, w, b, r, y, _ = next(numbers)
            torch.mm(x, w.t(), out=y)
            return after(y, b) if end == "geglu" else after(y, b, r)

        truth = truth_of(end, *sets[0][:4])
        errors["library"] = contest.error(library(), truth)
        calls: dict[str, Callable[[], object]] = {"library": library, "gemm alone": alone}
        for tile in good:
            turns = itertools.cycle([call_of(end, tile, *tensors) for tensors in sets])
            name = str(astuple(tile))
            calls[name] = lambda turns=turns: next(turns)()
            calls[name]()
            torch.cuda.synchronize()
            errors[name] = contest.error(sets[0][5], truth)
            for _ in range(SETS - 1):
                calls[name]()
        return {"us": contest.us_in_turns(calls, stream), "errors": errors}


def main() -> None:
    args = contest.arguments_of(__doc__, seconds=120).parse_args()
    contest.hold_jit("gemm_tma", args, SHAPES, tiles, run, measure)


if __name__ == "__main__":
    main()

"""Is an attention of ours whose head is cut into powers of two faster than cuDNN's?

python benchmarks/probes/attn_boxes.py --out FOLDER [--seconds 120]

One H100, fp16: attention of SD1.5 at 512x512 and 1024x1024 (heads of 40, 80 and 160), to itself and
to 77 words, and of SDXL (64). Libraries compute heads of 40 as 64; here they are 32 + 16, of which
the tensor memory accelerator fills eight with zeros. The algorithm is that of FlashAttention-2
(https://arxiv.org/abs/2307.08691): one pass over the keys, a running maximum, fp32 sums. Errors
are against fp64, of 256 queries of one head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import contest
import torch
import triton
import triton.language as tl
from conv_narrow import SETS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

# batch, heads, queries, keys, size of a head
SHAPES = (
    (2, 8, 4096, 4096, 40), (2, 8, 16384, 16384, 40), (2, 8, 4096, 77, 40), (2, 8, 1024, 1024, 80),
    (2, 8, 1024, 77, 80), (2, 8, 256, 256, 160), (2, 8, 256, 77, 160), (2, 8, 64, 64, 160),
    (2, 8, 64, 77, 160), (2, 8, 4096, 4096, 80), (2, 8, 16384, 77, 40), (2, 10, 4096, 4096, 64),
    (2, 20, 1024, 1024, 64), (2, 20, 1024, 77, 64), (8, 8, 4096, 4096, 40),
)  # fmt: skip
PARTS = {40: (32, 16), 64: (64, 0), 80: (64, 16), 160: (128, 32)}  # of a head


@dataclass(frozen=True)
class Tile:
    queries: int
    keys: int
    stages: int
    warps: int


TILES = tuple(Tile(*each) for each in (
    (64, 64, 3, 4), (64, 128, 2, 4), (64, 128, 3, 4), (128, 64, 3, 4), (128, 64, 3, 8),
    (128, 128, 2, 8), (128, 128, 3, 8), (64, 32, 4, 4), (128, 128, 2, 4), (128, 64, 2, 4),
))  # fmt: skip
FEW = tuple(Tile(*each) for each in (
    (64, 128, 1, 4), (128, 128, 1, 8), (128, 128, 1, 4), (64, 32, 3, 4), (64, 16, 5, 4),
    (128, 32, 3, 8), (128, 16, 5, 4), (64, 64, 2, 4),
))  # fmt: skip


@triton.jit
def attn_boxes(q, k, v, out, keys, factor, HEADS: tl.constexpr, FIRST: tl.constexpr,
               REST: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
               STAGES: tl.constexpr, IS_CUT: tl.constexpr):  # fmt: skip
    start = tl.program_id(0) * QUERIES
    b, h = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    q0 = q[0].load([b, h, start, 0]).reshape([QUERIES, FIRST])
    acc0 = tl.zeros([QUERIES, FIRST], tl.float32)
    if REST:
        q1 = q[1].load([b, h, start, FIRST]).reshape([QUERIES, REST])
        acc1 = tl.zeros([QUERIES, REST], tl.float32)
    most = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for at in tl.range(0, keys, KEYS, num_stages=STAGES):
        s = tl.dot(q0, k[0].load([b, h, at, 0]).reshape([KEYS, FIRST]).T)
        if REST:
            s = tl.dot(q1, k[1].load([b, h, at, FIRST]).reshape([KEYS, REST]).T, s)
        if IS_CUT:  # the last step has fewer keys: zeros came in their place
            s = tl.where((at + tl.arange(0, KEYS) < keys)[None, :], s, -float("inf"))
        new = tl.maximum(most, tl.max(s, 1) * factor)
        p = tl.exp2(s * factor - new[:, None])
        shrink = tl.exp2(most - new)
        total = total * shrink + tl.sum(p, 1)
        most = new
        p = p.to(tl.float16)
        acc0 = tl.dot(p, v[0].load([b, h, at, 0]).reshape([KEYS, FIRST]), acc0 * shrink[:, None])
        if REST:
            v1 = v[1].load([b, h, at, FIRST]).reshape([KEYS, REST])
            acc1 = tl.dot(p, v1, acc1 * shrink[:, None])
    share = (1.0 / total)[:, None]
    out[0].store([b, h, start, 0], (acc0 * share).to(tl.float16).reshape([1, 1, QUERIES, FIRST]))
    if REST:
        rest = (acc1 * share).to(tl.float16).reshape([1, 1, QUERIES, REST])
        out[1].store([b, h, start, FIRST], rest)


def tiles(shape: tuple[int, ...]) -> Iterator[Tile]:
    _, _, queries, keys, head = shape
    for tile in FEW if keys == 77 else TILES:
        if tile.queries <= queries and tile.keys <= max(keys, 128) and tile.keys * head <= 64 * 160:
            yield tile


def arguments(shape: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    """Sets of q, k, v, slices of one product as in the UNet, and the result: (B, H, S, d)."""
    batch, heads, queries, keys, head = shape
    found = []
    for seed in range(SETS):
        torch.manual_seed(seed)
        half: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
        q, out = torch.randn(2, batch, queries, heads, head, **half)
        k, v = torch.randn(batch, keys, 2, heads, head, **half).unbind(2)
        if keys == queries:
            merged = torch.stack((q, k, v), 2)
            q, k, v = merged.unbind(2)
        found.append(tuple(t.transpose(1, 2) for t in (q, k, v, out)))
    return found


def call_of(tile: Tile, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Callable[[], None]:
    (batch, heads, queries, head), keys = q.shape, k.shape[2]
    parts = PARTS[head]
    described: list[tuple[TensorDescriptor, ...]] = []
    for tensor, rows in ((q, tile.queries), (k, tile.keys), (v, tile.keys), (out, tile.queries)):
        described.append(tuple(
            TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, width])
            for width in parts if width
        ))  # fmt: skip
    grid, factor = (
        (triton.cdiv(queries, tile.queries), batch * heads),
        math.log2(math.e) / head**0.5,
    )

    def call() -> None:
        attn_boxes[grid](*described, keys, factor, heads, *parts, tile.queries, tile.keys,
                         tile.stages, keys % tile.keys != 0, num_warps=tile.warps)  # fmt: skip

    return call


def run(shape: tuple[int, ...], tile: Tile) -> None:
    call_of(tile, *arguments(shape)[0])()


def error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    q, k, v = (t[-1, -1].double() for t in (q, k, v))
    truth = torch.softmax(q[:256] @ k.T / q.shape[1] ** 0.5, -1) @ v
    return contest.error(out[-1, -1, :256], truth)


def measure(shape: tuple[int, ...], good: Sequence[Tile]) -> dict[str, Any]:
    stream, errors = torch.cuda.Stream(), {}
    with torch.cuda.stream(stream), torch.no_grad():
        sets = arguments(shape)
        numbers, calls = itertools.cycle(sets), dict[str, Callable[[], object]]()

        def library(backend: SDPBackend) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*next(numbers)[:3])

        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION),
                              ("flash", SDPBackend.FLASH_ATTENTION)):  # fmt: skip
            errors[name] = error(library(backend), *sets[0][:3])
            for _ in range(SETS - 1):
                library(backend)
            calls[name] = lambda backend=backend: library(backend)
        for tile in good:
            turns = itertools.cycle([call_of(tile, *tensors) for tensors in sets])
            name = str(astuple(tile))
            calls[name] = lambda turns=turns: next(turns)()
            for _ in range(SETS):
                calls[name]()
            torch.cuda.synchronize()
            errors[name] = error(sets[0][3], *sets[0][:3])
        return {"us": contest.us_in_turns(calls, stream), "errors": errors}


def main() -> None:
    args = contest.arguments_of(__doc__, seconds=120).parse_args()
    contest.hold_jit("attn_boxes", args, SHAPES, tiles, run, measure)


if __name__ == "__main__":
    main()

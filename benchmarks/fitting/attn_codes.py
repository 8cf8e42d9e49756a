"""Attention by e4m3 codes, in PTX, with the kernel that makes them, beside exact attention.

One Hopper GPU, fp16: attention of SD1.5 (heads of 40 and 80), SDXL (64), and Flux and Wan (128) to
itself. ``strop.kernels.attention.codes`` says how ours works. The peers are exact: cuDNN, and the
kernel that is chosen. A tile's time is that of both kernels; "codes of" says that of the first
alone. Errors are against fp64, of 256 queries of one head. At the end it prints the numbers that
``tuned.h100.BY_CODES`` wants: what a round and a step of each tile take, fitted to all shapes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.fitting import attn_tma, contest
from benchmarks.fitting.conv_narrow import SETS
from strop.ir.source import KernelSource
from strop.kernels.attention import rows as exact
from strop.kernels.attention.code_rows import launches_by
from strop.kernels.attention.wgmma_tiles import WgmmaTile
from strop.kernels.kernel import Launches, Problem
from strop.kernels.tuned import h100
from strop.runtime.run.launched_calls import CallSite, Launched, scratch_bytes

SECONDS = 100
# batch, heads, tokens, size of a head
SHAPES = (
    (2, 8, 16384, 40),
    (2, 8, 4096, 40),
    (2, 10, 4096, 64),
    (2, 20, 1024, 64),
    (2, 8, 4096, 80),
    (2, 8, 1024, 80),
    (1, 24, 4608, 128),
    (2, 8, 1024, 40),
    (2, 8, 9216, 40),
    (1, 10, 4096, 64),
    (4, 20, 1024, 64),
    (2, 10, 9216, 64),
    (2, 8, 2304, 80),
    (8, 8, 1024, 80),
    (1, 24, 1536, 128),
    (1, 12, 14040, 128),
)
# groups, keys, stages, programs: those whose registers suffice
TILES: Mapping[int, tuple[WgmmaTile, ...]] = {
    head: tuple(itertools.starmap(WgmmaTile, found))
    for head, found in {
        40: ((2, 128, 3), (3, 128, 3), (3, 64, 4), (4, 64, 4), (1, 128, 3, 2), (1, 64, 4, 3)),
        64: ((2, 128, 3), (3, 64, 4), (1, 128, 2, 2), (1, 64, 4, 3)),
        80: ((2, 128, 3), (3, 64, 3), (1, 64, 3, 2)),
        128: ((2, 128, 2), (2, 128, 3), (2, 64, 4)),
    }.items()
}


def problem_of(shape: Sequence[int]) -> Problem:
    batch, heads, tokens, head = shape
    operand = (batch, heads, tokens, head)
    attrs = (("causal", False), ("scale", None))
    return Problem("attention", attrs, (operand,) * 3, torch.float16)


def exact_launches(of: Problem) -> Launches | None:
    """Return what computes the same exactly, where it is a kernel of ours."""
    return exact.WGMMA.launch(of, h100.DEVICE)


def contenders(shape: Sequence[int]) -> dict[str, Launches]:
    of, found = problem_of(shape), dict[str, Launches]()
    if own := exact_launches(of):
        found["exact"] = own
    for tile in TILES[shape[-1]]:
        both = launches_by(tile, of, h100.DEVICE)
        found.setdefault(made_for(tile), replace(both, parts=both.parts[:1]))
        found[name_of(tile)] = both
    return found


def name_of(tile: WgmmaTile) -> str:
    return f"({tile.groups}, {tile.keys}, {tile.stages}, {tile.programs})"


def made_for(tile: WgmmaTile) -> str:
    """Name what makes the codes for a tile."""
    return f"codes of {tile.keys}"


def sources(shape: Sequence[int]) -> Iterator[KernelSource]:
    for launches in contenders(shape).values():
        yield from launches.sources


def bound(
    launches: Launches, sets: Sequence[tuple[Tensor, ...]], library: Any, stream: int
) -> Callable[[], None]:
    """Return what runs all launches on one set of tensors after the other."""
    memory = torch.empty(scratch_bytes(launches), dtype=torch.uint8, device="cuda")
    site = CallSite(library, stream, is_early=True, is_steady=True)
    own, turns = Launched(launches, site, memory), itertools.cycle(sets)

    def call() -> None:
        *inputs, out = next(turns)
        assert own.run(inputs, out)

    return call


def measure(shape: tuple[int, ...], library: Any) -> dict[str, Any]:
    batch, heads, tokens, head = shape
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        sets = attn_tma.arguments((batch, heads, tokens, tokens, head))
        q, k, v, out = sets[-1]
        turns = itertools.cycle(sets)

        def cudnn() -> None:
            q, k, v, out = next(turns)
            attend = torch.ops.aten._scaled_dot_product_cudnn_attention
            out.copy_(attend(q, k, v, None, False, 0.0, False, False)[0])

        calls: dict[str, Callable[[], None]] = {"cudnn and copy": cudnn}
        for name, launches in contenders(shape).items():
            calls[name] = bound(launches, sets, library, stream.cuda_stream)
        errors = {}
        for name, call in calls.items():
            if name.startswith("codes"):
                continue  # which writes no result
            out.fill_(torch.nan)
            for _ in range(SETS):
                call()
            torch.cuda.synchronize()
            errors[name] = attn_tma.error(out, q, k, v)
        return {**contest.us_in_turns(calls, stream), "errors": errors}


def fitted(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line of ``BY_CODES`` for each tile: microseconds of a round and of a step, by least
    squares of relative errors over the shapes, and the worst of those."""
    for head, tiles in TILES.items():
        for tile in tiles:
            counts, times = [], []
            for row in rows:
                batch, heads, tokens, own = row["shape"]
                if own == head:
                    shares = tile.shares(batch * heads, tokens, tokens, h100.DEVICE.sms)
                    us = row["us"][name_of(tile)] - row["us"][made_for(tile)]
                    counts.append((shares.rounds / us, shares.load * -(-tokens // tile.keys) / us))
                    times.append(1.0)
            if len(times) > 1:
                found, *_ = np.linalg.lstsq(np.array(counts), np.array(times), rcond=None)
                start, step = (max(float(each), 0.0) for each in found)
                worst = float(np.abs(np.array(counts) @ (start, step) - 1).max())
                yield f"{head}: Rounds({tile}, {start:.2f}, {step:.3f}),  # {worst:.0%} off at most"


def run(args: argparse.Namespace) -> None:
    wanted = itertools.chain.from_iterable(map(sources, SHAPES))
    rows = list[dict[str, Any]]()

    def kept(shape: tuple[int, ...], library: Any) -> dict[str, Any]:
        rows.append({"shape": shape, **measure(shape, library)})
        return {name: found for name, found in rows[-1].items() if name != "shape"}

    contest.hold("attn_codes", args, wanted, SHAPES, kept)
    print("\n".join(fitted(rows)))

"""Linears by WGMMA, in PTX, beside cuBLAS's: alone, gated, or added to what is there.

One H100, fp16: x (M, K) w (N, K)^T of SD1.5's and SDXL's linear layers, alone, and with value *
gelu(gate) at the end ("gated", N columns of the product, beside cuBLAS with a kernel behind it):
see ``strop/kernels/gemm/wgmma_gemm.py``; or with biases and what lies where results go ("sum"); or
with biases and GELU's tanh form ("activated", beside cuBLASLt's epilogue). Chains of
launches that may begin early. ``--wide``: in bf16, at the sizes of large transformers, whose gates
are SiLU's.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fitting import contest
from benchmarks.fitting.conv_narrow import SETS
from benchmarks.fitting.conv_wgmma import bound, forms
from strop.bench.select import HELD_OUT
from strop.ir.contractions import GELU, GELU_TANH, SILU, Gate
from strop.ir.source import KernelSource
from strop.kernels.gemm import geglu
from strop.kernels.gemm.rows import GemmForm, line_of
from strop.kernels.gemm.tile import ACTIVATED, ENDS, GATED, MOST_SHARED, PLAIN, SUM, GemmTile
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.kernel import Problem
from strop.kernels.tuned import h100
from strop.runtime.run.launched_calls import CallSite, Launched, scratch_bytes

SECONDS = 120
WORST = 1.4  # tiles of which a guess says that they take so much longer are left out
# M, N, K, what happens at the end
SHAPES = (
    *(
        (m, n, k, PLAIN)
        for m, n, k in (
            (2048, 1280, 1280),
            (8192, 320, 320),
            (2048, 640, 640),
            (512, 1280, 1280),
            (512, 1280, 5120),
            (8192, 640, 640),
            (8192, 960, 320),
            (2048, 1920, 640),
            (512, 3840, 1280),
            (2048, 3840, 1280),
            (8192, 320, 1280),
            (2048, 640, 2560),
            (2048, 1280, 5120),
            (8192, 640, 2560),
            (128, 1280, 1280),
            (32768, 320, 320),
            (300, 328, 200),
        )
    ),
    *(
        (m, n, k, GATED)
        for m, n, k in (
            (2048, 10240, 1280),
            (8192, 2560, 320),
            (2048, 5120, 640),
            (512, 10240, 1280),
            (8192, 5120, 640),
            (32768, 2560, 320),
        )
    ),
    # 768x768, other batches, and sizes of no model
    *(
        (m, n, k, PLAIN)
        for m, n, k in (
            (18432, 320, 320),
            (4608, 640, 640),
            (1152, 1280, 1280),
            (4608, 1920, 640),
            (1152, 1280, 5120),
            (18432, 960, 320),
            (4096, 320, 320),
            (1024, 640, 640),
            (6144, 640, 640),
            (3072, 1280, 1280),
            (1536, 3840, 1280),
            (4096, 1280, 5120),
            (640, 2560, 640),
            (5000, 1600, 960),
        )
    ),
    *(
        (m, n, k, SUM)
        for m, n, k in (
            (2048, 1280, 1280),
            (2048, 1280, 5120),
            (8192, 640, 640),
            (8192, 640, 2560),
            (8192, 320, 320),
            (8192, 320, 1280),
            (2048, 640, 640),
            (2048, 640, 2560),
            (512, 1280, 1280),
            (512, 1280, 5120),
            (128, 1280, 1280),
            (128, 1280, 5120),
            (32768, 320, 320),
            (32768, 320, 1280),
            (1152, 1280, 1280),
            (1152, 1280, 5120),
            (64, 1280, 1280),
            (64, 1280, 5120),
            (3072, 1280, 1280),
            (4096, 1280, 5120),
        )
    ),
    *(
        (m, n, k, GATED)
        for m, n, k in (
            (18432, 2560, 320),
            (4608, 5120, 640),
            (1152, 10240, 1280),
            (4096, 10240, 1280),
            (3072, 5120, 640),
            (12288, 2560, 320),
        )
    ),
)
# Rows, columns and depth of transformers: PixArt, SD3, Flux, CLIP, T5
WIDTHS = (
    *(
        (m, n, k, PLAIN)
        for m, n, k in (
            (4096, 1152, 1152),
            (4096, 4608, 1152),
            (4096, 1152, 4608),
            (1024, 1152, 1152),
            (4096, 1536, 1536),
            (4096, 6144, 1536),
            (4096, 1536, 6144),
            (1178, 1536, 1536),
            (4608, 3072, 3072),
            (4608, 12288, 3072),
            (4608, 3072, 12288),
            (512, 3072, 3072),
            (154, 768, 768),
            (616, 768, 768),
            (4096, 3072, 768),
            (4096, 768, 3072),
            (512, 10240, 4096),
            (8192, 2048, 2048),
            (154, 5120, 1280),
            (333, 1000, 520),
        )
    ),
    *((m, n, k, SUM) for m, n, k in ((4096, 1152, 4608), (4608, 3072, 3072), (512, 4096, 10240))),
    *(
        (m, n, k, GATED)
        for m, n, k in ((4096, 9216, 1152), (4096, 12288, 1536), (512, 20480, 4096))
    ),
)
# Of large transformers: Z-Image, Flux, Qwen-Image, Wan, SD3, Klein, T5-XXL and Qwen2.5-VL
WIDE = (
    *((m, n, k, GATED) for m, n, k in ((4160, 20480, 3840), (4608, 18432, 3072))),
    *((m, n, k, GATED) for m, n, k in ((512, 20480, 4096), (512, 37888, 3584))),
    *((4160, n, k, PLAIN) for n, k in ((11520, 3840), (3840, 3840), (3840, 10240))),
    *((4608, n, k, PLAIN) for n, k in ((21504, 3072), (9216, 3072), (3072, 15360))),
    *((4096, n, k, PLAIN) for n, k in ((9216, 3072), (3072, 3072), (3072, 12288))),
    *((512, n, k, PLAIN) for n, k in ((9216, 3072), (3072, 3072), (3072, 12288))),
    *((8192, n, k, PLAIN) for n, k in ((4608, 1536), (1536, 1536), (1536, 6144))),
    *((14040, n, k, PLAIN) for n, k in ((4608, 1536), (1536, 1536), (1536, 8960))),
    *((8192, n, k, PLAIN) for n, k in ((15360, 5120), (5120, 5120), (5120, 13824))),
)
# Rows, columns and depth of feed-forward layers: PixArt, SD3, Wan, Flux and Qwen-Image
FEED_FORWARD = tuple(
    (m, n, k, ACTIVATED)
    for m, n, k in (
        (4096, 4608, 1152),
        (8192, 6144, 1536),
        (14040, 8960, 1536),
        (4096, 12288, 3072),
        (4608, 12288, 3072),
        (512, 12288, 3072),
        (666, 6144, 1536),
    )
)
TILES = tuple(
    dict.fromkeys(
        (
            *h100.LINEAR_TILES,
            *(
                GemmTile(*each)
                for each in (
                    *((2, 80, 7, split) for split in (1, 2, 4)),
                    *((1, 80, 8, split) for split in (2, 4)),
                    (2, 128, 6),
                    (2, 160, 5),
                    (2, 256, 4),
                    (3, 160, 3, 1, True),
                    *((2, *each, 1, True, True) for each in ((160, 4), (128, 5), (192, 3))),
                )
            ),
        )
    )
)
GATED_TILES = (
    *h100.GATED_TILES,
    *(
        GemmTile(*each)
        for each in (
            (2, 160, 5),
            (2, 256, 4),
            (2, 128, 6, 1, True),
            (2, 64, 7, 1, True),
            (2, 80, 7, 1, True),
            *((2, *each, 1, True, True) for each in ((160, 4), (128, 5), (192, 4))),
        )
    ),
)
SUM_TILES = tuple(
    dict.fromkeys(
        (
            *h100.SUM_TILES,
            *(
                GemmTile(*each)
                for each in (
                    (2, 80, 7, 8),
                    (1, 80, 8, 8),
                    *((1, 160, 7, split) for split in (2, 4)),
                    (2, 256, 3, 1, True),
                    (2, 80, 6, 1, True),
                    *((2, *each, 1, True, True) for each in ((160, 4), (128, 5))),
                )
            ),
        )
    )
)
ACTIVATED_TILES = (
    *(tile for tile in h100.LINEAR_TILES if tile.split == 1),
    *(GemmTile(2, *each, 1, True, True) for each in ((160, 4), (128, 5), (192, 3), (192, 4))),
)
OF_ENDS = {PLAIN: TILES, GATED: GATED_TILES, SUM: SUM_TILES, ACTIVATED: ACTIVATED_TILES}


@dataclass(frozen=True, slots=True)
class Sweep:
    """Say of a sweep's products what is no size."""

    dtype: torch.dtype
    gated_by: str  # the activation of gates
    worst: float = WORST

    def forms_of(self, shape: tuple[Any, ...]) -> list[GemmForm]:
        end = shape[-1]
        found = forms(line_of(*shape), end, OF_ENDS[end], self.worst)
        if end not in (ACTIVATED, GATED):
            return found
        gate = Gate(GELU_TANH if end == ACTIVATED else self.gated_by)
        made = [replace(form, product=replace(form.product, gate=gate)) for form in found]
        return [form for form in made if form.product.shared <= MOST_SHARED]

    def sources(self, shape: tuple[Any, ...]) -> Iterator[KernelSource]:
        yield from (wgmma_gemm(each.product, self.dtype) for each in self.forms_of(shape))


OF_HALVES, OF_WIDE = Sweep(torch.float16, GELU), Sweep(torch.bfloat16, SILU, 1.2)


def library_call(
    sets: list[tuple[Tensor, ...]], end: str, gated_by: str, library: Any, stream: int
) -> Callable[[], object]:
    """cuBLAS's; gates are a kernel of ours behind it, sums one of torch's."""
    turns = itertools.cycle(sets)

    def plain() -> Tensor:
        x, w, out, _ = next(turns)
        return torch.mm(x, w.t(), out=out)

    x, w, _, bias = sets[0]
    shapes, attrs = tuple(tuple(t.shape) for t in (x, w, bias)), Gate(gated_by).attrs
    problem = Problem("geglu", tuple(attrs.items()), shapes, x.dtype)
    launches = geglu.launch(problem, h100.DEVICE)
    memory = torch.empty(scratch_bytes(launches), dtype=torch.uint8, device="cuda")
    site = CallSite(library, stream, is_early=False, is_steady=True)
    gates = Launched(launches, site, memory)

    def gated() -> None:
        x, w, out, bias = next(turns)
        gates.run([x, w, bias], out)

    def added() -> Tensor:
        x, w, out, bias = next(turns)
        return torch.add(torch.addmm(bias, x, w.t()), out, out=out)

    def activated() -> None:
        x, w, out, bias = next(turns)
        torch._addmm_activation(bias, x, w.t(), use_gelu=True, out=out)

    return {PLAIN: plain, GATED: gated, SUM: added, ACTIVATED: activated}[end]


def arguments(shape: tuple[Any, ...], dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    rows, cols, depth, _ = shape
    new: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    outs, found = line_of(*shape).outs, []
    for seed in range(SETS):
        torch.manual_seed(seed)
        x, w = torch.randn(rows, depth, **new), torch.randn(cols, depth, **new) * depth**-0.5
        found.append((x, w, torch.empty(rows, outs, **new), torch.randn(cols, **new)))
    return found


def truth_of(end: str, gated_by: str, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    product = x.double() @ w.double().t()
    if end == GATED:
        value, gate = (product + bias).chunk(2, -1)
        activation = torch.nn.functional.silu if gated_by == SILU else torch.nn.functional.gelu
        return value * activation(gate)
    if end == ACTIVATED:
        return torch.nn.functional.gelu(product + bias, approximate="tanh")
    return product + bias if end == SUM else product


def measure(sweep: Sweep, shape: tuple[Any, ...], library: Any) -> dict[str, Any]:
    end, of, stream = shape[-1], line_of(*shape), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        sets = arguments(shape, sweep.dtype)
        x, w, out, bias = sets[0]
        calls = {"cublas": library_call(sets, end, sweep.gated_by, library, stream.cuda_stream)}
        for each in sweep.forms_of(shape):
            calls[str(astuple(each.product.tile))] = bound(
                each, of, sets, library, stream.cuda_stream, dtype=sweep.dtype
            )
        truth, errors = truth_of(end, sweep.gated_by, x, w, bias), {}
        for name, call in calls.items():
            out.fill_(0.0 if end == SUM else float("nan"))
            for _ in range(SETS):
                call()
            torch.cuda.synchronize()
            errors[name] = contest.error(out, truth)
        return {**contest.us_in_turns(calls, stream), "errors": errors}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--held-out", action="store_true", help="sizes that no rule was fitted to")
    parser.add_argument("--widths", action="store_true", help="the widths of transformers")
    parser.add_argument("--wide", action="store_true", help="large transformers, in bf16")
    parser.add_argument("--end", choices=(*ENDS, ACTIVATED), help="those of one end")


def run(args: argparse.Namespace) -> None:
    shapes: Sequence[tuple[Any, ...]] = WIDTHS if args.widths else WIDE if args.wide else SHAPES
    sweep = OF_WIDE if args.wide else OF_HALVES
    if args.end == ACTIVATED:  # SD's UNets have none
        shapes = FEED_FORWARD
    if args.held_out:
        shapes = sorted(HELD_OUT["linear_wgmma"])
    shapes = [shape for shape in shapes if args.end in (None, shape[-1])]
    wanted = itertools.chain.from_iterable(map(sweep.sources, shapes))
    contest.hold("linear_wgmma", args, wanted, shapes, partial(measure, sweep))

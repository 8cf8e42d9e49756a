"""What does a product cost in a row: microseconds, and millijoules, at the GPU's power limit?

python benchmarks/probes/energy.py --out FOLDER [--seconds 90]

One H100, fp16. Steps of a UNet run at 700 W, where the clock falls until they do: of two kernels
that take equally long by themselves the one that moves fewer bytes is the faster one there. The
library, ``wgmma_gemm``, and ``gemm_wgmma``, whose programs share what they fetch by multicast
(1 x 2: the same rows, 2 x 1: the same columns). Each runs alone for a second and more.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any

import contest
import conv_wgmma
import gemm_wgmma
import linear_wgmma
import torch
from conv_narrow import SETS, arguments, library_call, window_of

from strop.bench import environment, timer
from strop.bench.select import picture
from strop.ir.source import KernelSource
from strop.kernels.gemm.choice import Form, form_of, line_of
from strop.kernels.gemm.tile import PLAIN
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm

LINEARS = ((8192, 320, 320), (2048, 1280, 1280), (8192, 640, 640), (2048, 1280, 5120))  # M, N, K
CONVS = ((2, 64, 320, 320, 3, 1), (2, 32, 640, 640, 3, 1), (2, 64, 640, 640, 3, 1))
SHARING = tuple(
    gemm_wgmma.Tile(*each)
    for each in (
        (2, 160, 5),
        (2, 160, 5, 1, 2),
        (2, 160, 5, 2, 1),
        (2, 160, 5, 2, 2),
    )
)
SETTLE_S, INNER = 1.0, 8
CUDA = torch.device("cuda")


def chosen(shape: tuple[int, ...]) -> Form | None:
    is_conv = len(shape) == len(CONVS[0])
    return form_of(picture(shape) if is_conv else line_of(*shape, PLAIN))


def sharing(shape: tuple[int, ...]) -> Iterator[gemm_wgmma.Tile]:
    for tile in SHARING:
        if shape[0] % (tile.rows * tile.down) == shape[1] % (tile.cols * tile.across) == 0:
            yield tile


def sources() -> Iterator[KernelSource]:
    for shape in (*LINEARS, *CONVS):
        found = chosen(shape)
        if found:
            yield wgmma_gemm(found.product, torch.float16)
    yield from map(gemm_wgmma.group_linear, SHARING)


def contenders(shape: tuple[int, ...], library: Any, stream: int) -> dict[str, contest.Call]:
    found: dict[str, contest.Call] = {}
    form, is_conv = chosen(shape), len(shape) == len(CONVS[0])
    if is_conv:
        of, sets = picture(shape), arguments(shape)
        found["cudnn"] = library_call(sets, window_of(shape))
    else:
        of, sets = line_of(*shape, PLAIN), linear_wgmma.arguments((*shape, PLAIN))
        found["cublas"] = linear_wgmma.library_call(sets, PLAIN, library, stream)
        for tile in sharing(shape):
            triples = [each[:3] for each in sets]
            found[f"shared {astuple(tile)}"] = gemm_wgmma.bound(tile, triples, library, stream)
    if form:
        found[str(astuple(form.product.tile))] = conv_wgmma.bound(form, of, sets, library, stream)
    return found


def held(replay: Callable[[], object]) -> dict[str, Any]:
    """In a row, from when the clock has settled."""
    times = list[float]()

    def call() -> None:
        times.append(timer.elapsed_ms(replay, CUDA, INNER))

    load = environment.gpu_load(call, SETTLE_S)
    us = 1e3 * statistics.median(times[len(times) // 2 :]) / contest.CALLS
    watts = float(load["power.draw.instant"].split()[0])
    return {"us": round(us, 2), "mJ": round(us * watts * 1e-3, 2), **load}


def measure(shape: tuple[int, ...], library: Any) -> dict[str, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        calls = contenders(shape, library, stream.cuda_stream)
        alone = contest.us_in_turns(calls, stream)
        in_a_row = {name: held(replay) for name, replay in contest.in_graphs(calls, stream).items()}
    for name, found in in_a_row.items():
        print(f"  {name}: {alone[name]} us in turns; in a row {found}", flush=True)
    return {"us": alone, "errors": dict.fromkeys(alone, 0.0), "in_a_row": in_a_row}


def main() -> None:
    args = contest.arguments_of(__doc__, seconds=90).parse_args()
    assert SETS > 1  # what one call reads is not what the one before has left
    contest.hold("energy", args, sources(), (*LINEARS, *CONVS), measure)


if __name__ == "__main__":
    main()

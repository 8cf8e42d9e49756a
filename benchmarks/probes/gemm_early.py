"""Which linear layers of a UNet does a GEMM of ours with early launch do faster than cuBLAS?

python benchmarks/probes/gemm_early.py --out FOLDER [--seconds 85] [--only ROWSxDEPTHxWIDTH ...]

One H100, fp16, batch 2: the linears and 1x1 convolutions of SD1.5 at 512x512 and 1024x1024 and of
SDXL at 1024x1024, as the compiled programs call them: queries, keys and values are one, biases are
the next kernel's. Left out: rows of text and time (4 to 6 launches), and where ``box_geglu`` does
linear and gate. Two numbers decide, a CUDA graph of 24 times [pointwise kernel, GEMM] each:

- ``now``: the pointwise kernel has a program for 1024 numbers, so above 640 of them it starts and
  lets start as any other. That is what the UNet's own kernels do at 2048 rows and more.
- ``few``: at most 528 programs, so that all of ours are launched early.

Weights come from memory, as of a step: 24 of them, and the cache is cleared before each replay.
Activations were just written. ``alone``: GEMMs only, none launched early. ``ahead``: the two best
tiles once more, with weights that are asked for before the wait.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import contest
import torch
from box_linear import Tile, box_linear, sources_of
from contest import CALLS
from torch import Tensor

from strop.bench import environment, timer
from strop.ir.dims import symbol
from strop.ir.functions import EARLY
from strop.ir.source import MOST_EARLY_PROGRAMS, KernelSource
from strop.runtime.kernels import KernelLibrary, kernel_library

Shape = tuple[int, int, int]  # rows, depth, width of the result
Launches = list[Callable[[], object]]

MODELS = ("SD1.5 512", "SD1.5 1024", "SDXL 1024")
# How often in a step of each.
LINEARS: dict[Shape, tuple[int, int, int]] = {
    (8192, 320, 320): (25, 0, 0), (2048, 640, 640): (25, 0, 0), (512, 1280, 1280): (25, 5, 0),
    (8192, 320, 960): (5, 0, 0), (8192, 320, 2560): (5, 0, 0), (8192, 1280, 320): (5, 0, 0),
    (2048, 640, 1920): (5, 0, 0), (2048, 640, 5120): (5, 0, 0), (2048, 2560, 640): (5, 0, 0),
    (512, 1280, 3840): (5, 1, 0), (512, 1280, 10240): (5, 1, 0), (512, 5120, 1280): (5, 1, 0),
    (128, 1280, 1280): (5, 0, 0), (128, 2560, 1280): (3, 0, 0), (512, 2560, 1280): (2, 3, 0),
    (8192, 640, 320): (2, 0, 0), (2048, 320, 640): (1, 0, 0), (512, 640, 1280): (1, 0, 0),
    (128, 1280, 3840): (1, 0, 0), (128, 1280, 10240): (1, 0, 0), (128, 5120, 1280): (1, 0, 0),
    (512, 1920, 1280): (1, 0, 0), (2048, 1920, 640): (1, 0, 0), (2048, 1280, 640): (1, 0, 0),
    (2048, 960, 640): (1, 0, 0), (8192, 960, 320): (1, 0, 0), (32768, 320, 320): (0, 25, 0),
    (8192, 640, 640): (0, 25, 40), (2048, 1280, 1280): (0, 25, 192), (32768, 320, 960): (0, 5, 0),
    (32768, 1280, 320): (0, 5, 0), (8192, 640, 1920): (0, 5, 10), (8192, 2560, 640): (0, 5, 10),
    (2048, 1280, 3840): (0, 5, 60), (2048, 5120, 1280): (0, 5, 60), (2048, 2560, 1280): (0, 2, 2),
    (32768, 640, 320): (0, 2, 2), (8192, 320, 640): (0, 1, 1), (2048, 640, 1280): (0, 1, 1),
    (2048, 1920, 1280): (0, 1, 1), (8192, 1920, 640): (0, 1, 1), (8192, 1280, 640): (0, 1, 1),
    (8192, 960, 640): (0, 1, 1), (32768, 960, 320): (0, 1, 1),
}  # fmt: skip
WEIGHTS = (4, 1, 1)  # what a launch counts for in the order
# rows, columns, rest of the columns, depth, stages, warps, parts: no spills, and both operands of
# the tensor cores in shared memory
TILES = tuple(Tile(*each) for each in (
    (64, 64, 16, 64, 8, 4), (64, 64, 16, 64, 6, 4), (64, 64, 16, 128, 4, 4), (64, 64, 0, 64, 8, 4),
    (64, 32, 0, 64, 8, 4), (64, 128, 0, 64, 6, 4), (64, 128, 32, 64, 6, 4), (64, 256, 64, 64, 4, 4),
    (64, 256, 64, 64, 4, 8), (64, 256, 0, 64, 5, 4), (128, 64, 16, 64, 6, 4),
    (128, 64, 16, 64, 8, 8), (128, 64, 16, 128, 4, 4), (128, 64, 0, 64, 4, 4),
    (128, 128, 0, 64, 3, 8), (128, 128, 0, 64, 4, 8), (128, 128, 0, 128, 3, 8),
    (128, 128, 32, 64, 6, 8), (128, 128, 32, 128, 3, 8), (128, 128, 64, 64, 5, 8),
    (128, 256, 0, 64, 4, 8), (128, 256, 64, 64, 4, 8), (256, 128, 0, 64, 4, 8),
    (256, 128, 32, 64, 4, 8), (256, 64, 16, 64, 5, 8), (64, 64, 16, 64, 8, 4, 4),
    (64, 64, 16, 64, 8, 4, 2), (64, 128, 0, 64, 6, 4, 4), (128, 128, 32, 64, 3, 8, 4),
))  # fmt: skip
MOST_TILES, WORST, SMS, SHARED = 7, 1.5, 132, 227 * 1024
RING = 4  # of activations
BLOCK, FEW = 1024, 4 * SMS
MOST_ERROR = 2e-3
CACHE_BYTES = 256 << 20  # several times the L2 cache

_BETWEEN = f"""\
import triton
import triton.language as tl


@triton.jit
def between(p0, p1, p2, s0, s1, s2, BLOCK: tl.constexpr, EARLY: tl.constexpr):
{EARLY}    step = tl.num_programs(0) * BLOCK
    for at in tl.range(tl.program_id(0) * BLOCK, tl.maximum(s0, s1), step):
        place = at + tl.arange(0, BLOCK)
        result = tl.load(p0 + place, mask=place < s0, other=0.0).to(tl.float32)
        residual = tl.load(p1 + place, mask=place < s1, other=0.0).to(tl.float32)
        tl.store(p2 + place, (residual + 0.25 * result).to(tl.float16), mask=place < s1)
"""
HALF = torch.float16
BETWEEN = KernelSource(
    "between", "triton", _BETWEEN, (HALF,) * 3, (16, 16, 1), (symbol("s2"),),
    constants=(("BLOCK", BLOCK), ("EARLY", 1)),
)  # fmt: skip


def guess_us(tile: Tile, shape: Shape) -> float:
    """Of each processor's programs: beginnings, where they are not hidden behind another's steps,
    and steps, of each what takes longer of the products and of bringing the operands."""
    cols = tile.cols + tile.rest
    product = tile.rows * cols * tile.depth / 2.75e6
    bring = (tile.rows + cols) * tile.depth * 2 / 1e5
    programs = -(-tile.num_programs(*shape) // SMS)
    at_once = SHARED // (tile.stages * (tile.rows + cols) * tile.depth * 2)
    steps = -(-shape[1] // tile.depth) // tile.split
    begin = 1.5 * -(-programs // at_once) + (4.0 if tile.split > 1 else 0.0)
    return begin + programs * steps * max(product, bring)


def tiles(shape: Shape) -> list[Tile]:
    rows, depth, width = shape
    able = [t for t in TILES if t.rows <= max(rows, 64) and t.cols <= width
            and -(-depth // t.depth) % t.split == 0]  # fmt: skip
    able.sort(key=lambda tile: guess_us(tile, shape))
    most = WORST * guess_us(able[0], shape)
    return [tile for tile in able[:MOST_TILES] if guess_us(tile, shape) <= most]


class Layer:
    """Activations and weights of one shape, and what is launched on them."""

    def __init__(self, shape: Shape, library: KernelLibrary, stream: int) -> None:
        self.shape, self._library, self._stream = shape, library, stream
        rows, depth, width = shape
        torch.manual_seed(0)

        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, device="cuda", dtype=HALF)

        self.residuals = [random(rows, depth) for _ in range(RING)]
        self.xs = [random(rows, depth) for _ in range(RING)]
        self.ys = [random(rows, width) for _ in range(RING)]
        self.start, weight = self.ys[-1].clone(), random(width, depth) * depth**-0.5
        self.weights = [weight.clone() for _ in range(CALLS)]
        self._parts: Tensor | None = None

    def cublas(self) -> Launches:
        return [partial(torch.mm, self.xs[n % RING], weight.t(), out=self.ys[n % RING])
                for n, weight in enumerate(self.weights)]  # fmt: skip

    def ours(self, tile: Tile, *, early: bool) -> Launches:
        found: Launches = []
        for n, weight in enumerate(self.weights):
            found += self._call(tile, self.xs[n % RING], weight, self.ys[n % RING], early)
        return found

    def _call(self, tile: Tile, x: Tensor, weight: Tensor, y: Tensor, early: bool) -> Launches:
        sources, views = sources_of(tile, HALF), list(tile.views(*self.shape))
        target = y if tile.split == 1 else self._parts_of(views[2])
        product = self._library.bind(
            sources[0], [t.data_ptr() for t in tile.params(x, weight, target)],
            tile.scalars(*self.shape), self._stream, early=early,
            views=[(view, (view[1], 1)) for view in views],
        )  # fmt: skip
        if tile.split == 1:
            return [product]
        step = views[2][0] // tile.split * y.shape[1]
        add = self._library.bind(sources[1], [target.data_ptr(), y.data_ptr()], [y.numel(), step],
                                 self._stream, early=True)  # fmt: skip

        def both() -> None:
            product()
            add()

        return [both]

    def _parts_of(self, sizes: Sequence[int]) -> Tensor:
        if self._parts is None or self._parts.shape != tuple(sizes):
            self._parts = torch.empty(tuple(sizes), device="cuda")
        return self._parts

    def between(self, programs: int, *, early: bool) -> Launches:
        """Each reads the result before it and writes the input of the GEMM behind it."""
        sizes = [self.ys[0].numel(), self.xs[0].numel(), programs]
        found: Launches = []
        for n in range(CALLS):
            tensors = self.ys[n % RING - 1], self.residuals[n % RING], self.xs[n % RING]
            found.append(self._library.bind(BETWEEN, [t.data_ptr() for t in tensors], sizes,
                                            self._stream, early=early))  # fmt: skip
        return found

    def programs(self) -> dict[str, int]:
        """Of the pointwise kernel, in both chains; one where they are the same."""
        now = -(-max(self.ys[0].numel(), self.xs[0].numel()) // BLOCK)
        return {"now": now, "few": FEW} if now > MOST_EARLY_PROGRAMS else {"now": now}

    def graphs(self, tile: Tile | None) -> dict[str, torch.cuda.CUDAGraph]:
        """What a tile, or cuBLAS, is timed in."""
        alone = self.cublas() if tile is None else self.ours(tile, early=False)
        found = {"alone": _captured(alone)}
        for name, programs in self.programs().items():
            gemms = alone if tile is None else self.ours(tile, early=True)
            # a library's kernel lets nobody start before it has ended: such launches are not early
            others = self.between(programs, early=tile is not None)
            found[name] = _captured([c for pair in zip(others, gemms, strict=True) for c in pair])
        return found

    def errors(self, graphs: dict[str, torch.cuda.CUDAGraph]) -> tuple[float, dict[str, Tensor]]:
        """Of one GEMM against fp64, and what each chain ends in."""
        torch.manual_seed(1)
        for x, y in zip(self.xs, self.ys, strict=True):
            x.normal_()
            y.fill_(float("nan"))
        graphs["alone"].replay()
        truth = self.xs[1].double() @ self.weights[0].double().t()
        found, ends = contest.error(self.ys[1], truth), dict[str, Tensor]()
        for name in self.programs():
            self.ys[-1].copy_(self.start)
            graphs[name].replay()
            ends[name] = self.ys[-1].double()
        return found, ends


def _captured(launches: Launches) -> torch.cuda.CUDAGraph:
    launches[0]()  # libraries want memory at their first call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()  # torch.cuda.graph gives memory back each time
    for launch in launches:
        launch()
    graph.capture_end()
    return graph


def us_of(graphs: dict[str, dict[str, torch.cuda.CUDAGraph]], cache: Tensor
          ) -> dict[str, dict[str, float]]:  # fmt: skip
    """Microseconds of a GEMM, with its pointwise kernel in chains: by contender and graph."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def measure(call: Callable[[], Any], device: torch.device, inner: int) -> float:
        torch.cuda.synchronize()
        cache.sum()  # read, so that nothing waits to be written back, and long enough that the
        begin.record()  # host has launched the graph before
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    calls = {f"{name}|{kind}": graph.replay for name, of in graphs.items()
             for kind, graph in of.items()}  # fmt: skip
    timed = timer.time_calls(calls, torch.device("cuda"), samples=9, warmup=1, measure=measure)
    found: dict[str, dict[str, float]] = {name: {} for name in graphs}
    for key, times in timed.items():
        name, kind = key.split("|")
        found[name][kind] = round(times.p50_ms * 1e3 / CALLS, 2)
    return found


def measure(shape: Shape, library: KernelLibrary, cache: Tensor) -> dict[str, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        layer = Layer(shape, library, stream.cuda_stream)
        theirs = layer.graphs(None)
        error, ends = layer.errors(theirs)
        row: dict[str, Any] = {"shape": shape, "counts": LINEARS[shape], "us": {}, "ahead_us": {},
                               "errors": {"cublas": error}, "chain_errors": {}}  # fmt: skip

        def time_tiles(kind: str, chosen: Sequence[Tile]) -> None:
            graphs = {"cublas": theirs}
            for tile in chosen:
                name = str(astuple(tile))
                own = layer.graphs(tile)
                error, found = layer.errors(own)
                apart = max(contest.error(found[n], ends[n]) for n in ends)
                row["errors"][name], row["chain_errors"][name] = error, apart
                if max(error, apart) < MOST_ERROR:  # NaN is no result either
                    graphs[name] = own
            row[kind] = us_of(graphs, cache)

        time_tiles("us", tiles(shape))
        best = sorted(tiles(shape), key=lambda t: _now(row["us"], str(astuple(t))))[:2]
        time_tiles("ahead_us", [replace(tile, ahead=True) for tile in best])
    return row


def _now(us: dict[str, dict[str, float]], name: str) -> float:
    return us[name]["now"] if name in us else float("inf")


def best_of(us: dict[str, dict[str, float]], kind: str = "now") -> tuple[str, dict[str, float]]:
    ours = [name for name in us if name != "cublas"] or ["cublas"]
    name = min(ours, key=lambda n: us[n].get(kind, us[n]["now"]))
    return name, us[name]


def line_of(row: dict[str, Any]) -> str:
    """cuBLAS and our best tile in each graph; the best in the chain as it is now; with weights that
    come ahead."""
    us, counts = row["us"], "/".join(map(str, row["counts"]))
    pairs = [f"{kind} {us['cublas'][kind]:6.2f} {best_of(us, kind)[1][kind]:6.2f}"
             for kind in us["cublas"]]  # fmt: skip
    ahead = [f"{best_of(row['ahead_us'], kind)[1][kind]:.2f}" for kind in us["cublas"]]
    errors = (*row["errors"].values(), *row["chain_errors"].values())
    wrong = sum(not each < MOST_ERROR for each in errors)
    return (
        f"{counts:>9} {'x'.join(map(str, row['shape'])):>14}: {', '.join(pairs)}; "
        f"{best_of(us)[0]}; ahead {' '.join(ahead)}{f'; {wrong} WRONG' if wrong else ''}"
    )


def gains_us(rows: Sequence[dict[str, Any]], kind: str) -> dict[str, float]:
    """What a step of each model would win with our best tile where it is faster in this chain."""
    found = dict.fromkeys(MODELS, 0.0)
    for row in rows:
        us = row["us"]
        ours, theirs = (each.get(kind, each["now"]) for each in (best_of(us, kind)[1],
                                                                us["cublas"]))  # fmt: skip
        for model, count in zip(MODELS, row["counts"], strict=True):
            found[model] += count * max(0.0, theirs - ours)
    return {model: round(us) for model, us in found.items()}


def _importance(shape: Shape) -> int:
    return sum(w * count for w, count in zip(WEIGHTS, LINEARS[shape], strict=True))


def sources(shapes: Sequence[Shape]) -> Iterator[KernelSource]:
    yield BETWEEN
    for tile in dict.fromkeys(tile for shape in shapes for tile in tiles(shape)):
        yield from sources_of(tile, HALF)
        yield box_linear(replace(tile, ahead=True), HALF)


def arguments() -> argparse.Namespace:
    parser = contest.arguments_of(__doc__, seconds=85)
    parser.add_argument("--only", nargs="+", default=[], metavar="ROWSxDEPTHxWIDTH")
    return parser.parse_args()


def main() -> None:
    start, args = time.monotonic(), arguments()
    shapes = sorted(LINEARS, key=lambda shape: -_importance(shape))
    if args.only:
        shapes = [s for s in shapes if "x".join(map(str, s)) in args.only]
    library = kernel_library("cuda", 0, "", 0)
    wanted = list(dict.fromkeys(sources(shapes)))
    library.build(wanted)
    print(f"{len(wanted)} kernels built in {time.monotonic() - start:.1f} s", flush=True)
    cache, rows = torch.zeros(CACHE_BYTES // 4, device="cuda"), list[dict[str, Any]]()
    print("launches a step of", *MODELS, "shape: cuBLAS and ours, us; our tile", sep=" | ")
    for shape in shapes:
        if time.monotonic() > start + args.seconds:
            print(f"out of time before {shape}")
            break
        rows.append(measure(shape, library, cache))
        print(line_of(rows[-1]), flush=True)
    gains = {kind: gains_us(rows, kind) for kind in ("now", "few")}
    print(f"us a step to win: {gains}; {time.monotonic() - start:.0f} s")
    report = {"kind": "gemm_early", "environment": environment.describe(torch.device("cuda")),
              "gains_us": gains, "rows": rows}  # fmt: skip
    (args.out / "gemm_early_h100.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

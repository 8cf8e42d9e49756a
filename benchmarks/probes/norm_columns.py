"""How large should the tiles of a column reduction be, and how many programs share it?

python benchmarks/probes/norm_columns.py --out FOLDER [--seconds 120]

One H100, fp16, channels-last, batch 2, 32 groups, SiLU behind them, as in steps of UNets: of a sum
with a vector of each picture (as behind a convolution), of two pictures' sum, which is kept, and of
such a sum and another picture side by side (as behind a skip connection), which are kept. Each
setting (bytes that the loads of a tile read, elements of a tile, warps, stages of the pipeline,
programs a multiprocessor, steps of a program at least) beside today's rules ("now"): statistics and
the kernel that uses them. norm_columns_h100_2026-11-23 was measured when those were (8192, 4096, 4,
3, 4, 8), with 256 rows a program at least and one program a multiprocessor up to 33792 rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import lru_cache, partial
from itertools import takewhile
from typing import Any

import contest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.backend import compile_graph
from strop.codegen import triton, triton_column
from strop.codegen.assemble import Signature
from strop.ir.program import KernelStep, Program
from strop.ir.source import KernelSource
from strop.options import Options
from strop.runtime.build import devices
from strop.runtime.build import loader as kernels
from strop.runtime.run import own_calls
from strop.runtime.run.executor import Bound
from strop.runtime.run.workspace import workspace_of
from tests.frontend.tracing import trace

SUM, KEPT, BESIDE = "sum", "kept sum", "kept sum beside another"
# what is normalised, side, channels of each picture
SHAPES = (
    (SUM, 64, 320),
    (KEPT, 64, 320),
    (BESIDE, 64, 320, 320),
    (BESIDE, 64, 640, 320),
    (BESIDE, 32, 640, 640),
    (BESIDE, 32, 1280, 640),
    (BESIDE, 16, 1280, 1280),
    (SUM, 96, 320),
    (BESIDE, 96, 640, 320),
    (SUM, 128, 320),
    (KEPT, 128, 320),
    (BESIDE, 128, 320, 320),
    (BESIDE, 128, 640, 320),
    (SUM, 64, 640),
    (KEPT, 64, 640),
    (BESIDE, 64, 640, 640),
    (BESIDE, 64, 1280, 640),
    (SUM, 32, 1280),
    (KEPT, 32, 1280),
    (BESIDE, 32, 1280, 1280),
)
BATCH, GROUPS = 2, 32
Shape = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    tile_bytes: int
    most_elements: int
    warps: int
    stages: int
    per_sm: int
    steps: int

    @contextmanager
    def held(self) -> Iterator[None]:
        """While kernels are printed, or programs counted."""
        if self is NOW:
            yield
            return
        tile = (self.tile_bytes, self.warps, self.stages, self.steps)
        tiling = triton_column.Tiling(*tile, merge_elements=2048, merged=64)
        wanted = (
            (triton_column, "TILING_OF_GROUPS", tiling),
            (triton_column, "TILING_OF_GROUPS_OF_SEVERAL", tiling),
            (triton_column, "STAGED_BYTES", 4 * self.tile_bytes),
            (triton_column, "MAX_ELEMENTS", self.most_elements // (32 * self.warps)),
            (triton_column, "MAX_REGISTERS", min(255, 65536 // (32 * self.warps))),
            (triton_column, "MOST_STEPS", 0),
            (kernels, "MAX_PROGRAMS_PER_SM", self.per_sm),
            (kernels, "ROWS_PER_PROGRAM", 1),
        )
        before = [(where, name, getattr(where, name)) for where, name, _ in wanted]
        for where, name, value in wanted:
            setattr(where, name, value)
        triton._emit.cache_clear()
        try:
            yield
        finally:
            for where, name, value in before:
                setattr(where, name, value)
            triton._emit.cache_clear()


NOW = Setting(0, 0, 0, 0, 0, 0)
SETTINGS = (
    NOW,
    *(Setting(8192, 4096, 4, 3, per_sm, steps) for per_sm, steps in ((1, 4), (2, 4), (3, 2))),
    *(
        Setting(16384, 8192, warps, 3, per_sm, steps)
        for warps in (4, 8)
        for per_sm, steps in ((1, 4), (2, 4), (2, 2), (3, 2))
    ),
    *(Setting(32768, 8192, 8, 3, per_sm, steps) for per_sm, steps in ((1, 2), (2, 2))),
    *(Setting(32768, 16384, warps, 3, 1, 2) for warps in (8, 16)),
    *(Setting(16384, 8192, 8, stages, 2, 2) for stages in (2, 4)),
    *(Setting(8192, 4096, 4, 5, per_sm, 4) for per_sm in (1, 2)),
)


def normed(y: Tensor, w: Tensor, b: Tensor, k: Tensor) -> Tensor:
    """And a convolution, which wants it channels-last; its time is not taken."""
    y = F.silu(F.group_norm(y.permute(0, 3, 1, 2), GROUPS, w, b))
    return F.conv2d(y, k, padding=1)


def of_sum(x: Tensor, t: Tensor, *rest: Tensor) -> Tensor:
    return normed(x + t[:, None, None], *rest)


def of_kept(x: Tensor, r: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    return normed(x + r, *rest), x + r


def of_both(x: Tensor, r: Tensor, z: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.cat((x + r, z), 3)
    return normed(y, *rest), y


FUNCTIONS = {SUM: of_sum, KEPT: of_kept, BESIDE: of_both}


@lru_cache(maxsize=4096)
def program(shape: Shape, setting: Setting) -> Program:
    (kind, side, first, *others) = shape
    side //= 8
    channels = first + sum(others)
    vectors = [str(channels)] * 2 + [f"8 {channels} 3 3"]
    pictures = [f"b 8*h 8*w {c}" for c in (first, *others)]
    pictures.insert(1, f"b {first}" if kind == SUM else pictures[0])
    traced = trace(
        FUNCTIONS[kind], *pictures, *vectors, b=BATCH, h=side, w=side, dtype=torch.float16
    )
    signature = Signature(traced.returned, traced.captured.guards)
    with setting.held():
        return compile_graph(traced.graph, signature, "cuda", Options()).program


def sizes(shape: Shape) -> dict[str, int]:
    return {"b": BATCH, "h": shape[1] // 8, "w": shape[1] // 8}


def every(shape: Shape) -> dict[Setting, Program]:
    return {setting: program(shape, setting) for setting in SETTINGS}


def name_of(setting: Setting) -> str:
    return "now" if setting is NOW else str(astuple(setting))


def sources() -> Iterator[KernelSource]:
    for shape in SHAPES:
        for each in every(shape).values():
            yield from own_calls.sources_at(each, sizes(shape), devices.gpu(0))


def arguments(shape: Shape) -> list[Tensor]:
    kind, side, first, *others = shape
    seed = torch.Generator("cuda").manual_seed(0)
    make = partial(torch.randn, device="cuda", dtype=torch.float16, generator=seed)
    given = [make(BATCH, side, side, c) for c in (first, *others)]
    given.insert(1, make(BATCH, first) if kind == SUM else make(given[0].shape))
    channels = first + sum(others)
    return [*given, make(channels), make(channels), 0.01 * make(8, channels, 3, 3)]


def measure(shape: Shape, library: Any) -> dict[str, Any]:
    stream, given = torch.cuda.Stream(), arguments(shape)
    truth = FUNCTIONS[shape[0]](*(x.double() for x in given))
    truth = truth if isinstance(truth, Tensor) else truth[0]
    calls, errors = dict[str, contest.Call](), dict[str, float]()
    with torch.cuda.stream(stream), torch.no_grad():
        workspace = workspace_of(torch.device("cuda", 0), stream.cuda_stream)
        for setting, each in every(shape).items():
            name = name_of(setting)
            with setting.held():
                bound = Bound(each, sizes(shape), [], library, workspace, stream.cuda_stream)
                errors[name] = contest.error(bound.run(given)[0].double(), truth)
                norm = tuple(takewhile(lambda step: isinstance(step, KernelStep), each.steps))
                alone = replace(each, steps=norm, returned=())
                bound = Bound(alone, sizes(shape), [], library, workspace, stream.cuda_stream)
                bound.run(given)  # links it, with as many programs as the setting wants
            calls[name] = partial(bound.run, given)
        us = contest.us_in_turns(calls, stream)
    return {"us": us, "errors": errors}


def main() -> None:
    args = contest.arguments_of(__doc__, seconds=120).parse_args()
    contest.hold("norm_columns", args, sources(), SHAPES, measure)


if __name__ == "__main__":
    main()

"""Which tiles should norms have between the products of a UNet?

python benchmarks/probes/norm_tiles.py --out FOLDER [--seconds 200] [--only FAMILY]

One H100, fp16. ``rows``: blocks of LayerNorm, linear and sum (``codegen/triton_row.py``).
``apply``: blocks of GroupNorm, SiLU and convolution, of which the second half of the norm is meant
(``codegen/triton_pointwise.py``); ``statistics``: the first (``codegen/triton_column.py``; KB of a
tile, warps, stages, thousands of states that are merged at once, steps of a slab); ``sums``: the
same of a sum beside another picture. Compiled anew for each tile (rows, cols, warps) and replayed
as a CUDA graph, all tiles in turns. Grids of at most 640 programs begin before the product before
them has ended, and let the next one begin. ``us``: of a block.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import contest
import torch
from torch import Tensor, nn

import strop
from strop.bench import timer
from strop.codegen import triton, triton_column, triton_pointwise, triton_row
from strop.options import Options

BLOCKS = 12
HALF = torch.float16
Tile = tuple[int, ...]


class Rows(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.linear(self.norm(x))
        return result


class Apply(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(nn.functional.silu(self.norm(x)))
        return result


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Apply(width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.inner(x)
        return result


class Blocks(nn.Module):
    """Something is computed first, so that sums are made where it lies."""

    def __init__(self, block: type[nn.Module], width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width) if block is Rows else nn.Conv2d(width, width, 1)
        self.blocks = nn.Sequential(*(block(width) for _ in range(BLOCKS)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks(self.first(x))
        return result


@dataclass(frozen=True, slots=True)
class Family:
    """``names`` of a module of code generation that say which tile; all become ``rule(tile)``."""

    block: type[nn.Module]
    module: Any
    names: Mapping[str, Callable[[Tile], Any]]
    shapes: Mapping[tuple[int, ...], tuple[Tile, ...]]  # of the input: channels last


def statistics(block: type[nn.Module], shapes: Mapping[Tile, tuple[Tile, ...]]) -> Family:
    def tiling(t: Tile) -> triton_column.Tiling:
        return triton_column.Tiling(t[0] << 10, t[1], t[2], t[4], t[3] << 10, t[3] << 5)

    names = {"TILING_OF_GROUPS": tiling, "TILING_OF_GROUPS_OF_SEVERAL": tiling}
    return Family(block, triton_column, names, shapes)


FAMILIES: dict[str, Family] = {
    "rows": Family(
        Rows,
        triton_row,
        {"TILES": lambda t: ((49152, t),), "STREAMED": lambda t: ()},
        {
            (2, 4096, 640): ((4, 256, 4), (4, 128, 4), (8, 128, 4), (16, 128, 4)),
            (2, 1024, 640): ((4, 256, 4), (4, 128, 4), (8, 128, 4), (16, 128, 4)),
            (2, 1024, 1280): ((4, 256, 4), (2, 256, 2), (8, 256, 8), (4, 128, 4)),
            (2, 4096, 320): ((8, 64, 8), (16, 64, 8), (16, 64, 4), (16, 64, 16)),
            (2, 256, 1280): ((4, 256, 4), (2, 256, 2)),
            (8, 4096, 320): ((8, 64, 8), (16, 64, 8), (64, 64, 8)),
        },
    ),
    "apply": Family(
        Apply,
        triton_pointwise,
        {"REPEATED": lambda t: t},
        {
            (2, 64, 64, 320): ((64, 64, 4), (64, 64, 8), (128, 64, 8)),
            (2, 32, 32, 1280): ((64, 64, 4), (64, 64, 8), (128, 64, 8)),
            (2, 64, 64, 640): ((64, 64, 4), (128, 64, 8)),
            (2, 128, 128, 320): ((64, 64, 4), (128, 64, 8)),
        },
    ),
    "statistics": statistics(
        Apply,
        {
            (2, 64, 64, 640): ((16, 8, 3, 8, 4), (16, 8, 3, 8, 8), (8, 8, 3, 8, 8)),
            (2, 64, 64, 320): (
                (16, 8, 3, 8, 4),
                (16, 8, 3, 8, 8),
                (8, 8, 3, 8, 8),
                (8, 4, 3, 8, 8),
            ),
            (2, 32, 32, 640): (
                (16, 8, 3, 8, 4),
                (16, 8, 3, 8, 8),
                (8, 8, 3, 8, 8),
                (8, 4, 3, 8, 8),
            ),
            (2, 16, 16, 1280): ((16, 8, 3, 8, 4), (16, 8, 3, 8, 8), (8, 8, 3, 8, 8)),
            (2, 32, 32, 1280): ((16, 8, 3, 8, 4), (16, 8, 3, 2, 8), (8, 8, 3, 8, 8)),
            (2, 128, 128, 320): ((16, 8, 3, 8, 4), (8, 4, 3, 8, 8), (8, 4, 5, 8, 8)),
        },
    ),
    "sums": statistics(
        Residual,
        {
            (2, 64, 64, 640): (
                (16, 8, 3, 8, 4),
                (16, 8, 5, 8, 4),
                (8, 8, 5, 8, 8),
                (8, 4, 5, 8, 8),
            ),
            (2, 64, 64, 320): ((16, 8, 3, 8, 4), (16, 8, 5, 8, 4), (8, 8, 5, 8, 8)),
            (2, 32, 32, 1280): ((16, 8, 3, 8, 4), (16, 8, 5, 8, 4), (8, 8, 5, 8, 8)),
            (2, 128, 128, 320): (
                (16, 8, 3, 8, 4),
                (16, 8, 5, 8, 4),
                (8, 8, 5, 8, 8),
                (8, 4, 5, 8, 8),
            ),
            (2, 32, 32, 640): ((16, 8, 3, 8, 4), (16, 8, 5, 8, 4), (8, 8, 5, 8, 8)),
            (2, 16, 16, 1280): ((16, 8, 3, 8, 4), (16, 8, 5, 8, 4), (8, 8, 5, 8, 8)),
        },
    ),
}


@contextmanager
def ruled(family: Family, tile: Tile | None) -> Iterator[None]:
    """All kernels of the family by this tile."""
    before = {name: getattr(family.module, name) for name in family.names}
    for name, rule in family.names.items() if tile is not None else ():
        setattr(family.module, name, rule(tile))
    triton._emit.cache_clear()  # kernels as they were printed by another rule
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(family.module, name, value)
        triton._emit.cache_clear()


def measure(work: tuple[Any, ...]) -> dict[str, Any]:
    """``work``: a family's name and a shape."""
    name, *sizes = work
    family, shape = FAMILIES[name], tuple(sizes)
    x = torch.randn(shape, device="cuda", dtype=HALF)
    x = x.permute(0, 3, 1, 2) if len(shape) == 4 else x
    width = shape[-1]
    plain = Blocks(family.block, width).to(HALF).cuda().eval()
    truth = plain.double()(x.double())
    plain.to(HALF)
    calls: dict[str, timer.Call] = {}
    errors: dict[str, float] = {}
    for tile in (None, *family.shapes[shape]):
        module = Blocks(family.block, width).to(HALF).cuda().eval()
        module.load_state_dict(plain.state_dict())
        with ruled(family, tile), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
            compiled = strop.optimize(module, options=Options(strict=True, cache_dir=cache))
            for _ in range(3):
                result = compiled(x)
        who = str(tile or "rule")
        errors[who] = contest.error(result.double(), truth)
        calls[who] = lambda compiled=compiled: compiled(x)
    timed = timer.time_calls(calls, torch.device("cuda"), samples=15, inner=10)
    us = {who: round(t.p50_ms * 1e3 / BLOCKS, 3) for who, t in timed.items()}
    return {"us": us, "errors": errors}


def main() -> None:
    parser = contest.arguments_of(__doc__, seconds=200)
    parser.add_argument("--only", choices=FAMILIES)
    args = parser.parse_args()
    work = [
        (name, *shape)
        for name, family in FAMILIES.items()
        if args.only in (None, name)
        for shape in family.shapes
    ]
    with torch.no_grad():
        contest.report("norm_tiles", args, work, measure, time.monotonic() + args.seconds)


if __name__ == "__main__":
    main()

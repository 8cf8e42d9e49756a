"""How many rows should a program of LayerNorm have, between the products of a transformer?

python benchmarks/probes/row_tiles.py --out FOLDER [--seconds 200]

One H100, fp16: blocks of LayerNorm, linear and sum as in SD1.5's and SDXL's UNets, compiled anew
for each tile of rows (``codegen/triton_row.py``) and replayed as a CUDA graph, all tiles in turns.
Grids of at most 640 programs begin before the product before them has ended. ``us``: of a block.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import contest
import torch
from torch import Tensor, nn

import strop
from strop.bench import environment, timer
from strop.codegen import triton, triton_row
from strop.options import Options

BLOCKS = 12
Tile = tuple[int, int, int]
# Rows and columns, and the tiles that are tried beside the rule's.
SHAPES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (2048, 1280): ((4, 256, 4), (2, 256, 2), (8, 256, 8), (4, 128, 4)),
    (8192, 640): ((4, 256, 4), (8, 128, 8), (16, 128, 8), (16, 128, 4)),
    (2048, 640): ((4, 256, 4), (4, 128, 4), (8, 128, 8)),
    (8192, 320): ((8, 64, 8), (16, 64, 8), (16, 64, 4), (16, 64, 16)),
    (512, 1280): ((4, 256, 4), (2, 256, 2)),
    (32768, 320): ((8, 64, 8), (16, 64, 8), (64, 64, 8)),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.linear(self.norm(x))
        return result


class Blocks(nn.Module):
    """What is computed first, so that sums are made where it lies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks(self.first(x))
        return result


@contextmanager
def ruled(tile: Tile | None) -> Iterator[None]:
    """Rows of all lengths by this tile."""
    before = triton_row.TILES, triton_row.STREAMED
    if tile is not None:
        triton_row.TILES, triton_row.STREAMED = ((49152, tile),), ()
    triton._emit.cache_clear()  # kernels as they were printed by another rule
    try:
        yield
    finally:
        triton_row.TILES, triton_row.STREAMED = before
        triton._emit.cache_clear()


def measure(rows: int, width: int) -> dict[str, Any]:
    x = torch.randn(2, rows // 2, width, device="cuda", dtype=torch.float16)
    plain = Blocks(width).half().cuda().eval()
    truth = plain.double()(x.double())
    plain.half()
    calls: dict[str, timer.Call] = {}
    errors: dict[str, float] = {}
    for tile in (None, *SHAPES[rows, width]):
        module = Blocks(width).half().cuda().eval()
        module.load_state_dict(plain.state_dict())
        with ruled(tile), tempfile.TemporaryDirectory() as cache:
            options = Options(strict=True, cache_dir=cache)
            compiled = strop.optimize(module, options=options)
            for _ in range(3):
                result = compiled(x)
        name = str(tile or "rule")
        errors[name] = contest.error(result.double(), truth)
        calls[name] = lambda compiled=compiled: compiled(x)
    timed = timer.time_calls(calls, torch.device("cuda"), samples=15, inner=10)
    us = {name: round(t.p50_ms * 1e3 / BLOCKS, 3) for name, t in timed.items()}
    return {"shape": [rows, width], "us": us, "errors": errors}


def main() -> None:
    args = contest.arguments_of(__doc__, seconds=200).parse_args()
    end, rows = time.monotonic() + args.seconds, list[dict[str, Any]]()
    with torch.no_grad():
        for shape in SHAPES:
            if time.monotonic() > end:
                print("out of time")
                break
            rows.append(measure(*shape))
            print(rows[-1], flush=True)
    report = {"kind": "row_tiles", "environment": environment.describe(torch.device("cuda")),
              "rows": rows}  # fmt: skip
    (args.out / "row_tiles_h100.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

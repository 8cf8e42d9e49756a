"""Time sums over pictures and rows on a GPU, as gradients of norms and biases are, by their tiles.

    python benchmarks/column_sums.py --tiles 256:2048:4,64:2048:4,64:4096:4,64:4096:8 --out FILE

A tile is "cols:merged:warps": how many columns a program owns at most, how many states it
merges at once, and its warps. Where there are more than 256 columns the kernel's own tile is 64.
Each is measured in a process of its own, as kernels are printed once in each. The numbers of
columns are those of a weight, as in a model. Two sums of values in half precision, one of them of a
product, are compared with fp64.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.new_process import measured_alone

PICTURES = (  # batch, channels, height
    (8, 64, 112),
    (8, 256, 56),
    (8, 64, 56),
    (8, 512, 28),
    (8, 128, 28),
    (8, 1024, 14),
    (8, 256, 14),
    (8, 2048, 7),
)
ROWS = ((8192, 320), (32768, 320), (8192, 1280), (512, 5120))
CALLS = 10
MOST_ERROR = 0.01  # of the largest sum


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiles", default="256:2048:4,64:2048:4,64:4096:4,128:4096:4")
    parser.add_argument("--out", type=Path, help="JSON file for every number")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured_here(*map(int, args.one.split(":")))))
        return
    import torch

    from strop.bench import environment, report

    if not torch.cuda.is_available():
        sys.exit("column_sums.py times kernels of a GPU: torch finds none here")
    found = {tile: measured_alone(__file__, ["--one", tile]) for tile in args.tiles.split(",")}
    for tile, times in found.items():
        print(f"{tile:12} " + "  ".join(f"{where} {us}" for where, us in times.items()))
    if args.out:
        described = environment.describe(torch.device("cuda"))
        report.write_json({"kind": "column-sums", "environment": described, "us": found}, args.out)


def measured_here(cols: int, merged: int, warps: int) -> dict[str, Any]:
    """Return the microseconds of each kernel, by the operand's sizes."""
    from strop.codegen import triton_column

    tiling = triton_column.TILING
    triton_column.TILING = replace(tiling, merge_elements=merged, num_warps=warps)
    own = triton_column._Column._cols_tile

    def tile_of(plan: Any) -> int:
        known = plan.printer.kernel.num_cols
        return min(own(plan), cols) if known.is_const and not plan.lanes else own(plan)

    triton_column._Column._cols_tile = tile_of
    return {"x".join(map(str, sizes)): times_of(sizes) for sizes in (*PICTURES, *ROWS)}


def times_of(sizes: tuple[int, ...]) -> dict[str, float]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    import strop

    torch.manual_seed(0)
    dims = (0, 2, 3) if len(sizes) == 3 else (0,)
    whole = (*sizes, sizes[-1]) if len(sizes) == 3 else sizes
    given = torch.randn(2, *whole, device="cuda", dtype=torch.float16)
    x, y = (t.to(memory_format=torch.channels_last) if len(whole) == 4 else t for t in given)

    class Sums(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = (sizes[1], 1, 1) if len(whole) == 4 else sizes[1:]
            self.weight = torch.nn.Parameter(torch.rand(width))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return x.sum(dims), (x * (y * self.weight)).sum(dims)

    with torch.no_grad():
        plain = Sums().to("cuda", torch.float16).eval()
        exact = [r.clone() for r in plain.double()(x.double(), y.double())]
        fast = strop.optimize(plain.half())
        for _ in range(4):
            found = fast(x, y)
        for one, other in zip(found, exact, strict=True):
            error = (one.double() - other).abs().max() / other.abs().max()
            if not error < MOST_ERROR:
                raise SystemExit(f"sums over {sizes} are {error:.2g} off")
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(CALLS):
                fast(x, y)
            torch.cuda.synchronize()
    kernels = [event for event in seen.key_averages() if "sum" in event.key]
    return {kernel.key: round(kernel.self_device_time_total / CALLS, 1) for kernel in kernels}


if __name__ == "__main__":
    main()

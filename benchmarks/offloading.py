"""Time pictures of a pipeline whose models lie on the host between their calls.

python benchmarks/offloading.py --out FILE [--model sdxl|sd15] [--contenders eager,strop]
    [--steps N] [--pictures N] [--minutes M] [--tiny]

A row is a contender: its pictures with all models on the GPU ("resident"), and then, from the same
pipeline, behind ``enable_model_cpu_offload`` ("model_offload"). "first_s" is the first picture of
each; "timing" holds percentiles from the second one on, "pictures_ms" each of them in order, and
"ratio" is that of the medians. "peak_bytes" is the most memory of the GPU behind the first picture,
weights included, "first_peak_bytes" that of the first one.
"bus_gb_s" is the measured rate of copies from pinned memory, "moved_bytes" what a picture copies.
Both contenders run in one process, one after the other, with weights made at random on the GPU.
FILE is written after each row, and rows that it has are measured again only if they are named.
Behind --minutes no further contender begins.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

import strop
from strop.bench import environment, report, timer
from strop.bench.infer_contenders import Deadline
from strop.bench.wait_models import MODELS

CONTENDERS = ("eager", "strop")
LIMIT = 1.20  # what model offload may cost, of a resident picture
SAME = ("kind", "model", "steps", "is_tiny")  # in a file that rows are added to
COPIED_BYTES = 1 << 30  # to measure the rate of the bus


def main() -> None:
    args = arguments()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    result: dict[str, Any] = {
        "kind": "offloading",
        "model": args.model,
        "steps": args.steps,
        "is_tiny": args.tiny,
        "environment": environment.describe(device),
        "bus_gb_s": bus_rate(device),
    }
    rows, clock = rows_before(args.out, result, SAME), Deadline.of(60 * args.minutes)
    for name in args.contenders.split(","):
        if clock.left() <= 0:
            rows[name] = {"skipped": "time was over"}
        else:
            rows[name] = row_of(name, args, device)
            timer.give_back(device)
        report.write_json({**result, "rows": rows}, args.out)
        print(line_of(name, rows[name]), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for every number")
    parser.add_argument("--model", choices=("sdxl", "sd15"), default="sdxl")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pictures", type=int, default=5, help="of each kind, the first included")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--tiny", action="store_true", help="a tiny model: to try this out")
    args = parser.parse_args()
    if unknown := {*args.contenders.split(",")} - {*CONTENDERS}:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}")
    if args.pictures < 2:
        parser.error("--pictures takes 2 or more: the first is not timed")
    return args


def rows_before(path: Path, result: dict[str, Any], same: Sequence[str]) -> dict[str, Any]:
    """Return the rows of an earlier run whose result has the ``same`` in these places."""
    if not path.is_file():
        return {}
    before: dict[str, Any] = json.loads(path.read_text())
    if any(before.get(key) != result[key] for key in same):
        raise SystemExit(f"{path} has results of something else")
    return dict(before["rows"])


def bus_rate(device: torch.device) -> float | None:
    """Return in GB/s how fast memory gets from pinned pages of the host to a GPU."""
    if device.type != "cuda":
        return None
    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    times = [
        timer.elapsed_ms(lambda: there.copy_(host, non_blocking=True), device) for _ in range(5)
    ]
    return round(COPIED_BYTES / timer.timing_of(times).p50_ms / 1e6, 2)


def row_of(contender: str, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    model = MODELS[args.model]
    dtype = model.dtype if device.type == "cuda" else torch.float32
    pipe = model.build(args.tiny, device, dtype)
    height, width = model.sizes(args.tiny)[0]
    if contender == "strop":
        strop.optimize(pipe)

    def draw() -> None:
        generator = torch.Generator().manual_seed(0)
        size = {"height": height, "width": width}
        pipe("a red fox", num_inference_steps=args.steps, generator=generator, **size)

    modules = [m for m in pipe.components.values() if isinstance(m, nn.Module)]
    row: dict[str, Any] = {
        "moved_bytes": sum(w.nbytes for m in modules for w in m.parameters()),
        "resident": timed(draw, args.pictures, device),
    }
    pipe.enable_model_cpu_offload(device=device)
    row["model_offload"] = timed(draw, args.pictures, device)
    medians = [row[kind]["timing"]["p50_ms"] for kind in ("model_offload", "resident")]
    row["ratio"] = round(medians[0] / medians[1], 4)
    row["eager_calls"] = {
        n: d.counters.eager_calls for n, d in strop.api.dispatchers_of(pipe).items()
    }
    strop.restore(pipe)
    return row


def timed(draw: Callable[[], None], pictures: int, device: torch.device) -> dict[str, Any]:
    """Draw the first picture, and time those behind it."""
    timer.give_back(device)
    timer.forget_peak(device)
    started = time.perf_counter()
    draw()
    timer.synchronise(device)
    first_s, first_peak_bytes = time.perf_counter() - started, timer.peak(device)
    timer.forget_peak(device)
    times = [timer.wall_ms(draw, device) for _ in range(pictures - 1)]
    return {
        "first_s": round(first_s, 3),
        "first_peak_bytes": first_peak_bytes,
        "timing": timer.timing_of(times).to_dict(),
        "pictures_ms": [round(each, 2) for each in times],
        "peak_bytes": timer.peak(device),
    }


def line_of(name: str, row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"{name:8} skipped: {row['skipped']}"
    resident, offload = (row[kind]["timing"]["p50_ms"] for kind in ("resident", "model_offload"))
    gigabytes = row["model_offload"]["peak_bytes"] / 1e9
    return (
        f"{name:8} resident {resident:9.1f} ms, model offload {offload:9.1f} ms"
        f" ({row['ratio']:.2f} x, at most {LIMIT:.2f}), peak {gigabytes:.2f} GB"
    )


if __name__ == "__main__":
    main()

"""When has the GPU nothing to do while a picture is drawn?

python benchmarks/probes/idle.py [P5-512 P5x ...] --out FOLDER

Rows of pictures of ``strop bench infer``, optimised, one picture under torch's profiler after seven
without. Milliseconds from the call to the first kernel, between kernels by the names of the two
(from 1 us on, as what is shorter is a launch), and from the last one to the end of the call.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import contest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import strop
from strop.bench import timer
from strop.bench.infer_contenders import Field
from strop.bench.infer_rows import chosen_rows

DEVICE, MARK, LEAST_US, SHOWN = torch.device("cuda"), "picture", 1.0, 12


def gaps(spans: list[tuple[float, float, str]], begin: float, end: float) -> dict[str, Any]:
    """Microseconds between ``begin`` and ``end`` in which none of ``spans`` is: before the first,
    after the last, and between two of them, by their names."""
    between, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    spans = sorted(spans)
    reached, before = spans[0][1], spans[0][2]
    for first, last, name in spans:
        if first - reached >= LEAST_US:
            pair = f"{before[:48]} > {name[:48]}"
            between[pair] += first - reached
            counts[pair] += 1
        if last > reached:
            reached, before = last, name
    ranked = sorted(between, key=lambda pair: -between[pair])
    return {
        "head_us": spans[0][0] - begin,
        "tail_us": end - reached,
        "between_us": sum(between.values()),
        "pairs": [{"pair": p, "us": round(between[p], 1), "count": counts[p]} for p in ranked],
    }


@torch.no_grad()
def measure(name: str) -> dict[str, Any]:
    (row,) = chosen_rows([name])
    field = Field(row.case(torch.float16), DEVICE, strop.Options(strict=True))
    call, *_ = field.start("strop", row.size, row.batch)
    field.wait()
    alone_ms = min(timer.wall_ms(call, DEVICE) for _ in range(5))
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as seen, record_function(MARK):
        call()
        torch.cuda.synchronize()
    events = seen.events()
    (mark,) = (e for e in events if e.name == MARK and e.device_type == DeviceType.CPU)
    spans = [
        (e.time_range.start, e.time_range.end, e.name)
        for e in events
        if e.device_type == DeviceType.CUDA and e.name != MARK
    ]
    found = gaps(spans, mark.time_range.start, mark.time_range.end)
    return {"row": name, "alone_ms": round(alone_ms, 3), "num_kernels": len(spans), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=["P5-512", "P5x"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for name in args.rows:
        rows.append(found := measure(name))
        head, tail, between = (found[f"{which}_us"] / 1e3 for which in ("head", "tail", "between"))
        print(
            f"{name}: {found['alone_ms']} ms alone, {found['num_kernels']} kernels; none before"
            f" the first {head:.2f} ms, after the last {tail:.2f}, between two {between:.2f}"
        )
        for pair in found["pairs"][:SHOWN]:
            print(f"  {pair['us'] / 1e3:.3f} ms in {pair['count']}: {pair['pair']}", flush=True)
    contest.write("idle", args, {"rows": rows})


if __name__ == "__main__":
    main()

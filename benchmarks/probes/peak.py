"""What lies in GPU memory when a picture needs most of it?

python benchmarks/probes/peak.py [P5-512 P5-1024 ...] --out FOLDER

Rows of pictures of ``strop bench infer``, optimised: the allocations of their first two pictures
are recorded, beside the weights that are there before. Printed of the moment at which most is
alive: MiB, and which lines of Strop and of diffusers asked for them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import contest
import torch

import strop
from strop.bench.infer_contenders import Field
from strop.bench.infer_rows import chosen_rows

DEVICE, SHOWN = torch.device("cuda"), 12
OURS = ("/strop/", "/diffusers/", "/transformers/")


def asked_by(frames: list[dict[str, Any]]) -> str:
    """The two innermost lines of those that are somebody's here, others where there is none."""
    lines = [
        f"{Path(f['filename']).name}:{f['line']} {f['name']}"
        for f in frames
        if any(part in f["filename"] for part in OURS)
    ]
    return " < ".join(lines[:2]) or "elsewhere"


def peak_of(trace: list[dict[str, Any]]) -> tuple[int, Counter[str]]:
    """Bytes alive when most are, beside what was there before, and by whom."""
    alive: dict[int, tuple[int, str]] = {}
    now = most = 0
    at_most: Counter[str] = Counter()
    for event in trace:
        if event["action"] == "alloc":
            alive[event["addr"]] = (event["size"], asked_by(event.get("frames", [])))
            now += event["size"]
        elif event["action"] == "free_completed" and event["addr"] in alive:
            now -= alive.pop(event["addr"])[0]
        if now > most and event["action"] == "alloc":
            most, at_most = now, Counter()
            for size, who in alive.values():
                at_most[who] += size
    return most, at_most


@torch.no_grad()
def measure(name: str) -> dict[str, Any]:
    (row,) = chosen_rows([name])
    case = row.case(torch.float16)
    field = Field(case, DEVICE, strop.Options(strict=True))
    field.contender("strop")
    weights = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    torch.cuda.reset_peak_memory_stats()
    field.start("strop", row.size, row.batch)  # two pictures
    peak = torch.cuda.max_memory_allocated()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    most, by_whom = peak_of(trace)
    print(
        f"{name}: peak {peak / 2**30:.3f} GiB; {weights / 2**20:.0f} MiB before the first call,"
        f" {most / 2**20:.0f} beside them at the peak",
        flush=True,
    )
    for who, size in by_whom.most_common(SHOWN):
        print(f"  {size / 2**20:8.1f} MiB  {who}", flush=True)
    return {"row": name, "peak_bytes": peak, "weights_bytes": weights, "alive": dict(by_whom)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=["P7"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    contest.write("peak", args, {"rows": [measure(name) for name in args.rows]})


if __name__ == "__main__":
    main()

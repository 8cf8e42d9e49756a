"""What switches of ``Options`` gain, each in turns with the default.

python benchmarks/probes/switch.py NAME[,NAME ...] [P1 P2 P2b P3 ...] [--rounds 12] [--out FOLDER]

One H100, fp16. Knobs, the other way than by default, and names of passes, left out. Rows of steps
by 20 calls a sample, rows of pictures by one; medians, p20 and p80, and how far results are from
the default's.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import contest
import torch

import strop
from strop.bench import timer
from strop.bench.infer_contenders import Field, take_turns
from strop.bench.infer_rows import Row, chosen_rows
from strop.bench.infer_variants import MOST_GRAPH_BYTES, flipped

DEVICE = torch.device("cuda")
# With room for the graphs of all: else each would be captured again in its turn.
USUAL = strop.Options(strict=True, graph_budget_bytes=MOST_GRAPH_BYTES)


def other(name: str) -> tuple[str, strop.Options]:
    """A knob the other way, or without a pass."""
    if hasattr(USUAL, name):
        return flipped(USUAL, name)
    return f"no {name}", replace(USUAL, disable=(name,))


@torch.no_grad()
def measure(row: Row, names: list[str], rounds: int) -> dict[str, Any]:
    calls: dict[str, timer.Call] = {}
    results = {}
    for who, options in (("default", USUAL), *map(other, names)):
        field = Field(row.case(torch.float16), DEVICE, options)
        calls[who], _, (*_, result) = field.start("strop", row.size, row.batch)
        field.wait()
        results[who] = result.double()
    usual = results["default"]
    times = take_turns(calls, row.kind, DEVICE, rounds)
    for who, found in times.items():
        found["apart"] = float((results[who] - usual).norm() / usual.norm())
        ms = " ".join(f"{found[p]:.3f}" for p in ("p20_ms", "p50_ms", "p80_ms"))
        print(f"{row.name} {who}: {ms} ms; {found['apart']:.2e} apart", flush=True)
    return {"row": row.name, "times": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names")
    parser.add_argument("rows", nargs="*", default=["P1", "P2", "P2b", "P3"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = []
    for row in chosen_rows(args.rows):
        found.append(measure(row, args.names.split(","), args.rounds))
        timer.give_back(DEVICE)
    if args.out:
        contest.write(f"switch-{args.names.replace(',', '-')}", args, {"rows": found})


if __name__ == "__main__":
    main()

"""What one switch of ``Options`` gains, in turns with the default.

python benchmarks/probes/switch.py NAME [P1 P2 P2b P3 ...] [--rounds 12]

One H100, fp16. Rows of steps by 20 calls a sample, rows of pictures by one; medians, least times,
and how far results are apart. A switch that is on by default is off in the second column.
"""

from __future__ import annotations

import argparse

import torch

import strop
from strop.bench import timer
from strop.bench.infer_contenders import Field, take_turns
from strop.bench.infer_rows import Row, chosen_rows
from strop.bench.infer_variants import flipped

DEVICE = torch.device("cuda")


@torch.no_grad()
def measure(row: Row, name: str, rounds: int) -> None:
    usual = strop.Options(strict=True)
    calls: dict[str, timer.Call] = {}
    results = []
    for who, options in (("default", usual), flipped(usual, name)):
        field = Field(row.case(torch.float16), DEVICE, options)
        calls[who], _, (*_, result) = field.start("strop", row.size, row.batch)
        field.wait()
        results.append(result.double())
    times = take_turns(calls, row.kind, DEVICE, rounds)
    far = float((results[0] - results[1]).norm() / results[0].norm())
    said = ", ".join(f"{who} {t['p50_ms']:.3f} ({t['p20_ms']:.3f}, {t['p80_ms']:.3f})"
                     for who, t in times.items())  # fmt: skip
    print(f"{row.name}: {said} ms; results {far:.2e} apart", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("rows", nargs="*", default=["P1", "P2", "P2b", "P3"])
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    for row in chosen_rows(args.rows):
        measure(row, args.name, args.rounds)
        timer.give_back(DEVICE)


if __name__ == "__main__":
    main()

"""From which depth on should a linear make its sum where the other operand lies?

python benchmarks/probes/sum_depths.py [P1 P2 P2b P3] [--rounds 12]

One H100, fp16: steps of UNets whose ``product_sum`` takes linears of at least so many inputs (0:
all; 641: no attention of 640 channels or less; 1281: only the second linear of a GEGLU, from 2560
on; never), in turns. Medians of 20 calls a sample, and launches.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import strop
from strop.bench import timer
from strop.bench.infer_contenders import Field, take_turns
from strop.bench.infer_rows import Row, chosen_rows
from strop.ir.graph import Node

RULE = importlib.import_module("strop.passes.product_sum")
DEVICE, NEVER = torch.device("cuda"), 1 << 30
DEPTHS = (0, 641, 1281, NEVER)


@contextmanager
def from_depth(least: int) -> Iterator[None]:
    """Within: graphs are compiled by this rule."""
    rule: Any = RULE
    before = rule.fits_products

    def fits(linear: Node) -> bool:
        depth = linear.inputs[1].shape[-1]
        return before(linear) and depth.is_const and depth.value >= least

    rule.fits_products = fits
    try:
        yield
    finally:
        rule.fits_products = before


@torch.no_grad()
def measure(row: Row, rounds: int) -> None:
    calls: dict[str, timer.Call] = {}
    launches: dict[str, int] = {}
    with ExitStack() as stack:
        for least in DEPTHS:
            cache = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            options = strop.Options(strict=True, cache_dir=cache)
            field = Field(row.case(torch.float16), DEVICE, options)
            who = "never" if least == NEVER else f"from {least}"
            with from_depth(least):
                calls[who], *_ = field.start("strop", row.size, row.batch)
            field.wait()
            launches[who] = strop.explain(field.target).num_launches
        times = take_turns(calls, row.kind, DEVICE, rounds)
    said = ", ".join(
        f"{who} {t['p50_ms']:.3f} ({t['p20_ms']:.3f}; {launches[who]} launches)"
        for who, t in times.items()
    )
    print(f"{row.name}: {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=["P1", "P2", "P2b", "P3"])
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    for row in chosen_rows(args.rows):
        measure(row, args.rounds)
        timer.give_back(DEVICE)


if __name__ == "__main__":
    main()

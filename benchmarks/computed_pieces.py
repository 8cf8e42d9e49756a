"""Time ``cat`` and ``stack`` of computed pieces on a CPU, beside eager.

    python benchmarks/computed_pieces.py [--out FILE] [--pieces 2,8,32,64] [--kinds affine,lookup]

A result has 262,144 elements, and its pieces are computed: by pointwise operations (2 x + 1, or
exp), by lookups in tables, by sums of rows, or by norms. They are joined along the first, the
middle and the last dim. Times are those of one core, of the processor and not of a clock, the
medians of rounds in which both take turns: others may use the machine meanwhile. The table has
eager's time over Strop's, so that more than one is faster; the exit code is 1 where one is below
``--least``. FILE is JSON, written after each row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import strop
from strop.bench import environment
from strop.wording import counted

SIDE, SUMMED, ROWS_OF_TABLE = 64, 16, 1000
DIMS = ("first", "middle", "last")
ROUNDS, LEAST_S = 15, 0.004  # a sample takes so long
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """Say how a piece is computed: ``given`` makes the argument for a piece of some shape, of which
    ``made`` makes the piece, with a table of its own or without."""

    given: Callable[[Shape], Tensor]
    made: Callable[[Tensor, Tensor], Tensor]


KINDS = {
    "affine": Kind(torch.randn, lambda x, table: x * 2 + 1),
    "exp": Kind(torch.randn, lambda x, table: x.exp()),
    "lookup": Kind(
        lambda shape: torch.randint(ROWS_OF_TABLE, shape[:-1]),
        lambda x, table: F.embedding(x, table),
    ),
    "sum": Kind(lambda shape: torch.randn(*shape, SUMMED), lambda x, table: x.sum(-1)),
    "norm": Kind(torch.randn, lambda x, table: F.layer_norm(x, x.shape[-1:])),
}


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    join: str
    dim: int
    pieces: int

    @property
    def shape(self) -> Shape:
        """Return that of a piece."""
        if self.join == "stack":
            return (SIDE, SIDE * SIDE // self.pieces)
        sides = [SIDE] * 3
        sides[self.dim] //= self.pieces
        return tuple(sides)


class Joined(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        width = case.shape[-1] if case.kind == "lookup" else 1
        tables = [torch.randn(ROWS_OF_TABLE, width) for _ in range(case.pieces)]
        self.tables = nn.ParameterList(nn.Parameter(table, False) for table in tables)

    def forward(self, *given: Tensor) -> Tensor:
        made = KINDS[self.case.kind].made
        pieces = [made(x, table) for x, table in zip(given, self.tables, strict=True)]
        return getattr(torch, self.case.join)(pieces, self.case.dim)


def cases(kinds: Sequence[str], counts: Sequence[int]) -> Iterator[Case]:
    for kind in kinds:
        for join in ("cat", "stack"):
            for dim in range(3):
                for count in counts:
                    yield Case(kind, join, dim, count)


def measured(case: Case) -> dict[str, Any]:
    """Return both times in microseconds, and what the first call of Strop's took."""
    torch.manual_seed(0)
    module = Joined(case).eval()
    given = [KINDS[case.kind].given(case.shape) for _ in range(case.pieces)]
    eager = module(*given)
    began = time.perf_counter()
    optimized = strop.optimize(module)
    found = optimized(*given)
    first_s = time.perf_counter() - began
    torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-5)
    ways = {"eager": lambda: optimized.forward.eager(*given), "strop": lambda: optimized(*given)}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    calls = {name: _calls(call) for name, call in ways.items()}
    for _ in range(ROUNDS):
        for name, call in ways.items():
            samples[name].append(_sample(call, calls[name]))
    times = {name: round(statistics.median(each) * 1e6, 1) for name, each in samples.items()}
    spread = [round(a / b, 2) for a, b in zip(samples["eager"], samples["strop"], strict=True)]
    ordered = sorted(spread)
    return {
        "kind": case.kind,
        "join": case.join,
        "dim": DIMS[case.dim],
        "pieces": case.pieces,
        "us": times,
        "ratio": round(times["eager"] / times["strop"], 3),
        "rounds": {"p20": ordered[len(ordered) // 5], "p80": ordered[-1 - len(ordered) // 5]},
        "first_call_s": round(first_s, 2),
        "kernels": optimized.forward.counters.launches,
    }


def _calls(call: Callable[[], object]) -> int:
    call()
    return max(1, round(LEAST_S / _sample(call, 2)))


def _sample(call: Callable[[], object], calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - began) / calls


def shown(rows: Sequence[dict[str, Any]], counts: Sequence[int]) -> Table:
    table = Table("pieces by", "joined by", "along", *(counted(count, "piece") for count in counts))
    found = {(r["kind"], r["join"], r["dim"], r["pieces"]): r for r in rows}
    for kind, join, dim in dict.fromkeys(key[:3] for key in found):
        of_line = [found.get((kind, join, dim, count)) for count in counts]
        texts = [f"{r['ratio']:.2f} ({r['us']['strop']:.0f} us)" if r else "" for r in of_line]
        table.add_row(kind, join, dim, *texts)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pieces", default="2,8,32,64")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--least", type=float, default=1.0)
    given = parser.parse_args()
    counts = [int(text) for text in given.pieces.split(",")]
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    result: dict[str, Any] = {
        "kind": "computed_pieces",
        "environment": environment.describe(torch.device("cpu")),
        "rows": [],
    }
    for case in cases(given.kinds.split(","), counts):
        row = measured(case)
        result["rows"].append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        if given.out:
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=100).print(shown(result["rows"], counts))
    return int(any(row["ratio"] < given.least for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())

"""Time recommendation models with ragged features on a CPU: eager, Inductor and Strop in turns.

    python benchmarks/recommendation.py [--out FILE] [--models dlrm,wide,deepfm,lookups]

Lengths of bags are random, others at each call, and no call has lengths or ids that were seen
before; a second time one call is repeated, whose rows lie in caches then. Each way compiles once
for all sizes (``torch.compile(dynamic=True)``, ``strop.optimize``) and is called at batch 256
first. Times are those of one core, of the processor and not of a clock, the medians of rounds in
which all take turns: others may use the machine meanwhile. The table has eager's and Inductor's
time over Strop's. FILE is JSON, written after each row. ``lookups`` is what the first model looks
up, stacked, without its products.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import strop
from strop.bench import environment

ROWS, DIM, BUCKETS, NUMBERS, LONGEST = 100_000, 32, 64, 13, 20
BATCHES = (256, 1, 2048)
# batch: rounds, and calls of a sample, each of other lengths
ROUNDS = {1: (9, 12), 256: (11, 3), 2048: (7, 1)}
Call = tuple[Tensor, ...]


def hashed(ids: Tensor) -> Tensor:
    mixed = ids * 2654435761
    return (mixed ^ (mixed >> 15)) % ROWS


def tables(count: int, width: int = DIM, rows: int = ROWS) -> nn.ModuleList:
    return nn.ModuleList(nn.Embedding(rows, width) for _ in range(count))


def bags(count: int, mode: str, width: int = DIM) -> nn.ModuleList:
    made = (nn.EmbeddingBag(ROWS, width, mode=mode) for _ in range(count))  # type: ignore[arg-type]
    return nn.ModuleList(made)


def layers(*widths: int) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    found = [part for pair in pairs for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*found)


class Features(nn.Module):
    """Look up 20 hashed ids, 6 ragged bags, 4 bucketised numbers and 2 crosses."""

    singles, ragged, bucketised, crosses = 20, 6, 4, 2

    def __init__(self) -> None:
        super().__init__()
        self.of_ids, self.of_bags = tables(self.singles), bags(self.ragged, "sum")
        self.of_buckets = tables(self.bucketised, rows=BUCKETS)
        self.of_crosses = tables(self.crosses)
        self.register_buffer("edges", torch.linspace(-2, 2, BUCKETS - 1))

    def forward(self, numbers: Tensor, ids: Tensor, *given: Tensor) -> list[Tensor]:
        places = torch.bucketize(numbers[:, : self.bucketised].contiguous(), self.edges)
        found = [table(places[:, n]) for n, table in enumerate(self.of_buckets)]
        rows = hashed(ids)
        found += [table(rows[:, n]) for n, table in enumerate(self.of_ids)]
        found += [
            table(hashed(given[2 * n]), given[2 * n + 1]) for n, table in enumerate(self.of_bags)
        ]
        pairs = [ids[:, 2 * n] * 31 + ids[:, 2 * n + 1] for n in range(self.crosses)]
        return found + [t(hashed(p)) for t, p in zip(self.of_crosses, pairs, strict=True)]


class Lookups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = Features()

    def forward(self, *given: Tensor) -> Tensor:
        return torch.stack(self.features(*given), 1)


class Dlrm(nn.Module):
    """DLRM (arXiv:1906.00091): products of all pairs of features, and layers behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.bottom = Features(), layers(NUMBERS, 64, DIM)
        own = self.features
        count = 1 + own.bucketised + own.singles + own.ragged + own.crosses
        self.register_buffer("pairs", torch.tril_indices(count, count, -1))
        self.top = layers(count * (count - 1) // 2 + DIM, 256, 64)
        self.out = nn.Linear(64, 1)

    def forward(self, numbers: Tensor, *given: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        rows = torch.stack([dense, *self.features(numbers, *given)], 1)
        products = torch.bmm(rows, rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.out(self.top(torch.cat([products, dense], 1))))


class WideAndDeep(nn.Module):
    """Wide & deep (arXiv:1606.07792): one weight for each id and cross beside layers over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.features = Features()
        own = self.features
        count = own.bucketised + own.singles + own.ragged + own.crosses
        self.wide, self.wide_crosses = tables(own.singles, 1), tables(own.crosses, 1)
        self.deep = layers(count * DIM + NUMBERS, 128, 64)
        self.out = nn.Linear(64, 1)

    def forward(self, numbers: Tensor, ids: Tensor, *given: Tensor) -> Tensor:
        rows = torch.cat([*self.features(numbers, ids, *given), numbers], 1)
        own = hashed(ids)
        weights = [table(own[:, n]) for n, table in enumerate(self.wide)]
        pairs = [hashed(ids[:, 2 * n] * 31 + ids[:, 2 * n + 1]) for n in range(2)]
        weights += [table(p) for table, p in zip(self.wide_crosses, pairs, strict=True)]
        wide = torch.cat(weights, 1).sum(1, keepdim=True)
        return torch.sigmoid(self.out(self.deep(rows)) + wide)


class DeepFm(nn.Module):
    """DeepFM (arXiv:1703.04247) whose features are ids and means of histories."""

    singles, ragged = 10, 6

    def __init__(self) -> None:
        super().__init__()
        self.of_ids, self.first_order = tables(self.singles), tables(self.singles, 1)
        self.of_bags = bags(self.ragged, "mean")
        self.deep = layers((self.singles + self.ragged) * DIM + NUMBERS, 128, 64)
        self.out = nn.Linear(64, 1)

    def forward(self, numbers: Tensor, ids: Tensor, *given: Tensor) -> Tensor:
        own = hashed(ids)
        found = [table(own[:, n]) for n, table in enumerate(self.of_ids)]
        found += [
            table(hashed(given[2 * n]), given[2 * n + 1]) for n, table in enumerate(self.of_bags)
        ]
        rows = torch.stack(found, 1)
        total = rows.sum(1)
        second = 0.5 * (total * total - (rows * rows).sum(1)).sum(1, keepdim=True)
        first = torch.cat([table(own[:, n]) for n, table in enumerate(self.first_order)], 1)
        deep = self.out(self.deep(torch.cat([rows.flatten(1), numbers], 1)))
        return torch.sigmoid(deep + second + first.sum(1, keepdim=True))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lookups": Lookups,
    "dlrm": Dlrm,
    "wide": WideAndDeep,
    "deepfm": DeepFm,
}


def call_of(batch: int, generator: torch.Generator) -> Call:
    """Make a call with bags of 0 to LONGEST ids, of which the first has one at least."""
    found = [torch.randn(batch, NUMBERS, generator=generator)]
    found.append(torch.randint(0, 1 << 40, (batch, 20), generator=generator))
    for _ in range(Features.ragged):
        lengths = torch.randint(0, LONGEST + 1, (batch,), generator=generator)
        lengths[0] = lengths[0].clamp(min=1)
        found.append(torch.randint(0, 1 << 40, (int(lengths.sum()),), generator=generator))
        found.append(lengths.cumsum(0) - lengths)
    return tuple(found)


def ways_of(model: nn.Module, first: Call) -> tuple[dict[str, Callable[..., Any]], dict[str, Any]]:
    """Return the ways to call a model, and what their first calls took in seconds."""
    optimized = strop.optimize(copy.deepcopy(model))
    inductor = torch.compile(copy.deepcopy(model), dynamic=True)
    ways = {"eager": model, "inductor": inductor, "strop": optimized}
    seconds = {}
    for name, way in ways.items():
        began = time.process_time()
        way(*first)
        seconds[name] = round(time.process_time() - began, 2)
    return ways, seconds


def errors(ways: dict[str, Callable[..., Any]], model: nn.Module, given: Call) -> dict[str, float]:
    """Return how far results are from those in fp64, as the root of the mean square."""
    exact = copy.deepcopy(model).double()(given[0].double(), *given[1:])
    return {n: float((way(*given) - exact).square().mean().sqrt()) for n, way in ways.items()}


def timed(
    ways: dict[str, Callable[..., Any]], batch: int, seed: int, *, same: bool = False
) -> dict[str, list[float]]:
    """Return milliseconds a call, of each round. With ``same`` it is one call again and again."""
    generator = torch.Generator().manual_seed(seed)
    first = call_of(batch, generator)
    rounds, count = ROUNDS[batch]
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        calls = [first if same else call_of(batch, generator) for _ in range(count)]
        for name, way in ways.items():
            began = time.process_time()
            for given in calls:
                way(*given)
            if number:  # the first one is for what a new batch costs
                samples[name].append((time.process_time() - began) / count * 1e3)
    return samples


def compared(samples: dict[str, list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["ms"] = {way: round(statistics.median(each), 3) for way, each in samples.items()}
    for other in ("eager", "inductor"):
        pairs = zip(samples[other], samples["strop"], strict=True)
        ordered = sorted(round(a / b, 2) for a, b in pairs)
        fifth = len(ordered) // 5
        found[f"over_{other}"] = {
            "ratio": round(found["ms"][other] / found["ms"]["strop"], 2),
            "p20": ordered[fifth],
            "p80": ordered[-1 - fifth],
        }
    return found


def shown(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("model", "batch", "eager ms", "Inductor", "Strop", "x eager", "x Inductor")
    repeated = [
        {**r["same"], "model": f"{r['model']}, same ids", "batch": r["batch"]} for r in rows
    ]
    for each in [*rows, *repeated]:
        times = [f"{each['ms'][way]:.2f}" for way in ("eager", "inductor", "strop")]
        ratios = [
            f"{r['ratio']:.2f} ({r['p20']:.2f} to {r['p80']:.2f})"
            for r in (each["over_eager"], each["over_inductor"])
        ]
        table.add_row(each["model"], str(each["batch"]), *times, *ratios)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    result: dict[str, Any] = {
        "kind": "recommendation",
        "environment": environment.describe(torch.device("cpu")),
        "rows": [],
    }
    for name in given.models.split(","):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = MODELS[name]().eval()
        first = call_of(BATCHES[0], torch.Generator().manual_seed(1))
        ways, seconds = ways_of(model, first)
        for batch in BATCHES:
            found = {"model": name, "batch": batch, **compared(timed(ways, batch, seed=batch))}
            found["same"] = compared(timed(ways, batch, seed=batch, same=True))
            found["first_call_s"] = seconds
            found["graphs"] = len(ways["strop"].forward.variants.all)  # type: ignore[attr-defined]
            found["launches"] = ways["strop"].forward.counters.launches  # type: ignore[attr-defined]
            check = call_of(batch, torch.Generator().manual_seed(2))
            found["error"] = errors(ways, model, check)
            result["rows"].append(found)
            print(json.dumps(found), file=sys.stderr, flush=True)
            if given.out:
                given.out.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=110).print(shown(result["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

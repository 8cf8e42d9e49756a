"""Make recommendation models with ragged features, and calls of them.

Lengths of bags are random, and no call has lengths or ids that were seen before. ``lookups`` is
what DLRM looks up, stacked, without its products.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

ROWS, DIM, BUCKETS, NUMBERS, LONGEST = 100_000, 32, 64, 13, 20
Call = tuple[Tensor, ...]


def hashed(ids: Tensor) -> Tensor:
    mixed = ids * 2654435761
    return (mixed ^ (mixed >> 15)) % ROWS


def tables(count: int, width: int = DIM, rows: int | None = None) -> nn.ModuleList:
    return nn.ModuleList(nn.Embedding(rows or ROWS, width) for _ in range(count))


def bags(count: int, mode: str, width: int = DIM) -> nn.ModuleList:
    made = (nn.EmbeddingBag(ROWS, width, mode=mode) for _ in range(count))
    return nn.ModuleList(made)


def layers(*widths: int) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    found = [part for pair in pairs for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*found)


class Features(nn.Module):
    """Look up 20 hashed ids, 6 ragged bags, 4 bucketised numbers and 2 crosses."""

    singles, ragged, bucketised, crosses = 20, 6, 4, 2
    edges: Tensor

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
    """Computes DLRM (arXiv:1906.00091): products of all pairs of features, layers behind them."""

    pairs: Tensor

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
    """Computes wide & deep (arXiv:1606.07792): a weight for each id and cross, beside layers."""

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
    """Computes DeepFM (arXiv:1703.04247) of ids and means of histories."""

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

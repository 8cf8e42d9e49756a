"""Choose replicas that are warm for a batch: that have drawn its size, and have its adapters."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from strop.serve.studio import PictureBatch

_MOST_SIZES = 512  # of a replica, which are remembered


@dataclass(frozen=True)
class Warmth:
    """Hold what a batch leaves warm. A size that a replica has not drawn costs plans and kernels,
    seconds; other adapters cost a sum of weights."""

    size: Hashable
    adapters: Hashable


def warmth_of(batch: PictureBatch) -> Warmth:
    """Return what a batch leaves warm; the model of Strop and that of eager are warm apart."""
    return Warmth((batch.requests[0].size, batch.is_eager), (batch.adapters, batch.is_eager))


@dataclass
class _Drawn:
    """Hold the sizes that a replica has drawn, the last one last, and the adapters it has now."""

    sizes: dict[Hashable, None] = field(default_factory=dict)
    adapters: Hashable = None


class WarmReplicas:
    """Remember what each replica was given, and rank replicas for what comes next."""

    def __init__(self) -> None:
        self._drawn: dict[Hashable, _Drawn] = {}

    def note(self, replica: Hashable, given: Warmth) -> None:
        """Remember that a replica was given a batch."""
        drawn = self._drawn.setdefault(replica, _Drawn())
        drawn.sizes.pop(given.size, None)
        drawn.sizes[given.size] = None
        drawn.adapters = given.adapters
        if len(drawn.sizes) > _MOST_SIZES:
            del drawn.sizes[next(iter(drawn.sizes))]

    def keep(self, replicas: Iterable[Hashable]) -> None:
        """Forget all replicas but these."""
        there = set(replicas)
        self._drawn = {name: drawn for name, drawn in self._drawn.items() if name in there}

    def ranks(self, replicas: Sequence[Hashable], wanted: Warmth) -> list[list[Hashable]]:
        """Return replicas in ranks, the best ones first: those that have drawn the size, and among
        them those with the adapters. Of the others those come first that have drawn the fewest
        sizes, so that sizes spread. Whoever is busy is passed over: nobody waits for warmth."""

        def cost(replica: Hashable) -> tuple[bool, int, bool]:
            drawn = self._drawn.get(replica, _Drawn())
            is_cold = wanted.size not in drawn.sizes
            return is_cold, len(drawn.sizes) if is_cold else 0, drawn.adapters != wanted.adapters

        return [list(rank) for _, rank in groupby(sorted(replicas, key=cost), cost)]

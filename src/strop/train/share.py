"""Cut a batch into the rows of each rank.

What is drawn for a sample depends on its place in the whole batch: every rank draws for all rows
and keeps its own. So N ranks with b rows each compute what one rank does with N b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchShare:
    """Hold rows ``start`` to ``end`` of a batch of ``total``, and the same of a further block: the
    class pictures lie behind the instances.

    The mean loss of these rows times ``weight``, averaged over all ranks, is that of the batch.
    """

    start: int
    end: int
    total: int
    weight: float = 1.0
    blocks: int = 1

    @staticmethod
    def of(total: int, rank: int = 0, count: int = 1, blocks: int = 1) -> BatchShare:
        """Return the rows of a rank; their numbers differ by one at most. A rank that would have
        none takes the first one with weight 0, so that all ranks do the same in the same order."""
        start, end = total * rank // count, total * (rank + 1) // count
        if start == end:
            return BatchShare(0, 1, total, 0.0, blocks)
        return BatchShare(start, end, total, (end - start) * count / total, blocks)

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def drawn(self) -> int:
        """Return for how many rows to draw."""
        return self.total * self.blocks

    def pick(self, values: Sequence[T]) -> list[T]:
        """Return this share of a value for each row of the batch."""
        places = range(0, self.drawn, self.total)
        return [value for at in places for value in values[at + self.start : at + self.end]]

    def rows(self, drawn: Tensor) -> Tensor:
        """Return this share of a tensor with a row for each of the batch."""
        if len(self) == self.total:
            return drawn
        blocks = drawn.unflatten(0, (self.blocks, self.total))
        own: Tensor = blocks[:, self.start : self.end].flatten(0, 1)
        return own

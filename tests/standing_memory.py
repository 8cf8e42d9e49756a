"""Stand in for a GPU's memory that stays at its addresses, and for a program that works in it."""

from __future__ import annotations

from typing import ClassVar

import torch

JUNK = 0xFF  # NaN, read as floats


class StandingMemory:
    """Memory that stays at its addresses, and holds junk while it rests, as if it were unmapped."""

    stays = True
    most_bytes: ClassVar[int] = 1 << 17

    def __init__(self, device: torch.device) -> None:
        self._all = torch.full((self.most_bytes,), JUNK, dtype=torch.uint8)
        self.tensor = self._all[:0]

    def grow(self, size_bytes: int) -> None:
        self.tensor = self._all[:size_bytes]

    def rest(self) -> None:
        self._all.fill_(JUNK)
        self.tensor = self._all[:0]

    give_back = rest


class Guest:
    num_moves = 0

    def let_go(self) -> None:
        self.num_moves += 1

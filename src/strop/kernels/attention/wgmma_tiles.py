"""List the tiles of attention by groups of warps, and how their programs share the queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strop.kernels.ptx import ROWS

# What a program takes in steps, to begin and to end; and how long, of the time of all its groups,
# so many of them take for a step, where the others have no queries.
BEGIN = 6.0
ALONE: Mapping[int, Mapping[int, float]] = {2: {1: 0.75}, 3: {1: 0.65}, 4: {2: 0.7, 1: 0.55}}


@dataclass(frozen=True, slots=True)
class WgmmaTile:
    """``groups`` of 64 queries each, ``keys`` a step, ``stages`` of them on the way; with one stage
    all keys are one step. ``programs``: on a processor, which bounds the registers. ``early``:
    weights are rounded among the exponentials, as the results of the block before have been waited
    for; else that wait comes behind them."""

    groups: int
    keys: int
    stages: int
    programs: int = 1
    early: bool = False

    def shares(self, batch_times_heads: int, queries: int, keys: int, sms: int) -> Shares:
        """Return what fills the last round of programs on so many multiprocessors best."""
        whole = batch_times_heads * -(-queries // (ROWS * self.groups))
        steps = -(-keys // self.keys)
        full, rest = divmod(whole, sms)
        best = Shares(whole, self.groups, whole, full + (rest > 0), full + (rest > 0))
        for groups, share in ALONE.get(self.groups, {}).items() if self.is_shared else ():
            programs = rest * (self.groups // groups)
            more = -(-programs // sms)
            some = Shares(
                whole - rest, groups, whole - rest + programs, full + more, full + more * share
            )
            best = min(best, some, key=lambda found: found.rounds * BEGIN + found.load * steps)
        return best

    @property
    def is_shared(self) -> bool:
        """Tell whether programs may share out the queries of one."""
        return self.programs == 1 and self.stages > 1


@dataclass(frozen=True, slots=True)
class Shares:
    """``whole`` programs, all of whose groups have queries; in the others, which come last, so many
    ``groups`` have; ``programs`` in all. ``rounds`` of them, and how long their steps take, in
    rounds of whole ones."""

    whole: int
    groups: int
    programs: int
    rounds: int
    load: float

    @property
    def scalars(self) -> tuple[int, int, int]:
        return self.whole, self.groups, self.programs

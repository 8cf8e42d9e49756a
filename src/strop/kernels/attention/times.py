"""Say how long attention takes on a device, by tile: the type of a fitted table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strop.kernels.attention.cross import CrossTile
from strop.kernels.attention.tma import TmaTile
from strop.kernels.attention.wgmma_tiles import WgmmaTile

AnyTile = TmaTile | WgmmaTile | CrossTile

UNBOUNDED = 1 << 62
# How the library's own kernel shares its work, as its times say: 128 queries a program.
OF_LIBRARY = WgmmaTile(2, 128, 1)


@dataclass(frozen=True, slots=True)
class TileRule:
    """A tile that was measured as the fastest where there are no more scores, of all heads
    together, and so many keys."""

    tile: AnyTile
    most_scores: int = UNBOUNDED
    most_keys: int = UNBOUNDED
    least_keys: int = 1

    def holds(self, scores: int, keys: int) -> bool:
        return scores <= self.most_scores and self.least_keys <= keys <= self.most_keys


@dataclass(frozen=True, slots=True)
class Rounds:
    """A tile, or the library (None), of which a multiprocessor has one program at a time.
    Microseconds to begin a round of programs, and of a step over some keys."""

    tile: WgmmaTile | None
    start: float
    step: float

    def us(self, batch_times_heads: int, queries: int, keys: int, sms: int) -> float:
        tile = self.tile or OF_LIBRARY
        shares = tile.shares(batch_times_heads, queries, keys, sms)
        return shares.rounds * self.start + shares.load * -(-keys // tile.keys) * self.step


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Hold the rules by the size of a head. ``few`` holds for up to ``few_keys`` keys and ``many``
    beyond: the first rule that holds. Where none does, the least of ``in_rounds``.
    ``least_queries``: fewer have not been measured, and heads that it lacks neither. ``codes``: of
    the kernel of e4m3 codes, without what makes these, from ``least_code_keys`` on."""

    few_keys: int
    few: Mapping[int, tuple[TileRule, ...]]
    many: Mapping[int, tuple[TileRule, ...]]
    in_rounds: Mapping[int, tuple[Rounds, ...]]
    least_queries: Mapping[int, int]
    codes: Mapping[int, tuple[Rounds, ...]] = field(default_factory=dict)
    least_code_keys: int = 0

    def rule(self, head: int, scores: int, keys: int) -> TileRule | None:
        rules = (self.few if keys <= self.few_keys else self.many).get(head, ())
        return next((rule for rule in rules if rule.holds(scores, keys)), None)

    def tiles(self, head: int) -> tuple[AnyTile, ...]:
        """All that run at some sizes, each once."""
        rules: tuple[TileRule | Rounds, ...] = (
            *self.few.get(head, ()),
            *self.many.get(head, ()),
            *self.in_rounds.get(head, ()),
        )
        return tuple(dict.fromkeys(rule.tile for rule in rules if rule.tile is not None))


NOT_MEASURED = AttentionTimes(0, {}, {}, {}, {})

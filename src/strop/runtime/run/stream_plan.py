"""Plan which weights stay on a device under a budget, and in which blocks the others are streamed.

All is numbers here. A *region* is a piece of memory that is moved as a whole: a weight, or several
that lie in one piece. The order in which a program reads regions is known. Regions that the same
steps read, or steps right behind each other, are a *unit*: it must be there as a whole. Units that
do not stay on the device go through two *slots* of equal size, in *blocks* of as many units behind
each other as have room in one. A block is copied while the one before it is in use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from strop.errors import OptionError
from strop.runtime.run.weight_layout import aligned
from strop.wording import counted

SLOT_BYTES = 64 << 20  # a copy of so much takes the bus long enough to run at its full rate,
SLOT_SHARE = 8  # if that is no more than this part of the budget


@dataclass(frozen=True, slots=True)
class Use:
    """The step at ``position`` reads these regions."""

    position: int
    regions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Regions are there as a whole from the step at ``first`` to that at ``last``."""

    first: int
    last: int
    regions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Units lie in ``slot`` from ``first`` to ``last``. ``offsets``, by region, are in bytes."""

    slot: int
    first: int
    last: int
    offsets: Mapping[int, int]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Regions that are ``resident`` stay on the device; blocks are in the order of a run."""

    resident: frozenset[int]
    slot_bytes: int
    blocks: tuple[Block, ...]

    @property
    def streamed_bytes(self) -> int:
        return sum(block.size_bytes for block in self.blocks)


def plan_stream(
    uses: Sequence[Use],
    sizes: Mapping[int, int],
    budget_bytes: int,
    *,
    here: Collection[int] = (),
    away: Collection[int] = (),
    stretches: bool = False,
) -> StreamPlan:
    """Plan the regions of these ``sizes``, of which a run makes these ``uses``. Regions that are
    ``here`` stay on the device whatever else does, and those that are ``away`` do not.

    Raises OptionError for a budget that is too small, with the least that would do, unless it
    ``stretches``: then the least is taken.
    """
    taken = {n: aligned(size) for n, size in sizes.items()}
    read = dict.fromkeys(n for use in uses for n in use.regions)
    whole_bytes = _sum(taken, {*read, *here})
    all_here = StreamPlan(frozenset({*read, *here}), 0, ())
    if whole_bytes <= budget_bytes and read.keys().isdisjoint(away):
        return all_here
    scattered = scattered_regions(uses, taken, here)
    if lost := scattered & set(away):
        raise OptionError(
            f"weights_budget_bytes: factors of adapters ({counted(len(lost), 'piece')}) are read"
            " at several places of a run, and cannot be streamed: fuse the adapters into the"
            " weights, or do without"
        )
    fixed = {*here, *scattered}
    units = units_of(uses, fixed)
    slot, forced = _forced(units, taken, away)
    least = _sum(taken, fixed) + forced + 2 * slot
    if least > budget_bytes and stretches:
        if whole_bytes <= least and read.keys().isdisjoint(away):
            return all_here
        budget_bytes = least
    if least > budget_bytes:
        raise OptionError(
            f"weights_budget_bytes={budget_bytes} is too small: the weights need {whole_bytes}"
            f" bytes, or {min(least, whole_bytes)} at least where they are streamed. Two slots take"
            f" {slot} bytes each then, and what is read at several places, or has no room in a"
            f" slot, {least - 2 * slot} bytes"
        )
    room = budget_bytes - _sum(taken, fixed) - forced
    slot = max(slot, min(SLOT_BYTES, budget_bytes // SLOT_SHARE, room // 2) // 512 * 512)
    kept = _kept(units, taken, slot, room - 2 * slot, away)
    streamed = [unit for unit in units if unit not in kept]
    resident = {*fixed, *(n for unit in kept for n in unit.regions)}
    return StreamPlan(frozenset(resident), slot, blocks_of(streamed, taken, slot))


def replan(
    uses: Sequence[Use], sizes: Mapping[int, int], resident: Collection[int], slot_bytes: int
) -> StreamPlan | None:
    """Plan another order of steps with what is resident already, and slots of this size. None: it
    cannot be."""
    taken = {n: aligned(size) for n, size in sizes.items()}
    if scattered_regions(uses, taken, resident):
        return None
    units = units_of(uses, resident)
    if any(_sum(taken, unit.regions) > slot_bytes for unit in units):
        return None
    return StreamPlan(frozenset(resident), slot_bytes, blocks_of(units, taken, slot_bytes))


def scattered_regions(
    uses: Sequence[Use], sizes: Mapping[int, int], but: Collection[int] = ()
) -> set[int]:
    """Return the regions that several steps read between which more than their own bytes are read
    of others: a slot would be held too long."""
    spans, firsts = _spans(uses, but)
    found = set[int]()
    for number, (first, last) in spans.items():
        between = sum(
            sizes[n] for at in range(first, last + 1) for n in firsts.get(at, ()) if n != number
        )
        if last > first and between > sizes[number]:
            found.add(number)
    return found


def units_of(uses: Sequence[Use], but: Collection[int] = ()) -> list[Unit]:
    """Return the units of all regions ``but`` some, in the order of a run."""
    spans, firsts = _spans(uses, but)
    units, end, held = list[Unit](), -1, list[int]()
    first = 0
    for place in range(len(uses)):
        new = firsts.get(place, ())
        if held and place > end:
            units.append(Unit(uses[first].position, uses[end].position, tuple(held)))
            held = []
        if new:
            first = first if held else place
            held += new
            end = max(end, *(spans[n][1] for n in new))
    if held:
        units.append(Unit(uses[first].position, uses[end].position, tuple(held)))
    return units


def blocks_of(
    units: Iterable[Unit], sizes: Mapping[int, int], slot_bytes: int
) -> tuple[Block, ...]:
    """Put units that follow each other into blocks. Every other block has the other slot."""
    blocks, held, size = list[Block](), list[Unit](), 0
    for unit in units:
        more = _sum(sizes, unit.regions)
        if held and size + more > slot_bytes:
            blocks.append(_block(held, sizes, len(blocks)))
            held, size = [], 0
        held.append(unit)
        size += more
    if held:
        blocks.append(_block(held, sizes, len(blocks)))
    return tuple(blocks)


def _block(units: Sequence[Unit], sizes: Mapping[int, int], number: int) -> Block:
    offsets, size = dict[int, int](), 0
    for region in (n for unit in units for n in unit.regions):
        offsets[region] = size
        size += sizes[region]
    return Block(number % 2, units[0].first, units[-1].last, offsets, size)


def _spans(
    uses: Sequence[Use], but: Collection[int]
) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, ...]]]:
    """Return the first and the last use of each region, and which are used first at each."""
    left, spans = frozenset(but), dict[int, tuple[int, int]]()
    for place, use in enumerate(uses):
        for number in use.regions:
            if number not in left:
                spans[number] = (spans.get(number, (place, place))[0], place)
    firsts = dict[int, tuple[int, ...]]()
    for number, (first, _) in spans.items():
        firsts[first] = (*firsts.get(first, ()), number)
    return spans, firsts


def _forced(
    units: Sequence[Unit], sizes: Mapping[int, int], away: Collection[int]
) -> tuple[int, int]:
    """Return the size of a slot with which the least memory is needed, and the bytes of units that
    are larger and have to stay."""
    every = sorted((_sum(sizes, unit.regions) for unit in units), reverse=True)
    largest_away = max(
        (_sum(sizes, u.regions) for u in units if not frozenset(u.regions).isdisjoint(away)),
        default=0,
    )
    best, larger = (every[0], 0) if every else (0, 0), 0
    for size in every:
        if size < largest_away:
            break
        if larger + 2 * size < best[1] + 2 * best[0]:
            best = size, larger
        larger += size
    return best


def _kept(
    units: Sequence[Unit],
    sizes: Mapping[int, int],
    slot_bytes: int,
    room: int,
    away: Collection[int],
) -> set[Unit]:
    """Return the units that stay: those that have no room in a slot, the first ones, under which
    the first block is copied, and others at equal distances, so that the bus is busy all the time.
    """
    own = {unit: _sum(sizes, unit.regions) for unit in units}
    kept = {unit for unit in units if own[unit] > slot_bytes}
    able = [u for u in units if u not in kept and frozenset(u.regions).isdisjoint(away)]
    head = min(room // 4, 2 * slot_bytes)
    share = (room - head) / max(sum(own[unit] for unit in able) - head, 1)
    due = float(head)
    for unit in able:
        due += 0 if head > 0 else own[unit] * share
        if own[unit] <= min(due, room):
            kept.add(unit)
            room -= own[unit]
            due -= own[unit]
            head -= own[unit]
        else:
            head = 0
    for unit in sorted(set(able) - kept, key=lambda unit: -own[unit]):  # where one still has room
        if own[unit] <= room:
            kept.add(unit)
            room -= own[unit]
    return kept


def _sum(sizes: Mapping[int, int], numbers: Iterable[int]) -> int:
    return sum(sizes[n] for n in numbers)

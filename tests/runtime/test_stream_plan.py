"""Plans of what stays under a budget and what is streamed, by numbers alone."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from strop.errors import OptionError
from strop.runtime.run.stream_plan import (
    StreamPlan,
    Unit,
    Use,
    plan_stream,
    replan,
    scattered_regions,
    units_of,
)

KB = 1024


def in_order(*regions: tuple[int, ...]) -> list[Use]:
    return [Use(position, some) for position, some in enumerate(regions)]


def check(plan: StreamPlan, uses: list[Use], sizes: dict[int, int], budget_bytes: int) -> None:
    """Have a run go by a plan: each step finds what it reads, and nothing lies on another."""
    read = {n for use in uses for n in use.regions}
    streamed = {n for block in plan.blocks for n in block.offsets}
    assert plan.resident | streamed == read
    assert not plan.resident & streamed
    assert sum(sizes[n] for n in plan.resident) + 2 * plan.slot_bytes <= budget_bytes
    held: dict[int, set[int]] = {0: set(), 1: set()}
    for use in uses:
        for block in plan.blocks:
            if block.first == use.position:
                assert not held[block.slot], "its slot has been given up"
                held[block.slot] = {*block.offsets}
        assert {*use.regions} <= plan.resident | held[0] | held[1]
        for block in plan.blocks:
            if block.last == use.position:
                held[block.slot] = set()
    for number, block in enumerate(plan.blocks):
        assert block.slot == number % 2
        ends = [at + sizes[n] for n, at in block.offsets.items()]
        assert max(ends) <= block.size_bytes <= plan.slot_bytes
        starts = [*block.offsets.values()][1:]
        assert all(end <= start for end, start in zip(ends, starts, strict=False))


def test_all_stays_where_there_is_room() -> None:
    plan = plan_stream(in_order((0,), (1, 2)), {0: KB, 1: KB, 2: KB}, 3 * KB)
    assert plan == StreamPlan(frozenset({0, 1, 2}), 0, ())


def test_regions_that_steps_share_are_one_unit() -> None:
    uses = in_order((0,), (1,), (1, 2), (2,), (), (3,))
    assert units_of(uses) == [Unit(0, 0, (0,)), Unit(1, 3, (1, 2)), Unit(5, 5, (3,))]
    assert units_of(uses, {1}) == [Unit(0, 0, (0,)), Unit(2, 3, (2,)), Unit(5, 5, (3,))]


def test_what_is_read_at_several_places_stays() -> None:
    uses = in_order((0,), (1,), (2,), (3,), (0,))
    sizes = dict.fromkeys(range(4), 8 * KB)
    assert scattered_regions(uses, sizes) == {0}
    plan = plan_stream(uses, sizes, 24 * KB)
    assert 0 in plan.resident
    check(plan, uses, sizes, 24 * KB)


def test_a_large_unit_stays_where_slots_of_its_size_would_take_more() -> None:
    uses = in_order((0,), (1,), (2,), (3,))
    sizes = {0: 100 * KB, 1: 10 * KB, 2: 10 * KB, 3: 10 * KB}
    plan = plan_stream(uses, sizes, 120 * KB)
    assert plan.resident == {0}
    check(plan, uses, sizes, 120 * KB)


def test_the_bus_is_busy_all_the_time() -> None:
    count = 60
    uses, sizes = in_order(*((n,) for n in range(count))), dict.fromkeys(range(count), 8 * KB)
    plan = plan_stream(uses, sizes, count * 4 * KB)
    check(plan, uses, sizes, count * 4 * KB)
    assert {0, 1} <= plan.resident, "the first block is copied meanwhile"
    streamed = [n for block in plan.blocks for n in block.offsets]
    gaps = [b - a for a, b in itertools.pairwise(streamed)]
    assert max(gaps) <= 4, "no stretch in which nothing is streamed"
    assert sum(sizes[n] for n in plan.resident) + 2 * plan.slot_bytes > count * 4 * KB - 8 * KB


@pytest.mark.parametrize("seed", range(60))
def test_random_orders(seed: int) -> None:
    random.seed(seed)
    sizes = {n: random.choice((1, 2, 8, 40, 200)) * 512 for n in range(40)}
    uses = in_order(
        *(
            tuple({n, *random.choices(range(max(0, n - 2), 40), k=random.choice((0, 0, 0, 1)))})
            for n in range(40)
        )
    )
    total = sum(sizes.values())
    with pytest.raises(OptionError) as caught:
        plan_stream(uses, sizes, 512)
    found = re.search(r"or (\d+) at least", str(caught.value))
    assert found is not None
    least = int(found[1])
    for budget_bytes in (least, (least + total) // 2, total - 512):
        if least <= budget_bytes < total:
            plan = plan_stream(uses, sizes, budget_bytes)
            check(plan, uses, sizes, budget_bytes)
            again = replan(uses, sizes, plan.resident, plan.slot_bytes)
            assert again is not None
            check(again, uses, sizes, budget_bytes)
    with pytest.raises(OptionError):
        plan_stream(uses, sizes, least - 512)


def test_another_order_with_what_is_resident() -> None:
    sizes = dict.fromkeys(range(6), 8 * KB)
    uses = in_order(*((n,) for n in range(6)))
    plan = plan_stream(uses, sizes, 32 * KB)
    backwards = in_order(*((n,) for n in reversed(range(6))))
    other = replan(backwards, sizes, plan.resident, plan.slot_bytes)
    assert other is not None
    check(other, backwards, sizes, 32 * KB)
    twice = in_order(*((n,) for n in range(6)), *((n,) for n in range(6)))
    assert replan(twice, sizes, plan.resident, plan.slot_bytes) is None
    pairs = in_order((0, 1, 2), (3, 4, 5))
    assert replan(pairs, sizes, (), plan.slot_bytes) is None


def test_what_is_away_is_streamed_and_what_is_here_stays() -> None:
    sizes = dict.fromkeys(range(8), 8 * KB)
    uses = in_order(*((n,) for n in range(8)))
    plan = plan_stream(uses, sizes, 40 * KB, here={7}, away={0})
    assert 7 in plan.resident
    assert 0 not in plan.resident
    check(plan, uses, sizes, 40 * KB)
    assert 0 not in plan_stream(uses, sizes, 1000 * KB, away={0}).resident
    with pytest.raises(OptionError, match="factors of adapters"):
        plan_stream(in_order((0,), (1,), (2,), (0,)), sizes, 40 * KB, away={0})


@pytest.mark.parametrize("seed", range(20))
def test_a_budget_that_stretches_takes_the_least(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {n: rng.randint(1, 40) * KB for n in range(rng.randint(2, 12))}
    uses = in_order(*((n,) for n in sizes), (rng.choice([*sizes]),))
    whole = sum(sizes.values())
    plan = plan_stream(uses, sizes, 1, stretches=True)
    taken = sum(sizes[n] for n in plan.resident) + 2 * plan.slot_bytes
    check(plan, uses, sizes, taken)
    assert taken <= whole
    if taken < whole:
        assert plan_stream(uses, sizes, taken) == plan, "no budget makes a difference there"
        with pytest.raises(OptionError, match="too small"):
            plan_stream(uses, sizes, taken - 1)
    assert plan_stream(uses, sizes, whole, stretches=True) == plan_stream(uses, sizes, whole)

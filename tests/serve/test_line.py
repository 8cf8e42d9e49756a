"""Who waits longest is next; what fits beside it goes with it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from strop.serve.line import WaitingLine


@dataclass
class One:
    key: str
    number: int = 0
    is_wanted: bool = True


def test_those_of_one_key_are_drawn_together_up_to_a_full_batch() -> None:
    line = WaitingLine[One](2)
    those = [One("a", 0), One("b", 1), One("a", 2), One("a", 3)]
    line.add(those)
    assert [[one.number for one in line.take()] for _ in range(4)] == [[0, 2], [1], [3], []]


def test_who_is_not_wanted_any_more_is_dropped() -> None:
    line = WaitingLine[One](4)
    those = [One("a", n) for n in range(3)]
    line.add(those)
    those[0].is_wanted = False
    assert len(line) == 2
    assert line.place_of(those[2:]) == 1
    assert [one.number for one in line.take()] == [1, 2]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30), st.integers(1, 5))
def test_nobody_is_lost_or_passed_over(arrivals: list[tuple[str, bool]], most: int) -> None:
    """Between arrivals a batch is taken now and then; the first who waits is always in it."""
    line, taken, waiting = WaitingLine[One](most), [], []
    for number, (key, is_taken) in enumerate(arrivals):
        one = One(key, number)
        line.add([one])
        waiting.append(one)
        if is_taken:
            batch = line.take()
            assert waiting[0] in batch
            assert len({each.key for each in batch}) == 1
            assert len(batch) <= most
            taken += batch
            waiting = [each for each in waiting if each not in batch]
    while batch := line.take():
        taken += batch
    assert sorted(one.number for one in taken) == list(range(len(arrivals)))

"""Whoever has waited longest is next, and an interrupted caller holds nobody up."""

from __future__ import annotations

import threading

import pytest

from strop.runtime.run import fair_turns
from strop.runtime.run.fair_turns import FairLock, FairTurns, Ticket, Turn, Weigh, cores_of
from tests.waiting import LIMIT_S, wait_until


def test_callers_get_it_in_the_order_in_which_they_came() -> None:
    lock, order, threads = FairLock(), list[int](), list[threading.Thread]()

    def work(number: int) -> None:
        with lock:
            order.append(number)

    with lock:
        for number in range(50):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            wait_until(lambda: len(lock._turns._waiting) == len(threads))
    for thread in threads:
        thread.join()
    assert order == [*range(50)]
    assert not lock.is_held


def test_the_owner_cannot_come_in_again_before_those_who_wait() -> None:
    """A lock of Python's would give it to the busy thread again and again."""
    lock, order, threads = FairLock(), list[str](), list[threading.Thread]()

    def work() -> None:
        with lock:
            order.append("waited")

    for _ in range(50):
        with lock:
            order.append("owned")
            threads.append(threading.Thread(target=work))
            threads[-1].start()
            wait_until(lambda: lock._turns._waiting)
    for thread in threads:
        thread.join()
    assert order == ["owned", "waited"] * 50


def test_it_nests_and_lets_go_after_an_exception() -> None:
    lock = FairLock()
    with pytest.raises(ValueError, match="within"), lock, lock:
        raise ValueError("within")
    assert not lock.is_held
    taken = threading.Thread(target=lock.__enter__)
    taken.start()
    taken.join(LIMIT_S)
    assert not taken.is_alive()
    assert lock.is_held


def test_the_lowest_free_number_is_taken_and_never_twice() -> None:
    turns, held, most = FairTurns(lambda: 3), set[int](), []

    def work() -> None:
        for _ in range(100):
            number = turns.take().number
            assert number not in held
            held.add(number)
            most.append(number)
            held.discard(number)
            turns.give(number)

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) <= 2
    assert len(most) == 2000
    assert turns.take().number == 0


def test_fewer_turns_than_are_held() -> None:
    """torch may be given more threads meanwhile, so that fewer calls run side by side."""
    count = [2]
    turns = FairTurns(lambda: count[0])
    first, second = turns.take().number, turns.take().number
    count[0] = 1
    got = list[int]()
    waiting = threading.Thread(target=lambda: got.append(turns.take().number))
    waiting.start()
    wait_until(lambda: turns._waiting)
    turns.give(first)
    assert not got
    turns.give(second)
    waiting.join(LIMIT_S)
    assert got == [0]


@pytest.mark.parametrize("is_given", [False, True])
def test_an_interrupted_caller_holds_nobody_up(
    is_given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt may come before the number is given, or just behind it."""
    turns = FairTurns(lambda: 1)
    turns.take()

    class Interrupted(Ticket):
        def __init__(self, weigh: Weigh) -> None:
            self.turn, self.weigh, self.called = None, weigh, self

        def acquire(self) -> None:
            if is_given:
                turns.give(0)
            raise KeyboardInterrupt

        def release(self) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(fair_turns, "Ticket", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            turns.take()
    if not is_given:
        turns.give(0)
    assert turns.take().number == 0


def test_it_says_whether_others_want_it() -> None:
    turns, lock = FairTurns(lambda: 1), FairLock()
    assert not turns.are_used
    number = turns.take().number
    assert turns.are_used
    turns.give(number)
    assert not turns.are_used
    with lock:
        assert not lock.is_wanted
        other = threading.Thread(target=lambda: lock.__enter__() or lock.__exit__(None, None, None))
        other.start()
        wait_until(lambda: lock.is_wanted)
    other.join()
    assert not lock.is_wanted


# shares


@pytest.mark.parametrize(
    ("full", "fewer", "cores", "callers", "expected"),
    [
        (2, (1,), 2, 1, 2),  # alone
        (2, (1,), 2, 2, 1),
        (2, (1,), 2, 200, 1),
        (2, (), 2, 2, 2),  # other bits with one thread
        (16, (8, 4, 2, 1), 16, 2, 8),
        (16, (8, 4, 2, 1), 16, 3, 4),
        (16, (8, 4), 16, 9, 4),  # as near to its share as its bits allow
        (4, (2, 1), 16, 4, 4),  # there is room for all
        (4, (2, 1), 2, 1, 4),  # as torch was told, even alone on fewer cores
        (1, (), 4, 9, 1),
    ],
)
def test_how_many_threads_a_call_gets(
    full: int, fewer: tuple[int, ...], cores: int, callers: int, expected: int
) -> None:
    assert cores_of(full, fewer, cores, callers) == expected


def test_shares_never_take_more_than_there_is() -> None:
    """The first caller takes all; of those that have waited meanwhile each takes one of four."""
    turns, waiting, got = FairTurns(lambda: 4), list[threading.Thread](), list[Turn]()

    def weigh(callers: int) -> int:
        return cores_of(4, (2, 1), 4, callers)

    alone = turns.take(weigh)
    assert alone == (0, 4, False)
    for _ in range(6):
        waiting.append(threading.Thread(target=lambda: got.append(turns.take(weigh))))
        waiting[-1].start()
        wait_until(lambda: len(turns._waiting) == len(waiting))
    assert not got
    turns.give(alone.number)
    for left in (2, 1, 0):
        wait_until(lambda left=left: len(got) == 4 and len(turns._waiting) == left)
        turns.give(got.pop(0).number)
    wait_until(lambda: len(got) == 3)
    assert {(turn.weight, turn.has_waited) for turn in got} == {(1, True)}
    for thread in waiting:
        thread.join(LIMIT_S)


def test_who_waits_for_much_is_not_passed_by_who_wants_little() -> None:
    turns, got = FairTurns(lambda: 2), list[str]()
    first = turns.take()

    def work(name: str, weight: int) -> None:
        turn = turns.take(lambda callers: weight)
        got.append(name)
        turns.give(turn.number)

    threads = [threading.Thread(target=work, args=each) for each in (("much", 2), ("little", 1))]
    for count, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda count=count: len(turns._waiting) == count)
    assert not got
    turns.give(first.number)
    for thread in threads:
        thread.join(LIMIT_S)
    assert got == ["much", "little"]


def test_an_interrupted_caller_that_wanted_much_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stands behind it needs less, and has room already."""
    turns, got = FairTurns(lambda: 2), list[Turn]()
    turns.take()

    class Interrupted(Ticket):
        def acquire(self) -> None:
            monkeypatch.undo()
            other = threading.Thread(target=lambda: got.append(turns.take()))
            other.start()
            wait_until(lambda: len(turns._waiting) == 2)
            raise KeyboardInterrupt

        def __init__(self, weigh: Weigh) -> None:
            self.turn, self.weigh, self.called = None, weigh, self

    monkeypatch.setattr(fair_turns, "Ticket", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        turns.take(lambda callers: 2)
    wait_until(lambda: got)
    assert got[0].number == 1

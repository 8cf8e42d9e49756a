"""Whoever has waited longest is next, and an interrupted caller holds nobody up."""

from __future__ import annotations

import threading
import time

import pytest

from strop.runtime.run import fair_turns
from strop.runtime.run.fair_turns import FairLock, FairTurns, Ticket
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
    lock, shares, stop = FairLock(), [0] * 8, threading.Event()

    def work(number: int) -> None:
        while not stop.is_set():
            with lock:
                shares[number] += 1
                time.sleep(0.0002)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(shares) > 400)
    stop.set()
    for thread in threads:
        thread.join()
    assert max(shares) - min(shares) <= 8  # they began one after the other


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
            number = turns.take()
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
    assert turns.take() == 0


def test_fewer_turns_than_are_held() -> None:
    """torch may be given more threads meanwhile, so that fewer calls run side by side."""
    count = [2]
    turns = FairTurns(lambda: count[0])
    first, second = turns.take(), turns.take()
    count[0] = 1
    got = list[int]()
    waiting = threading.Thread(target=lambda: got.append(turns.take()))
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
        def __init__(self) -> None:
            self.number, self.called = -1, self

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
    assert turns.take() == 0


def test_it_says_whether_others_want_it() -> None:
    turns, lock = FairTurns(lambda: 1), FairLock()
    assert not turns.are_wanted
    number = turns.take()
    assert turns.are_wanted
    turns.give(number)
    turns._waiting.append(Ticket())  # it came first, and is about to be called
    assert turns.are_wanted
    with lock:
        assert not lock.is_wanted
        other = threading.Thread(target=lambda: lock.__enter__() or lock.__exit__(None, None, None))
        other.start()
        wait_until(lambda: lock.is_wanted)
    other.join()
    assert not lock.is_wanted

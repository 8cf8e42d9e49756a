"""A lane's thread runs for callers that wait: with their settings, and keeps nothing of them."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from strop.runtime.run import lane_threads
from strop.runtime.run.lane_threads import LaneThread, flushes, thread_for
from tests.runtime.test_threads import in_threads


@pytest.fixture(autouse=True)
def own_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lane_threads, "_THREADS", {})
    before = flushes()
    yield
    torch.set_flush_denormal(before)


def elsewhere(work: Callable[[], Any]) -> Any:
    """Return what ``work`` gives in a thread that is not the main one."""
    found = list[Any]()
    in_threads(lambda number: found.append(work()), 1)
    (result,) = found
    return result


class Held:
    """This stands for the tensors of a run."""


def test_an_error_is_the_callers_and_nothing_of_the_run_is_kept() -> None:
    thread, made = LaneThread(0), list[weakref.ref[Held]]()

    def works() -> str:
        held = Held()
        made.append(weakref.ref(held))
        return threading.current_thread().name

    def fails() -> None:
        held = Held()
        made.append(weakref.ref(held))
        raise KeyError("in the middle")

    gc.disable()  # no cycle is left that only a collection would find
    try:
        assert thread.result_of(works) == "strop-lane-0"
        for _ in range(3):
            with pytest.raises(KeyError, match="in the middle"):
                thread.result_of(fails)
        assert thread.result_of(works) == "strop-lane-0"
        del works, fails
        assert [ref() for ref in made] == [None] * 5
    finally:
        gc.enable()


def test_callers_share_the_thread_of_their_lane() -> None:
    first = elsewhere(lambda: thread_for(0))
    assert first is not None
    assert elsewhere(lambda: thread_for(0)) is first
    assert elsewhere(lambda: thread_for(1)) is not first


def test_a_thread_has_its_callers_settings() -> None:
    """Denormal numbers are zero for one caller, and numbers for the other."""
    tiny = torch.full((64,), 1e-39)

    def halved(is_flushing: bool) -> tuple[Any, torch.Tensor]:
        if not torch.set_flush_denormal(is_flushing):
            pytest.skip("this processor cannot")
        thread = thread_for(0)
        assert thread is not None
        return thread, thread.result_of(lambda: tiny * 0.5)

    (plain, kept), (other, flushed) = (
        elsewhere(lambda: halved(False)),
        elsewhere(lambda: halved(True)),
    )
    assert plain is not other
    assert kept.gt(0).all()
    assert flushed.eq(0).all()


def test_operators_have_one_thread_in_it_whatever_others_have() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        thread = elsewhere(lambda: thread_for(0))
        assert thread.result_of(torch.get_num_threads) == 1
        assert elsewhere(torch.get_num_threads) == 3
    finally:
        torch.set_num_threads(before)


def test_the_main_thread_runs_by_itself() -> None:
    """An interrupt comes to it, which must not wait for another thread."""
    assert thread_for(0) is None


class SeenFunctions(TorchFunctionMode):
    pass


class SeenOperators(TorchDispatchMode):
    pass


@pytest.mark.parametrize(
    "watched",
    [
        SeenFunctions,
        SeenOperators,
        lambda: torch.device("meta"),
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ],
    ids=["functions", "operators", "default device", "profiler"],
)
def test_who_watches_runs_by_itself(watched: Callable[[], AbstractContextManager[Any]]) -> None:
    def look() -> Any:
        with watched():
            inside = thread_for(0)
        return inside, thread_for(0)

    inside, outside = elsewhere(look)
    assert inside is None
    assert outside is not None


def test_who_is_within_a_transform_runs_by_itself() -> None:
    found = list[Any]()

    def doubled(x: torch.Tensor) -> torch.Tensor:
        found.append(thread_for(0))
        return x * 2

    elsewhere(lambda: torch.vmap(doubled)(torch.ones(3)))
    assert found == [None]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_process_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the hook clears the table that the module was loaded with
    thread = elsewhere(lambda: thread_for(7))
    assert thread is not None
    child = os.fork()
    if not child:  # no assert in here: pytest would go on in the child
        own = elsewhere(lambda: thread_for(7))
        os._exit(0 if own is not thread and own.result_of(lambda: 3) == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

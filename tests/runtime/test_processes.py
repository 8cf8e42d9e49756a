"""Compiler processes change hands: from who waits to those for whom nobody does, and back.

Processes are stood in for, but where their priority and their end are the matter.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from strop.codegen.triton import emit
from strop.errors import CodegenError
from strop.ir.device import GpuTarget
from strop.ir.source import KernelSource
from strop.runtime.build import background as ahead
from strop.runtime.build import compilers as builds
from strop.runtime.build.background import LOW_PRIORITY, BackgroundBuild, Queue
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.compilers import Builds
from strop.runtime.build.cubin import Cubin
from strop.runtime.build.loader import CudaLoader
from tests.codegen.kernels import SAMPLES
from tests.gpus import H100
from tests.waiting import LIMIT_S, wait_until


class NoCache:
    def get(self, key: str) -> bytes | None:
        return None

    def put(self, key: str, data: bytes) -> None: ...


class Process:
    """A compiler whose kernels can be held back."""

    def __init__(self, compilers: Compilers, niceness: int) -> None:
        self.compilers, self.niceness = compilers, niceness
        self.made: list[KernelSource] = []
        self.is_alive = self.is_there = True  # not dead; not dismissed

    def compile(self, source: KernelSource, target: GpuTarget) -> Cubin:
        assert self.is_there
        self.made.append(source)
        held = self.compilers.held.get(source)
        if held is not None:
            assert held.wait(LIMIT_S)
        if not self.is_alive:
            raise CodegenError("the compiler process died")
        return Cubin(source.name, source.text.encode(), 0, source.num_warps, target.arch)

    def lower(self, niceness: int) -> None:
        self.niceness = niceness

    def dismiss(self) -> None:
        self.is_there = False

    def terminate(self) -> None:
        self.is_alive = False

    def wait(self) -> None: ...


class Compilers:
    def __init__(self) -> None:
        self.started: list[Process] = []
        self.held: dict[KernelSource, threading.Event] = {}

    def __call__(self, niceness: int = 0) -> Process:
        self.started.append(Process(self, niceness))
        return self.started[-1]

    def hold(self, *sources: KernelSource) -> None:
        self.held.update({source: threading.Event() for source in sources})

    def let_go(self, source: KernelSource) -> None:
        self.held[source].set()

    def is_at(self, source: KernelSource) -> bool:
        return any(source in process.made for process in self.started)

    @property
    def left(self) -> list[Process]:
        return [process for process in self.started if process.is_alive and process.is_there]


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilers]:
    made = Compilers()
    monkeypatch.setattr(builds, "cores_are_taken", lambda: False)
    monkeypatch.setattr(builds, "BUILDS", Builds())
    monkeypatch.setattr(builds, "Worker", made)
    monkeypatch.setattr(ahead, "LATER", Queue(LOW_PRIORITY))
    yield made
    for held in made.held.values():
        held.set()
    wait_until(lambda: not ahead.LATER._threads)


def kernels(count: int) -> list[KernelSource]:
    """The first is built first: its text is the longest."""
    base = emit(SAMPLES["geglu"](torch.float16).kernel).source
    return [dataclasses.replace(base, text=base.text + "#" * (count - n)) for n in range(count)]


class Asking(threading.Thread):
    """Somebody who waits for kernels."""

    def __init__(self, sources: Sequence[KernelSource], workers: int = 4) -> None:
        super().__init__(daemon=True)
        self.sources, self.workers = sources, workers
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            builds.build(self.sources, H100.target, NoCache(), self.workers)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.join(LIMIT_S)
        assert not self.is_alive()


def background(sources: Sequence[KernelSource], processes: int) -> BackgroundBuild:
    later = BackgroundBuild(sources, H100.target, NoCache())
    later._workers = processes
    later.start()
    return later


def borrowing(compilers: Compilers, first: KernelSource, wanted: KernelSource) -> Asking:
    """Who has got the process that was at the first, and is held back at what is wanted."""
    asking = Asking([wanted])
    wait_until(num_asking)
    compilers.let_go(first)
    wait_until(lambda: compilers.is_at(wanted))
    return asking


def num_asking() -> int:
    return builds.BUILDS._num_asking


def num_waiting() -> int:
    """Threads, for whatever."""
    return len(builds.BUILDS._change._waiters)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("workers", "processes"), [(1, 1), (2, 1), (3, 2), (4, 3), (8, 6), (16, 12), (64, 12)]
)
def test_three_quarters_of_the_processes_are_for_later(workers: int, processes: int) -> None:
    assert BackgroundBuild(kernels(1), workers=workers)._workers == processes


def test_who_waits_gets_the_next_process_and_keeps_it(compilers: Compilers) -> None:
    wanted = kernels(5)
    first, second = wanted[:2]
    compilers.hold(first)
    later = background([first, second], 1)
    wait_until(lambda: compilers.is_at(first))
    asking = Asking(wanted[2:], workers=1)
    wait_until(num_asking)
    assert not asking.error
    compilers.let_go(first)
    asking.end()
    later.wait()
    (process,) = compilers.started
    assert process.made == [first, *wanted[2:], second], "the background goes on at the end"
    assert process.niceness == LOW_PRIORITY
    assert (builds.BUILDS.num_built, later.num_built) == (3, 2)
    wait_until(lambda: not compilers.left)


def test_what_nobody_can_lend_is_started(compilers: Compilers) -> None:
    """Two ask, and one process may become free. The other one has built all before it does."""
    first, *wanted = kernels(4)
    compilers.hold(first)
    background([first], 1)
    wait_until(lambda: compilers.is_at(first))
    asking = Asking(wanted, workers=2)
    asking.end()
    assert asking.error is None
    assert [process.made for process in compilers.started] == [[first], wanted]
    assert [process.niceness for process in compilers.started] == [LOW_PRIORITY, 0]
    assert not num_asking()


def test_nothing_is_borrowed_where_all_cores_are_taken(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By data loaders, say: what has low priority would be slower than a new process."""
    first, later, needed = kernels(3)
    compilers.hold(first)
    behind = background([first, later], 1)
    wait_until(lambda: compilers.is_at(first))
    monkeypatch.setattr(builds, "cores_are_taken", lambda: True)
    Asking([needed]).end()
    assert [process.niceness for process in compilers.started] == [LOW_PRIORITY, 0]
    assert compilers.started[1].made == [needed]
    compilers.held[first].set()
    behind.wait()
    assert compilers.started[0].made == [first, later]


def test_what_is_lent_cannot_be_lent_again(compilers: Compilers) -> None:
    first, wanted, other = kernels(3)
    compilers.hold(first, wanted)
    background([first], 1)
    wait_until(lambda: compilers.is_at(first))
    borrows = borrowing(compilers, first, wanted)
    Asking([other]).end()
    assert [process.made for process in compilers.started] == [[first, wanted], [other]]
    compilers.let_go(wanted)
    borrows.end()


def test_processes_end_with_the_last_kernel(compilers: Compilers) -> None:
    """One that has nothing to do before that can be had at once."""
    first, second, wanted = kernels(3)
    compilers.hold(first, second)
    later = background([first, second], 2)
    wait_until(lambda: compilers.is_at(first) and compilers.is_at(second))
    threads = list(ahead.LATER._threads)
    compilers.let_go(second)
    wait_until(lambda: not all(thread.is_alive() for thread in threads))
    Asking([wanted]).end()
    assert len(compilers.started) == len(compilers.left) == 2
    compilers.let_go(first)
    later.wait()
    wait_until(lambda: not compilers.left)


def test_who_finds_all_processes_at_work_waits_for_one(compilers: Compilers) -> None:
    """Kernels that were begun early are at work in as many as there may be, the rest of them is
    asked for, and a process that starts would be there later than these are free."""
    *begun, third, fourth = kernels(4)
    compilers.hold(*begun)
    soon = BackgroundBuild(begun, H100.target, NoCache(), workers=2, niceness=0)
    soon.start()
    wait_until(lambda: all(map(compilers.is_at, begun)))
    asking = Asking([*begun, third, fourth], workers=2)
    wait_until(lambda: num_waiting() == 2)
    compilers.let_go(begun[0])
    wait_until(lambda: compilers.is_at(fourth))
    compilers.let_go(begun[1])
    asking.end()
    assert asking.error is None
    assert [len(process.made) for process in compilers.started] in ([3, 1], [1, 3])


def test_who_waits_for_one_of_all_starts_another_where_one_dies(compilers: Compilers) -> None:
    first, second = kernels(2)
    compilers.hold(first)
    asking = Asking([first], workers=1)
    wait_until(lambda: compilers.is_at(first))
    other = Asking([second], workers=1)
    wait_until(lambda: num_waiting() == 1)
    compilers.started[0].is_alive = False
    compilers.let_go(first)
    asking.end()
    other.end()
    assert other.error is None
    assert [process.made for process in compilers.started] == [[first], [second]]


def test_an_idle_process_is_taken_at_once(compilers: Compilers) -> None:
    builds.start_workers(2)
    builds.hand_over(1, LOW_PRIORITY)
    Asking(kernels(1), workers=1).end()
    low, plain = compilers.started
    assert (len(low.made), len(plain.made)) == (0, 1), "one of the usual priority comes first"
    builds.stop_workers()
    Asking(kernels(2)[:1], workers=1).end()
    assert len(low.made) == 1
    assert compilers.left == [low]


def test_a_background_that_has_lent_its_process_starts_no_other(compilers: Compilers) -> None:
    first, second, wanted = kernels(3)
    compilers.hold(first, wanted)
    later = background([first, second], 1)
    wait_until(lambda: compilers.is_at(first))
    asking = borrowing(compilers, first, wanted)
    wait_until(lambda: later.num_done == 1)
    more = background(kernels(5)[:2], 2)  # a thread that has no process yet
    wait_until(lambda: num_waiting() == 2)
    assert len(compilers.started) == 1
    compilers.let_go(wanted)
    asking.end()
    later.wait()
    more.wait()
    assert compilers.started[0].made[:2] == [first, wanted]
    assert len(compilers.started) <= 2
    wait_until(lambda: not compilers.left)


def test_a_lent_process_that_died_hangs_nobody(compilers: Compilers) -> None:
    first, second, wanted = kernels(3)
    compilers.hold(first, wanted)
    later = background([first, second], 1)
    wait_until(lambda: compilers.is_at(first))
    asking = borrowing(compilers, first, wanted)
    compilers.started[0].is_alive = False
    compilers.let_go(wanted)
    asking.end()
    assert "died" in str(asking.error)
    later.wait()
    assert compilers.started[1].made == [second]
    assert (builds.BUILDS.num_built, later.num_built) == (0, 2)
    Asking([wanted]).end()
    assert builds.BUILDS.num_built == 1, "asked again, it is built"


def test_who_waits_for_a_process_that_dies_starts_one(compilers: Compilers) -> None:
    first, second, wanted = kernels(3)
    compilers.hold(first, wanted)
    later = background([first, second], 1)
    wait_until(lambda: compilers.is_at(first))
    asking = Asking([wanted])
    wait_until(num_asking)
    compilers.started[0].is_alive = False
    compilers.let_go(first)
    later.wait()  # it goes on meanwhile
    assert (later.num_built, later.num_done) == (1, 2)
    wait_until(lambda: compilers.is_at(wanted))
    assert asking.is_alive()
    compilers.let_go(wanted)
    asking.end()
    assert asking.error is None
    assert len(compilers.started) == 3


def test_a_process_that_died_idle_is_not_asked(compilers: Compilers) -> None:
    builds.start_workers(1)
    builds.hand_over(1, LOW_PRIORITY)
    compilers.started[0].is_alive = False
    asking = Asking(kernels(1))
    asking.end()
    assert asking.error is None
    assert [len(process.made) for process in compilers.started] == [0, 1]


def test_an_error_of_who_borrowed_gives_the_process_back(compilers: Compilers) -> None:
    first, second, wanted = kernels(3)
    compilers.hold(first)
    later = background([first, second], 1)
    wait_until(lambda: compilers.is_at(first))

    class FullCache(NoCache):
        def put(self, key: str, data: bytes) -> None:
            raise OSError("no space left")

    def build() -> None:
        with pytest.raises(OSError, match="no space"):
            builds.build([wanted], H100.target, FullCache(), 1)
        errors.append(True)

    errors: list[bool] = []
    asking = threading.Thread(target=build)
    asking.start()
    wait_until(num_asking)
    compilers.let_go(first)
    asking.join(LIMIT_S)
    assert errors
    later.wait()
    assert compilers.started[0].made == [first, wanted, second]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # SystemExit
def test_closing_wakes_all_who_wait(compilers: Compilers) -> None:
    """One has borrowed, one asks, and a background waits until its process is back."""
    *later, wanted, other = kernels(5)
    compilers.hold(later[0], later[1], wanted)
    background(later, 2)
    wait_until(lambda: compilers.is_at(later[0]) and compilers.is_at(later[1]))
    borrows = Asking([wanted])
    wait_until(num_asking)
    compilers.let_go(later[0])
    wait_until(lambda: compilers.is_at(wanted))
    asks = Asking([other])
    wait_until(lambda: num_asking() and num_waiting() == 2)
    threads = ahead.LATER.close()
    builds.BUILDS.close()
    asks.end()
    for source in (wanted, later[1]):
        compilers.let_go(source)
    borrows.end()
    assert isinstance(asks.error, SystemExit)
    assert isinstance(borrows.error, SystemExit)
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    ahead.LATER._threads.clear()
    assert len(compilers.started) == 2
    assert not compilers.left


def test_closing_waits_for_none_that_is_lent(compilers: Compilers) -> None:
    (wanted,) = kernels(1)
    compilers.hold(wanted)
    builds.start_workers(2)
    builds.hand_over(2, LOW_PRIORITY)
    borrows = Asking([wanted])
    wait_until(lambda: compilers.is_at(wanted))
    builds.BUILDS.close()
    assert borrows.is_alive()
    assert not compilers.left
    compilers.let_go(wanted)
    borrows.end()


def test_what_is_lent_ends_when_the_background_has_nothing_left(compilers: Compilers) -> None:
    first, wanted = kernels(2)
    compilers.hold(first, wanted)
    later = background([first], 1)
    wait_until(lambda: compilers.is_at(first))
    asking = Asking([wanted])
    wait_until(num_asking)
    compilers.let_go(first)
    later.wait()
    wait_until(lambda: not ahead.LATER._threads)
    wait_until(lambda: compilers.is_at(wanted))
    wait_until(num_waiting)
    assert len(compilers.left) == 1
    compilers.let_go(wanted)
    asking.end()
    wait_until(lambda: not compilers.left)
    assert len(compilers.started) == 1


@pytest.fixture
def library(tmp_path: Path) -> CudaLoader:
    return CudaLoader(DiskCache(tmp_path), workers=4, device=H100)


def first_call(
    library: CudaLoader, needed: Sequence[KernelSource], others: Sequence[KernelSource]
) -> BackgroundBuild:
    library.warm_up()
    try:
        library.build(needed)
        return library.later(others)
    finally:
        library.cool_down()


def test_those_that_built_for_the_first_call_build_the_rest(
    compilers: Compilers, library: CudaLoader
) -> None:
    needed, others = kernels(12)[:4], kernels(12)[4:]
    later = first_call(library, needed, others)
    assert [process.niceness for process in compilers.left] == [LOW_PRIORITY] * 3
    later.wait()
    assert len(compilers.started) == 4
    assert sum(len(process.made) for process in compilers.started) == 12
    wait_until(lambda: not compilers.left)


def test_no_more_are_kept_than_there_are_kernels(compilers: Compilers, library: CudaLoader) -> None:
    later = first_call(library, kernels(4)[:2], kernels(4)[2:])
    assert len(compilers.left) == 2
    later.wait()
    wait_until(lambda: not compilers.left)


def test_none_are_kept_for_nothing(compilers: Compilers, library: CudaLoader) -> None:
    first_call(library, kernels(2), ()).start()
    assert len(compilers.started) == 4
    assert not compilers.left


def test_none_are_kept_after_an_error(
    compilers: Compilers, library: CudaLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Process, source: KernelSource, target: GpuTarget) -> Cubin:
        raise CodegenError("refused")

    monkeypatch.setattr(Process, "compile", refuse)
    with pytest.raises(CodegenError):
        first_call(library, kernels(1), kernels(2))
    with pytest.raises(CodegenError):
        library.build(kernels(3))
    assert not compilers.left


def test_kept_ones_do_not_pile_up(compilers: Compilers, library: CudaLoader) -> None:
    """First calls of which none was served."""
    for n in range(4):
        first_call(library, kernels(n + 1)[:1], kernels(20)[10:])
        assert len(compilers.left) == 3
    library.build(kernels(30)[:2])  # a new size takes two of them
    assert [process.niceness for process in compilers.left] == [LOW_PRIORITY] * 3


def test_a_new_size_leaves_no_process_of_its_own(compilers: Compilers, library: CudaLoader) -> None:
    library.build(kernels(3))
    assert compilers.started
    assert not compilers.left


def test_a_real_process_goes_on_at_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    fresh = Builds()
    monkeypatch.setattr(builds, "BUILDS", fresh)
    builds.start_workers(2)
    before = [worker._process.pid for worker in fresh._idle]
    builds.hand_over(1, LOW_PRIORITY)
    builds.stop_workers()
    (kept,) = fresh._idle
    pid = kept._process.pid
    assert pid in before
    assert os.getpriority(os.PRIO_PROCESS, pid) == LOW_PRIORITY
    assert builds.build_one(kernels(1)[0], H100.target, NoCache(), LOW_PRIORITY)
    assert fresh._idle == [kept]
    builds.stop_workers(LOW_PRIORITY)
    fresh.close()
    assert not [each for each in before if Path(f"/proc/{each}").exists()]

"""Triton sources become machine code: the disk cache is asked first, then several processes compile
in parallel.

A source that the cache knows is loaded without importing Triton. Nothing is built twice in one
process, also when several threads ask at once, or one in the background (``background.py``).

A process takes 0.7 s to start, so those that are there change hands. Whoever waits for a kernel may
have one of low priority, next to what it is at, and waits for one where as many as it may have are
at work. When nobody waits any more, idle ones become ones of low priority.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from strop.codegen import triton_worker
from strop.errors import CacheError, CodegenError, StropError
from strop.ir.device import GpuTarget
from strop.ir.source import KernelSource
from strop.runtime.build.artefact import LOADED
from strop.runtime.build.cubin import Cubin, cache_key, content_key, request_of

log = logging.getLogger("strop")
_PATIENCE_S = 5.0  # with a process that was told to end


class Cache(Protocol):
    """``build`` needs this of a disk cache."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, data: bytes) -> None: ...


class Worker:
    """This is one compiler process."""

    def __init__(self, niceness: int = 0) -> None:
        self.niceness = 0
        command = [sys.executable, "-P", triton_worker.__file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        if niceness:
            self.lower(niceness)

    def lower(self, niceness: int) -> None:
        """Have it compile what nobody waits for, from now on."""
        os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
        self.niceness = niceness

    def compile(self, source: KernelSource, target: GpuTarget) -> Cubin:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        reply = None
        try:
            triton_worker.write_message(self._process.stdin, request_of(source, target))  # type: ignore[arg-type]
            reply = triton_worker.read_message(self._process.stdout)  # type: ignore[arg-type]
        except BrokenPipeError:
            pass
        if reply is None:
            code = self._process.wait()
            raise CodegenError(f"the compiler process died ({code}) on {source.name}")
        header, code_bytes = reply
        if "error" in header:
            raise CodegenError(f"Triton refused {source.name}: {header['error']}\n{source.text}")
        header.pop("size")
        return Cubin.of(header, code_bytes)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def dismiss(self) -> None:
        """Let it end when it next reads, which may be after it has imported Triton."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def terminate(self) -> None:
        """Stop it at once. It takes its files along, and who waits for an answer gets none."""
        self._process.send_signal(signal.SIGTERM)

    def forget(self) -> None:
        """Let go of its pipes in a fork of the process that owns it: they are none of ours."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.dup2(nothing, pipe.fileno())
        os.close(nothing)

    def wait(self) -> None:
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def cores_are_taken() -> bool:
    """Say whether a process of low priority would get little. The average is over a minute."""
    return os.getloadavg()[0] > len(os.sched_getaffinity(0))


@dataclass
class Builds:
    """This counts what this process has built, and keeps its compiler processes."""

    num_built: int = 0  # while somebody waited
    num_cached: int = 0
    seconds: float = 0.0  # that somebody waited
    is_closing: bool = False
    _memo: dict[str, Future[Cubin]] = field(default_factory=dict)  # by what is compiled: launches
    # of one text may differ
    _idle: list[Worker] = field(default_factory=list)
    _busy: list[Worker] = field(default_factory=list)
    _leaving: list[Worker] = field(default_factory=list)
    _forgotten: list[Worker] = field(default_factory=list)
    _num_lent: int = 0  # processes of low priority with which somebody builds who waits
    _num_asking: int = 0  # of those who wait for one of these, or for any
    _change: threading.Condition = field(default_factory=threading.Condition)  # of all of this

    def claim(
        self, sources: Iterable[KernelSource], target: GpuTarget
    ) -> tuple[dict[KernelSource, Future[Cubin]], list[KernelSource]]:
        """Return what will hold each kernel, and those that nobody has built or is building: the
        caller must."""
        futures, mine = {}, []
        keys = {source: content_key(source, target) for source in sources}
        with self._change:
            for source, key in keys.items():
                if key not in self._memo:
                    self._memo[key] = Future()
                    mine.append(source)
                futures[source] = self._memo[key]
        return futures, mine

    def has(self, source: KernelSource, target: GpuTarget) -> bool:
        found = self._memo.get(content_key(source, target))
        return found is not None and found.done()

    def found(self, source: KernelSource, target: GpuTarget) -> Cubin | None:
        """Return what has been built of a kernel, once whoever builds it is done; None where that
        has failed, or nobody was asked."""
        future = self._memo.get(content_key(source, target))
        try:
            return None if future is None else future.result()
        except (StropError, OSError):  # who needs this kernel meets it again
            return None

    def settle(self, source: KernelSource, target: GpuTarget, cubin: Cubin) -> None:
        self._memo[content_key(source, target)].set_result(cubin)

    def fail(self, source: KernelSource, target: GpuTarget, error: BaseException) -> None:
        """Give the error to those who wait; those who ask later start again."""
        with self._change:
            self._memo.pop(content_key(source, target)).set_exception(error)

    def count(self, *, built: int = 0, cached: int = 0, seconds: float = 0.0) -> None:
        with self._change:
            self.num_built += built
            self.num_cached += cached
            self.seconds += seconds

    def start(self, workers: int) -> None:
        with self._change:
            missing = workers - sum(not w.niceness for w in self._idle)
            self._idle += [Worker() for _ in range(missing)]
            self._change.notify_all()

    def hand_over(self, most: int, niceness: int) -> None:
        """Make idle processes ones of low priority, until there are ``most`` of these."""
        with self._change:
            self._idle = [w for w in self._idle if w.is_alive]
            there = sum(bool(worker.niceness) for worker in (*self._idle, *self._busy))
            able = [worker for worker in self._idle if not worker.niceness]
            for worker in able[: max(most - there, 0)]:
                with contextlib.suppress(OSError):  # then it stays as it is, and will be dismissed
                    worker.lower(niceness)
            self._change.notify_all()

    def stop(self, niceness: int = 0) -> None:
        """Dismiss the idle processes of this priority, when those that are lent are back."""
        with self._change:
            while niceness and (self._num_lent or self._num_asking) and not self.is_closing:
                self._change.wait()
            going = [w for w in self._idle if w.niceness == niceness]
            for worker in going:
                worker.dismiss()
            self._idle = [w for w in self._idle if w.niceness != niceness]
            self._leaving = [w for w in self._leaving if w.is_alive] + going

    def close(self) -> None:
        """Stop all processes: this one ends, and nobody wants what is being compiled any more."""
        with self._change:
            self.is_closing = True
            busy = list(self._busy)
            for worker in busy:
                worker.terminate()
            self._change.notify_all()
        for niceness in {worker.niceness for worker in self._idle}:
            self.stop(niceness)
        for worker in [*self._leaving, *busy]:
            worker.wait()

    def forget(self) -> None:
        """Forget, in a fork, what it does not have: none of the threads is there, and it may talk
        to none of the processes."""
        self._change = threading.Condition()
        self._num_lent = self._num_asking = 0
        self._memo = {key: f for key, f in self._memo.items() if f.done()}
        for worker in (*self._idle, *self._busy):
            worker.forget()
        # kept: a pipe that another thread was writing to cannot be closed
        self._forgotten = [*self._forgotten, *self._idle, *self._busy, *self._leaving]
        self._idle, self._busy, self._leaving = [], [], []

    @contextlib.contextmanager
    def process(self, niceness: int = 0, most: int = sys.maxsize) -> Iterator[Worker]:
        """Hand out a compiler process as long as this lasts: idle, lent by the background, or new.
        No more than ``most`` compile what somebody waits for."""
        worker = self._taken(niceness, most)
        try:
            yield worker
        except CodegenError:
            if self.is_closing:
                raise SystemExit from None  # ends a thread without a word
            raise
        finally:
            self._put_back(worker, niceness)

    def _taken(self, niceness: int, most: int) -> Worker:
        with self._change:
            while (worker := self._free(niceness)) is None and self._should_wait(niceness, most):
                self._num_asking += not niceness
                self._change.wait()
                self._num_asking -= not niceness
            self._change.notify_all()  # the background waits while somebody asks
            worker = worker or Worker(niceness)
            self._busy.append(worker)
            self._num_lent += worker.niceness != niceness
            return worker

    def _free(self, niceness: int) -> Worker | None:
        """Take an idle process off the list, or return None. One of low priority is for those who
        ask for it first."""
        if self.is_closing:
            raise SystemExit
        self._idle = [w for w in self._idle if w.is_alive]
        able = [w for w in self._idle if w.niceness == niceness]
        if not niceness and not cores_are_taken():
            able = self._idle
        if len(able) <= (self._num_asking if niceness else 0):
            return None
        worker = min(able, key=lambda w: w.niceness)
        self._idle.remove(worker)
        return worker

    def _should_wait(self, niceness: int, most: int) -> bool:
        """Say whether there will be a process, so that none has to start."""
        if niceness:
            return bool(self._num_lent or self._num_asking)
        if sum(not w.niceness for w in self._busy) + self._num_lent >= most:
            return True
        num_later = sum(bool(w.niceness) for w in self._busy)
        return num_later - self._num_lent > self._num_asking and not cores_are_taken()

    def _put_back(self, worker: Worker, niceness: int) -> None:
        with self._change:
            self._busy.remove(worker)
            self._num_lent -= worker.niceness != niceness
            if worker.is_alive and not self.is_closing:
                self._idle.append(worker)
            self._change.notify_all()


BUILDS = Builds()
atexit.register(lambda: BUILDS.close())
os.register_at_fork(after_in_child=lambda: BUILDS.forget())


def start_workers(workers: int) -> None:
    """Start compiler processes ahead of time: they import Triton while the caller does more."""
    BUILDS.start(workers)


def stop_workers(niceness: int = 0) -> None:
    """End idle compiler processes; a later build starts new ones."""
    BUILDS.stop(niceness)


def hand_over(most: int, niceness: int) -> None:
    """Keep idle compiler processes for what nobody waits for."""
    BUILDS.hand_over(most, niceness)


def build(
    sources: Iterable[KernelSource], target: GpuTarget, cache: Cache, workers: int
) -> dict[KernelSource, Cubin]:
    """Return machine code for every source: from this process, the cache, or the compiler, of which
    no more than ``workers`` are started."""
    began = time.perf_counter()
    futures, mine = BUILDS.claim(dict.fromkeys(sources), target)
    open_ = set(mine)
    try:
        missing = [source for source in mine if not _load(source, target, cache)]
        open_.intersection_update(missing)
        BUILDS.count(cached=len(mine) - len(missing))

        def make(source: KernelSource, worker: Worker) -> None:
            _keep(source, target, cache, worker.compile(source, target))
            open_.discard(source)
            BUILDS.count(built=1)

        # the longest text goes first: no process is left alone with a large kernel at the end
        _in_threads(make, sorted(missing, key=lambda s: -len(s.text)), workers)
    except BaseException as error:
        for source in open_:
            BUILDS.fail(source, target, error)
        raise
    found = {source: future.result() for source, future in futures.items()}
    BUILDS.count(seconds=time.perf_counter() - began)
    return found


def build_one(
    source: KernelSource, target: GpuTarget, cache: Cache, niceness: int, workers: int = sys.maxsize
) -> bool:
    """Make sure that a kernel is there, and say whether it had to be compiled here. Those of low
    priority are counted by who asks. ``workers`` is as for ``build``."""
    _, mine = BUILDS.claim([source], target)
    if not mine:
        return False
    try:
        was_cached = _load(source, target, cache)
        if not was_cached:
            with BUILDS.process(niceness, workers) as worker:
                cubin = worker.compile(source, target)
            _keep(source, target, cache, cubin)
    except BaseException as error:
        BUILDS.fail(source, target, error)
        raise
    if not niceness:
        BUILDS.count(built=not was_cached, cached=was_cached)
    return not was_cached


def _load(source: KernelSource, target: GpuTarget, cache: Cache) -> bool:
    cubin = _in_artefacts(source, target)
    if cubin is None and (data := cache.get(cache_key(source, target))) is not None:
        cubin = Cubin.from_bytes(data)
    if cubin is not None:
        BUILDS.settle(source, target, cubin)
    return cubin is not None


def _in_artefacts(source: KernelSource, target: GpuTarget) -> Cubin | None:
    data = LOADED.read("cubin", content_key(source, target))
    if data is None:
        return None
    try:
        return Cubin.from_bytes(data)
    except CacheError as error:
        log.warning("a kernel of an artefact is left out: %s", error)
        return None


def _keep(source: KernelSource, target: GpuTarget, cache: Cache, cubin: Cubin) -> None:
    cache.put(cache_key(source, target), cubin.to_bytes())
    BUILDS.settle(source, target, cubin)


def _in_threads(
    make: Callable[[KernelSource, Worker], None], sources: Sequence[KernelSource], count: int
) -> None:
    """Make kernels in daemon threads, unlike those of an executor, for which the end of a process
    waits. Each keeps its process while there is work. After an error nothing new is begun."""
    left, errors = deque(sources), list[BaseException]()

    def work() -> None:
        try:
            with BUILDS.process(most=count) as worker:
                while True:
                    try:
                        source = left.popleft()
                    except IndexError:
                        return
                    make(source, worker)
        except BaseException as error:
            errors.append(error)
            left.clear()

    threads = [
        threading.Thread(target=work, name=f"strop-kernels-{n}", daemon=True)
        for n in range(min(count, len(sources)))
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # interrupted: no thread may settle what is given up
        left.clear()
        for thread in threads:
            thread.join()
        raise
    if errors:
        raise errors[0]

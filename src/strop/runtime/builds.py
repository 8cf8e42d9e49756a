"""Triton sources to machine code: disk cache first, then compiled by several processes in parallel.

A source that the cache knows is loaded without importing Triton. Nothing is built twice in one
process, also when several threads ask at once, or one of them ahead of the others (``ahead.py``).
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from strop.codegen import triton_worker
from strop.errors import CodegenError
from strop.ir.source import KernelSource
from strop.runtime.cubin import Cubin, cache_key, request_of

_PATIENCE_S = 5.0  # with a process that was told to end


class Cache(Protocol):
    """What ``build`` needs of a disk cache."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, data: bytes) -> None: ...


class Worker:
    """One compiler process."""

    def __init__(self, niceness: int = 0) -> None:
        self.niceness = niceness
        command = [sys.executable, "-P", triton_worker.__file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        if niceness:
            os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)

    def compile(self, source: KernelSource, arch: int) -> Cubin:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        reply = None
        try:
            triton_worker.write_message(self._process.stdin, request_of(source, arch))  # type: ignore[arg-type]
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
        """It ends when it next reads, which may be after it has imported Triton."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def terminate(self) -> None:
        """It ends at once, and takes its files along; who waits for an answer gets none."""
        self._process.send_signal(signal.SIGTERM)

    def forget(self) -> None:
        """In a fork of the process that owns it: its pipes are none of ours."""
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


@dataclass
class Builds:
    """What this process has built, and its compiler processes."""

    num_built: int = 0  # while somebody waited
    num_cached: int = 0
    is_closing: bool = False
    _memo: dict[str, Future[Cubin]] = field(default_factory=dict)  # by what is compiled: launches
    # of one text may differ
    _idle: list[Worker] = field(default_factory=list)
    _busy: list[Worker] = field(default_factory=list)
    _leaving: list[Worker] = field(default_factory=list)
    _forgotten: list[Worker] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def claim(
        self, sources: Iterable[KernelSource], arch: int
    ) -> tuple[dict[KernelSource, Future[Cubin]], list[KernelSource]]:
        """What will hold each kernel, and those that nobody has built or is building: the caller
        must."""
        futures, mine = {}, []
        keys = {source: cache_key(source, arch) for source in sources}
        with self._lock:
            for source, key in keys.items():
                if key not in self._memo:
                    self._memo[key] = Future()
                    mine.append(source)
                futures[source] = self._memo[key]
        return futures, mine

    def has(self, source: KernelSource, arch: int) -> bool:
        found = self._memo.get(cache_key(source, arch))
        return found is not None and found.done()

    def settle(self, source: KernelSource, arch: int, cubin: Cubin) -> None:
        self._memo[cache_key(source, arch)].set_result(cubin)

    def fail(self, source: KernelSource, arch: int, error: BaseException) -> None:
        """Those who wait get the error; those who ask later start again."""
        with self._lock:
            self._memo.pop(cache_key(source, arch)).set_exception(error)

    def count(self, *, built: int = 0, cached: int = 0) -> None:
        with self._lock:
            self.num_built += built
            self.num_cached += cached

    def start(self, workers: int) -> None:
        with self._lock:
            missing = workers - sum(not w.niceness for w in self._idle)
            self._idle += [Worker() for _ in range(missing)]

    def stop(self, niceness: int = 0) -> None:
        """Dismiss the idle processes of this priority."""
        with self._lock:
            going = [w for w in self._idle if w.niceness == niceness]
            for worker in going:
                worker.dismiss()
            self._idle = [w for w in self._idle if w.niceness != niceness]
            self._leaving = [w for w in self._leaving if w.is_alive] + going

    def close(self) -> None:
        """The process ends: nobody wants what is being compiled any more."""
        with self._lock:
            self.is_closing = True
            for worker in self._busy:
                worker.terminate()
        for niceness in {worker.niceness for worker in self._idle}:
            self.stop(niceness)
        for worker in [*self._leaving, *self._busy]:
            worker.wait()

    def forget(self) -> None:
        """In a fork, which has none of the threads and may talk to none of the processes."""
        self._lock = threading.Lock()
        self._memo = {key: f for key, f in self._memo.items() if f.done()}
        for worker in (*self._idle, *self._busy):
            worker.forget()
        # kept: a pipe that another thread was writing to cannot be closed
        self._forgotten = [*self._forgotten, *self._idle, *self._busy, *self._leaving]
        self._idle, self._busy, self._leaving = [], [], []

    def compile(self, source: KernelSource, arch: int, niceness: int = 0) -> Cubin:
        """Compile in an idle process, or in a new one."""
        worker = self._taken(niceness)
        try:
            return worker.compile(source, arch)
        except CodegenError:
            if self.is_closing:
                raise SystemExit from None  # ends a thread without a word
            raise
        finally:
            with self._lock:
                self._busy.remove(worker)
                if worker.is_alive and not self.is_closing:
                    self._idle.append(worker)

    def _taken(self, niceness: int) -> Worker:
        with self._lock:
            if self.is_closing:
                raise SystemExit
            worker = next((w for w in self._idle if w.niceness == niceness), None)
            if worker is None:
                worker = Worker(niceness)
            else:
                self._idle.remove(worker)
            self._busy.append(worker)
            return worker


BUILDS = Builds()
atexit.register(lambda: BUILDS.close())
os.register_at_fork(after_in_child=lambda: BUILDS.forget())


def start_workers(workers: int) -> None:
    """Start compiler processes ahead of time: they import Triton while the caller does more."""
    BUILDS.start(workers)


def stop_workers(niceness: int = 0) -> None:
    """End idle compiler processes; a later build starts new ones."""
    BUILDS.stop(niceness)


def build(
    sources: Iterable[KernelSource], arch: int, cache: Cache, workers: int
) -> dict[KernelSource, Cubin]:
    """Machine code for every source: from this process, the cache, or the compiler."""
    futures, mine = BUILDS.claim(dict.fromkeys(sources), arch)
    open_ = set(mine)
    try:
        missing = [source for source in mine if not _load(source, arch, cache)]
        open_.intersection_update(missing)
        BUILDS.count(cached=len(mine) - len(missing))

        def make(source: KernelSource) -> None:
            _compile(source, arch, cache)
            open_.discard(source)
            BUILDS.count(built=1)

        # longest text first, so that no process is left alone with a large kernel at the end
        _in_threads(make, sorted(missing, key=lambda s: -len(s.text)), workers)
    except BaseException as error:
        for source in open_:
            BUILDS.fail(source, arch, error)
        raise
    return {source: future.result() for source, future in futures.items()}


def build_ahead(source: KernelSource, arch: int, cache: Cache, niceness: int) -> bool:
    """Make sure that a kernel is there; whether it had to be compiled here. Those of low priority
    are counted by who asks."""
    _, mine = BUILDS.claim([source], arch)
    if not mine:
        return False
    try:
        was_cached = _load(source, arch, cache)
        if not was_cached:
            _compile(source, arch, cache, niceness)
    except BaseException as error:
        BUILDS.fail(source, arch, error)
        raise
    if not niceness:
        BUILDS.count(built=not was_cached, cached=was_cached)
    return not was_cached


def _load(source: KernelSource, arch: int, cache: Cache) -> bool:
    data = cache.get(cache_key(source, arch))
    if data is not None:
        BUILDS.settle(source, arch, Cubin.from_bytes(data))
    return data is not None


def _compile(source: KernelSource, arch: int, cache: Cache, niceness: int = 0) -> None:
    cubin = BUILDS.compile(source, arch, niceness)
    cache.put(cache_key(source, arch), cubin.to_bytes())
    BUILDS.settle(source, arch, cubin)


def _in_threads(
    make: Callable[[KernelSource], None], sources: Sequence[KernelSource], count: int
) -> None:
    """In daemon threads, unlike those of an executor, for which the end of a process waits. After
    an error nothing new is begun."""
    left, errors = deque(sources), list[BaseException]()

    def work() -> None:
        while not errors:
            try:
                source = left.popleft()
            except IndexError:
                return
            try:
                make(source)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, name=f"strop-kernels-{n}", daemon=True)
               for n in range(min(count, len(sources)))]  # fmt: skip
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

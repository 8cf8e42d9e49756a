"""Triton sources to machine code: disk cache first, then compiled by a few processes in parallel.

A source that the cache knows is loaded without importing Triton. Nothing is built twice in one
process, also when several threads ask at once.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch

from strop.codegen import triton_worker
from strop.errors import CacheError, CodegenError
from strop.ir.source import KernelSource

TYPES = {
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


class Cache(Protocol):
    """What ``build`` needs of a disk cache."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one kernel for one architecture."""

    entry: str
    code: bytes
    shared: int  # bytes of dynamic shared memory
    num_warps: int
    arch: int

    def to_bytes(self) -> bytes:
        """A line of JSON, then the code."""
        header = {
            "entry": self.entry,
            "shared": self.shared,
            "num_warps": self.num_warps,
            "arch": self.arch,
            "sha256": hashlib.sha256(self.code).hexdigest(),
        }
        return json.dumps(header).encode() + b"\n" + self.code

    @staticmethod
    def from_bytes(data: bytes) -> Cubin:
        line, _, code = data.partition(b"\n")
        try:
            header = json.loads(line)
            digest = header.pop("sha256")
            cubin = Cubin(code=code, **header)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CacheError(f"not a compiled kernel: {line[:80]!r}") from error
        if digest != hashlib.sha256(code).hexdigest():
            raise CacheError(f"compiled kernel {cubin.entry!r} is damaged: its digest differs")
        return cubin


def request_of(source: KernelSource, arch: int) -> dict[str, Any]:
    """The compile request: plain data, everything that decides the machine code."""
    types = ["*" + TYPES[dtype] for dtype in source.params]
    types += ["*" + TYPES[scratch.dtype] for scratch in source.scratch]
    divisible = list(range(len(types)))
    divisible += [len(types) + i for i, k in enumerate(source.scalars) if k % 16 == 0]
    types += ["i64" if source.wide else "i32"] * (len(source.scalars) + (source.split is not None))
    types += ["constexpr"] * len(source.constants)
    names = _argument_names(source)
    return {
        "name": source.name,
        "text": source.text,
        "signature": dict(zip(names, types, strict=True)),
        "constants": dict(source.constants),
        "divisible": divisible,
        "num_warps": source.num_warps,
        "max_registers": source.max_registers,
        "arch": arch,
    }


def _argument_names(source: KernelSource) -> list[str]:
    header = source.text.index(f"def {source.name}(") + len(f"def {source.name}(")
    arguments = source.text[header : source.text.index("):", header)]
    return [argument.split(":")[0].strip() for argument in arguments.split(",") if argument.strip()]


@lru_cache(maxsize=1)
def triton_version() -> str:
    """The installed version, without importing Triton."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise CodegenError("Triton is not installed; `pip install triton` on Linux") from None


def cache_key(source: KernelSource, arch: int) -> str:
    content = json.dumps(request_of(source, arch), sort_keys=True)
    return hashlib.sha256(f"cubin 1 {triton_version()} {content}".encode()).hexdigest()


def compile_cubin(source: KernelSource, arch: int) -> Cubin:
    """Compile in this process. ``arch``: 80, 86, 89, 90, 100, ..."""
    try:
        header, code = triton_worker.compile_request(request_of(source, arch))
    except ImportError as error:
        raise CodegenError("Triton is not installed; `pip install triton` on Linux") from error
    return Cubin(code=code, **header)


class _Worker:
    """One compiler process."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", triton_worker.__file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

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
        return Cubin(code=code_bytes, **header)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def dismiss(self) -> None:
        """It ends when it next reads, which may be after it has imported Triton."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def wait(self) -> None:
        self._process.wait()


@dataclass
class Builds:
    """What this process has built, and its idle compiler processes."""

    num_built: int = 0
    num_cached: int = 0
    _memo: dict[tuple[KernelSource, int], Future[Cubin]] = field(default_factory=dict)
    _idle: list[_Worker] = field(default_factory=list)
    _leaving: list[_Worker] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def claim(self, sources: Iterable[KernelSource], arch: int) -> list[KernelSource]:
        """Those of the sources that nobody has built or is building: the caller must."""
        mine = []
        with self._lock:
            for source in sources:
                if (source, arch) not in self._memo:
                    self._memo[source, arch] = Future()
                    mine.append(source)
        return mine

    def result(self, source: KernelSource, arch: int) -> Cubin:
        return self._memo[source, arch].result()

    def settle(self, source: KernelSource, arch: int, cubin: Cubin, was_cached: bool) -> None:
        with self._lock:
            self.num_cached += was_cached
            self.num_built += not was_cached
            self._memo[source, arch].set_result(cubin)

    def fail(self, source: KernelSource, arch: int, error: BaseException) -> None:
        """Those who wait get the error; those who ask later start again."""
        with self._lock:
            self._memo.pop((source, arch)).set_exception(error)

    def start(self, workers: int) -> None:
        with self._lock:
            self._idle += [_Worker() for _ in range(workers - len(self._idle))]

    def stop(self, *, wait: bool = False) -> None:
        with self._lock:
            for worker in self._idle:
                worker.dismiss()
            self._leaving = [w for w in self._leaving if w.is_alive] + self._idle
            self._idle = []
        for worker in self._leaving if wait else ():
            worker.wait()

    def compile(self, source: KernelSource, arch: int) -> Cubin:
        """Compile in an idle process, or in a new one."""
        with self._lock:
            worker = self._idle.pop() if self._idle else _Worker()
        try:
            return worker.compile(source, arch)
        finally:
            with self._lock:
                if worker.is_alive:
                    self._idle.append(worker)


BUILDS = Builds()
atexit.register(BUILDS.stop, wait=True)


def start_workers(workers: int) -> None:
    """Start compiler processes ahead of time: they import Triton while the caller does more."""
    BUILDS.start(workers)


def stop_workers() -> None:
    """End idle compiler processes; a later build starts new ones."""
    BUILDS.stop()


def build(
    sources: Iterable[KernelSource], arch: int, cache: Cache, workers: int
) -> dict[KernelSource, Cubin]:
    """Machine code for every source: from this process, the cache, or the compiler."""
    wanted = list(dict.fromkeys(sources))
    mine = BUILDS.claim(wanted, arch)
    missing = list(mine)
    try:
        for source in mine:
            data = cache.get(cache_key(source, arch))
            if data is not None:
                BUILDS.settle(source, arch, Cubin.from_bytes(data), was_cached=True)
                missing.remove(source)
        if missing:
            _compile_all(list(missing), arch, cache, workers, missing)
    except BaseException as error:
        for source in missing:
            BUILDS.fail(source, arch, error)
        raise
    return {source: BUILDS.result(source, arch) for source in wanted}


def _compile_all(
    sources: list[KernelSource], arch: int, cache: Cache, workers: int, missing: list[KernelSource]
) -> None:
    """Longest text first, so that no worker is left alone with a large kernel at the end."""
    sources.sort(key=lambda source: -len(source.text))

    def compile_one(source: KernelSource) -> None:
        cubin = BUILDS.compile(source, arch)
        cache.put(cache_key(source, arch), cubin.to_bytes())
        BUILDS.settle(source, arch, cubin, was_cached=False)
        missing.remove(source)

    with ThreadPoolExecutor(max(min(workers, len(sources)), 1)) as pool:
        for future in [pool.submit(compile_one, source) for source in sources]:
            future.result()

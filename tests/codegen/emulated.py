"""Run kernels that are compiled for AArch64, by qemu-user, on the tensors of this process.

The very shared objects that an artefact holds are loaded by a small program (``emulated.cpp``). It
shares a file with this process, to which the memory behind each pointer is copied before a kernel
runs, and from which it is copied back. The C library is that of the cross compiler.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.ir.device import Device
from strop.ir.source import KernelSource
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeKernels
from strop.runtime.build.processors import CROSS_COMPILERS, TARGETS, processor

COMPILER, EMULATOR = CROSS_COMPILERS[TARGETS["aarch64-v8"].kind], "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"  # where Debian has the C library of its cross compiler
PLAIN = (Tensor, torch.nn.Parameter)  # others hold these
MEMORY_BYTES, PAGE, GAP = 1 << 29, 4096, 1 << 16
ARM_TARGETS = tuple(name for name, row in TARGETS.items() if row.kind == TARGETS["aarch64-v8"].kind)


def missing() -> str:
    """Say what is not installed, or nothing."""
    tools = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if tools:
        return f"{' and '.join(tools)} not found (apt-get install g++-aarch64-linux-gnu qemu-user)"
    return "" if Path(SYSROOT).is_dir() else f"no C library for AArch64 in {SYSROOT}"


needs_emulator = pytest.mark.skipif(bool(missing()), reason=missing())


@dataclass
class Region:
    """Storages that lie near each other, which they do in the emulator as well: a program moves
    pointers, also to places before the tensor that is read."""

    storages: list[tuple[int, int]] = field(default_factory=list)  # addresses and bytes, in order
    place: int = 0  # in the shared memory

    @property
    def begin(self) -> int:
        return self.storages[0][0]

    @property
    def end(self) -> int:
        return max(address + num_bytes for address, num_bytes in self.storages)

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    def __contains__(self, pointer: int) -> bool:
        return self.begin - GAP // 2 <= pointer < self.end + GAP // 2


def _offset(pointer: int, regions: Sequence[Region]) -> int:
    if not pointer:
        return -1
    region = next(region for region in regions if pointer in region)
    return region.place + pointer - region.begin


class Machine:
    """A process of the emulator, and the memory that it shares with this one."""

    def __init__(self, folder: Path, threads: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        program, file = folder / "runs-kernels", folder / "memory"
        source = Path(__file__).with_name("emulated.cpp")
        flags = ("-O1", "-std=c++20", str(source), "-o", str(program), "-lgomp", "-ldl")
        subprocess.run([COMPILER, *flags], check=True)
        with file.open("wb") as empty:
            empty.truncate(MEMORY_BYTES)
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), MEMORY_BYTES)
        view = (ctypes.c_char * MEMORY_BYTES).from_buffer(self._memory)
        self._start, self._view = ctypes.addressof(view), view
        options = ("-cpu", "max", "-L", SYSROOT, "-E", f"OMP_NUM_THREADS={threads}")
        self._process = subprocess.Popen(
            [EMULATOR, *options, str(program), str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._storages = dict[int, torch.UntypedStorage]()
        self.num_runs = 0
        self.always_looks = False

    def close(self) -> None:
        self._process.communicate(timeout=60)
        del self._view
        self._memory.close()

    def run(
        self, library: Path, symbol: str, pointers: Sequence[int], scalars: Sequence[int]
    ) -> None:
        self._find(pointers)
        regions = [r for r in self._regions() if any(p in r for p in pointers)]
        lost = [p for p in pointers if p and not any(p in r for r in regions)]
        assert not lost, f"no tensor has memory at {lost[0]:x}"
        at = 2 * GAP
        for region in regions:
            at += (region.begin - at) % PAGE
            region.place = at
            assert at + region.num_bytes < MEMORY_BYTES, "the shared memory is too small"
            for address, num_bytes in region.storages:
                ctypes.memmove(self._start + at + address - region.begin, address, num_bytes)
            at += region.num_bytes + 2 * GAP
        self._ask(library, symbol, [_offset(p, regions) for p in pointers], scalars)
        for region in regions:
            for address, num_bytes in region.storages:
                place = region.place + address - region.begin
                ctypes.memmove(address, self._start + place, num_bytes)
        self.num_runs += 1

    def _regions(self) -> list[Region]:
        found = list[Region]()
        for address, storage in sorted(self._storages.items()):
            if not found or address > found[-1].end + GAP:
                found.append(Region())
            found[-1].storages.append((address, storage.nbytes()))
        return found

    def _ask(
        self, library: Path, symbol: str, offsets: Sequence[int], scalars: Sequence[int]
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        numbers = (len(offsets), *offsets, len(scalars), *scalars)
        self._process.stdin.write(f"{library} {symbol} {' '.join(map(str, numbers))}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer == "done", f"{symbol}: {answer or f'ended ({self._process.wait(60)})'}"

    def _find(self, pointers: Sequence[int]) -> None:
        """Look for the storages of tensors. Those that were found are kept, so that nothing else
        comes to lie there."""
        known = [range(at, at + s.nbytes()) for at, s in self._storages.items()]
        if self.always_looks or not all(any(p in r for r in known) for p in pointers if p):
            self._storages |= {s.data_ptr(): s for s in _all_storages()}

    def forget(self) -> None:
        """Let go of the storages that were found."""
        self._storages.clear()


def _all_storages() -> Iterator[torch.UntypedStorage]:
    gc.unfreeze()  # a trace takes what is there out of the collector's sight
    for found in gc.get_objects():
        if type(found) not in PLAIN or found.device.type != "cpu" or found.layout != torch.strided:
            continue
        storage = found.untyped_storage()
        if storage.nbytes() and storage.data_ptr():
            yield storage


@dataclass
class EmulatedCall:
    """A kernel with its arguments in place, as ``BoundNativeKernel`` is."""

    machine: Machine
    library: Path
    symbol: str
    pointers: list[int]
    scalars: list[int]

    def set_pointer(self, place: int, pointer: int) -> None:
        self.pointers[place] = pointer

    def __call__(self) -> None:
        self.machine.run(self.library, self.symbol, self.pointers, self.scalars)


@dataclass(frozen=True)
class EmulatedFunction:
    machine: Machine
    library: Path
    symbol: str

    def bind(self, pointers: Iterable[int], scalars: Iterable[int]) -> EmulatedCall:
        return EmulatedCall(self.machine, self.library, self.symbol, [*pointers], [*scalars])


class EmulatedKernels:
    """Stands where ``NativeKernels`` does, or a loader, with kernels of a target of AArch64."""

    def __init__(self, folder: Path, target: str, machine: Machine) -> None:
        self.device: Device = processor(target)
        self.target_name = target
        self.machine, self.native = machine, NativeKernels(DiskCache(folder), target=target)

    def build(self, sources: Sequence[KernelSource]) -> dict[KernelSource, EmulatedFunction]:
        self.native.make(sources)
        return {s: EmulatedFunction(self.machine, *self.native.place(s)) for s in sources}

    def bind(
        self,
        source: KernelSource,
        pointers: Sequence[int],
        scalars: Sequence[int],
        *_: Any,
        **__: Any,
    ) -> EmulatedCall:
        return self.build([source])[source].bind(pointers, scalars)

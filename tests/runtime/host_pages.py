"""A CUDA driver that maps memory of the host, and refuses what the real one refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int, c_long, c_size_t, c_ubyte, c_void_p
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.runtime.build import driver
from strop.runtime.build.virtual_memory import MappedBytes, VirtualMemory
from strop.runtime.run import growing_memory, workspace
from strop.runtime.run.growing_memory import AddressSpace

CPU = torch.device("cpu")
PAGE = 1 << 14
_NOBODYS, _BOTH = 0, 3  # PROT_NONE, PROT_READ | PROT_WRITE
_HIDDEN, _PLACED = 0x4022, 0x4032  # MAP_NORESERVE | MAP_ANONYMOUS | MAP_PRIVATE, and MAP_FIXED
_OK, _INVALID, _OUT_OF_MEMORY = 0, 1, 2

_libc = ctypes.CDLL(None)
_libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, c_long]
_libc.mmap.restype = c_void_p
_libc.mprotect.argtypes = [c_void_p, c_size_t, c_int]
_libc.munmap.argtypes = [c_void_p, c_size_t]


class Pages:
    """As much of libcuda as deals with addresses. ``breaks``: functions that fail next."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.reserved: dict[int, int] = {}
        self.starts: dict[int, int] = {}  # of the host's pages, which are smaller
        self.mapped: dict[int, tuple[int, int]] = {}  # by address: size and handle
        self.made: dict[int, int] = {}  # sizes by handle
        self.released: set[int] = set()
        self.breaks: list[str] = []
        self.calls: list[str] = []
        self.modes = [0]  # of the thread's captures: global ones

    @property
    def used_bytes(self) -> int:
        return sum(self.made.values())

    def __getattr__(self, name: str) -> Any:
        function = getattr(Pages, f"_{name}", None)
        if function is None:
            raise AttributeError(name)

        def call(*given: Any) -> int:
            self.calls.append(name)
            if name in self.breaks:
                self.breaks.remove(name)
                return _INVALID
            plain = [getattr(g, "value", g) for g in given]
            return int(function(self, *plain))

        return call

    def _cuGetErrorString(self, code: int, text: Any) -> int:
        return _INVALID

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode._obj.value, self.modes[0] = self.modes[0], mode._obj.value
        return _OK

    def _cuMemGetAllocationGranularity(self, out: Any, wanted: Any, kind: int) -> int:
        out._obj.value = PAGE
        return _OK

    def _cuMemAddressReserve(self, out: Any, size: int, align: int, at: int, flags: int) -> int:
        if size % PAGE or not size or flags:
            return _INVALID
        start = _libc.mmap(None, size + PAGE, _NOBODYS, _HIDDEN, -1, 0)
        out._obj.value = -(-start // PAGE) * PAGE
        self.reserved[out._obj.value] = size
        self.starts[out._obj.value] = start
        return _OK

    def _cuMemCreate(self, out: Any, size: int, wanted: Any, flags: int) -> int:
        kind = wanted._obj
        on_device = (kind.type, kind.location.type, kind.location.id) == (1, 1, 0)
        if size % PAGE or not size or not on_device or self.modes[0] != 2:
            return _INVALID
        if self.used_bytes + size > self.total_bytes:
            return _OUT_OF_MEMORY
        out._obj.value = handle = 1 + max(self.made, default=0)
        self.made[handle] = size
        return _OK

    def _cuMemMap(self, at: int, size: int, offset: int, handle: int, flags: int) -> int:
        is_inside = any(a <= at and at + size <= a + n for a, n in self.reserved.items())
        is_taken = any(at < a + n and a < at + size for a, (n, _) in self.mapped.items())
        fits = self.made.get(handle) == size and handle not in self.released
        if not is_inside or is_taken or at % PAGE or offset or flags or not fits:
            return _INVALID
        self.mapped[at] = size, handle
        return _OK

    def _cuMemSetAccess(self, at: int, size: int, how: Any, count: int) -> int:
        wanted = how._obj
        if self.mapped.get(at, (0, 0))[0] != size or count != 1 or wanted.flags != 3:
            return _INVALID
        return int(_libc.mprotect(at, size, _BOTH))

    def _cuMemRelease(self, handle: int) -> int:
        if handle not in self.made or handle in self.released:
            return _INVALID
        self.released.add(handle)
        self._let_go(handle)
        return _OK

    def _cuMemUnmap(self, at: int, size: int) -> int:
        end, found = at, []
        while end in self.mapped and end < at + size:
            found.append(end)
            end += self.mapped[end][0]
        if end != at + size or not found:
            return _INVALID
        handles = [self.mapped.pop(address)[1] for address in found]
        _libc.mmap(at, size, _NOBODYS, _PLACED, -1, 0)
        for handle in handles:
            self._let_go(handle)
        return _OK

    def _cuMemAddressFree(self, at: int, size: int) -> int:
        has_memory = any(at <= address < at + size for address in self.mapped)
        if self.reserved.get(at) != size or has_memory:
            return _INVALID
        del self.reserved[at]
        return int(_libc.munmap(self.starts.pop(at), size + PAGE))

    def _let_go(self, handle: int) -> None:
        is_mapped = any(handle == other for _, other in self.mapped.values())
        if handle in self.released and not is_mapped:
            del self.made[handle]
            self.released.remove(handle)


class HostMemory(VirtualMemory):
    """Virtual memory of the host, with a torch that may capture and that keeps some of it."""

    def __init__(self, pages: Pages) -> None:
        super().__init__(torch.device("cpu", 0), pages.total_bytes)
        self.pages = pages
        self.capturing = False
        self.num_waits = self.num_emptied = 0
        self.most: int | None = None  # that the process may hold

    def tensor(self, memory: MappedBytes) -> Tensor:
        found = memory.__cuda_array_interface__
        buffer = (c_ubyte * found["shape"][0]).from_address(found["data"][0])
        kept = type("Kept", (type(buffer),), {}).from_address(found["data"][0])
        kept.owner = memory
        return torch.frombuffer(kept, dtype=torch.uint8)

    def is_capturing(self) -> bool:
        return self.capturing

    def wait(self) -> None:
        assert not self.capturing, "a device that captures cannot be waited for"
        self.num_waits += 1

    def empty_cache(self) -> None:
        assert not self.capturing
        self.num_emptied += 1

    def _may_hold(self, size_bytes: int) -> bool:
        return self.most is None or size_bytes <= self.most


@contextmanager
def host_memory(total_bytes: int = 1 << 30) -> Iterator[HostMemory]:
    """While it lasts, memory of the CPU grows where it is, as a GPU's does."""
    pages = Pages(total_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_cuda", lambda: pages)
        memory = HostMemory(pages)
        patch.setattr(growing_memory, "_SPACES", {CPU: AddressSpace(memory)})
        patch.setattr(workspace, "_WORKSPACES", {})
        yield memory

"""Addresses of a GPU and the memory behind them are asked for apart, through the CUDA driver
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html): a range of addresses costs
nothing, and memory is put behind its lower part as it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import Structure, byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import Any, Protocol

import torch
from torch import Tensor

from strop.errors import CodegenError
from strop.runtime.build import driver

IS_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_PINNED, _ON_DEVICE, _READ_AND_WRITE, _MINIMUM = 1, 1, 3, 0  # of enums of the driver's
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class _Location(Structure):
    """Declare CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationFlags(Structure):
    """Declare the flags of CUmemAllocationProp."""

    _fields_ = (
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Allocation(Structure):
    """Declare CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handles", c_int),
        ("location", _Location),
        ("metadata", c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(Structure):
    """Declare CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


class MappedBytes(Protocol):
    """This describes memory to torch; a tensor that is made of it keeps it alive."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...


class VirtualMemory:
    """Reserve addresses of one GPU, and put memory behind them."""

    def __init__(self, device: torch.device, total_bytes: int) -> None:
        """Ask how large pages are. ``total_bytes`` is all memory of the device."""
        index = device.index
        location = _Location(_ON_DEVICE, index)
        self.device, self._index, self._total_bytes = device, index, total_bytes
        self._allocation = _Allocation(_PINNED, 0, location, None, _AllocationFlags())
        self._access = _Access(location, _READ_AND_WRITE)
        size = c_size_t()
        driver.call(
            f"asking GPU {index} for the size of its pages",
            "cuMemGetAllocationGranularity",
            *(byref(size), byref(self._allocation), _MINIMUM),
        )
        self.page_bytes = size.value
        self.most_bytes = -(-total_bytes // self.page_bytes) * self.page_bytes

    def reserve(self, size_bytes: int) -> int:
        """Return the first of so many addresses, behind which there is nothing yet."""
        address = c_uint64()
        driver.call(
            f"reserving {size_bytes} addresses",
            "cuMemAddressReserve",
            *(byref(address), c_size_t(size_bytes), c_size_t(0), c_uint64(0), c_uint64(0)),
        )
        return address.value

    def free(self, address: int, size_bytes: int) -> None:
        """Give back addresses, behind which there is nothing any more."""
        what = "giving addresses back"
        driver.call(what, "cuMemAddressFree", c_uint64(address), c_size_t(size_bytes))

    def put(self, address: int, size_bytes: int, *, beside_bytes: int = 0) -> None:
        """Put memory behind these addresses, where ``beside_bytes`` lie behind others. Raises
        torch.OutOfMemoryError where there is none, and then changes nothing."""
        what, size = f"mapping {size_bytes} bytes of memory", c_size_t(size_bytes)
        at, handle = c_uint64(address), c_uint64()
        if not self._may_hold(size_bytes + beside_bytes):
            raise torch.OutOfMemoryError(
                f"CUDA out of memory while {what}: torch.cuda.set_per_process_memory_fraction"
                " leaves this process less"
            )
        with self._unhindered():
            driver.call(
                what,
                "cuMemCreate",
                *(byref(handle), size, byref(self._allocation), c_uint64(0)),
            )
            try:
                driver.call(what, "cuMemMap", at, size, c_size_t(0), handle, c_uint64(0))
            finally:  # from here on it is there as long as it is mapped
                driver.call(what, "cuMemRelease", handle)
            try:
                driver.call(what, "cuMemSetAccess", at, size, byref(self._access), c_size_t(1))
            except (CodegenError, torch.OutOfMemoryError):
                self.take(address, size_bytes)
                raise

    def take(self, address: int, size_bytes: int) -> None:
        """Take all memory away from behind these addresses, which nobody reads or writes any
        more."""
        what = f"unmapping {size_bytes} bytes of memory"
        driver.call(what, "cuMemUnmap", c_uint64(address), c_size_t(size_bytes))

    @contextmanager
    def _unhindered(self) -> Iterator[None]:
        """Let calls through while this thread captures a CUDA graph: no work of a stream comes of
        them, as of those by which torch allocates, which does the same."""
        mode = c_int(_RELAXED)
        what, name = "telling what a capture allows", "cuThreadExchangeStreamCaptureMode"
        driver.call(what, name, byref(mode))
        try:
            yield
        finally:
            driver.call(what, name, byref(mode))

    # what torch knows of the device

    def tensor(self, memory: MappedBytes) -> Tensor:
        """Return this memory as a tensor, which keeps ``memory`` alive."""
        return torch.as_tensor(memory, device=self.device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def wait(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self._index)

    def empty_cache(self) -> None:
        """Have torch give memory that no tensor has back to the device."""
        torch.cuda.empty_cache()

    def _may_hold(self, size_bytes: int) -> bool:
        """Say whether so much beside torch's memory keeps to the share of the device that
        ``torch.cuda.set_per_process_memory_fraction`` leaves to this process."""
        share = torch.cuda.get_per_process_memory_fraction(self._index)
        wanted = torch.cuda.memory_reserved(self._index) + size_bytes
        return share >= 1 or wanted <= share * self._total_bytes


def is_supported(index: int) -> bool:
    return bool(driver.attribute(index, IS_SUPPORTED))

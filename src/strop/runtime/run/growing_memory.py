"""Memory grows: on a GPU at the addresses where it is, elsewhere at others.

CUDA graphs and bound launches hold addresses. Where a GPU can, memory is a range of as many
addresses as the GPU has bytes, of which the lower part has memory behind it; to grow is to put more
behind the next ones, and whoever is bound to the lower part stays so. Other memory is allocated
anew, and whoever is bound to the old one binds again.

torch does not count memory of such ranges: ``held_bytes`` does. Who wants to know the most that
both came to at one moment is told before there is more or less of it (``watch``).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from strop.runtime.build.virtual_memory import VirtualMemory, is_supported


class GrowingMemory(Protocol):
    """This is memory of a device. ``stays``: its bytes are where they were when there are more."""

    stays: bool
    tensor: Tensor

    def grow(self, size_bytes: int) -> None:
        """Have so many bytes at least. Where they do not stay, their content is lost."""

    def give_back(self) -> None:
        """Have none. Memory that a tensor still lies in stays until that is gone."""

    def rest(self) -> None:
        """Have none until it grows again. Where memory stays, its addresses are kept, and nobody
        may read or write there meanwhile."""


class MovingMemory:
    """This is memory of torch's, which is allocated anew where it is too small."""

    stays = False

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8, device=device)

    def grow(self, size_bytes: int) -> None:
        self.give_back()  # first, so that there is never the old and the new one
        self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device=self.tensor.device)

    def give_back(self) -> None:
        self.tensor = self.tensor.new_empty(0)

    def rest(self) -> None:
        self.give_back()


class StayingMemory:
    """This is memory behind a range of addresses of its own."""

    stays = True

    def __init__(self, space: AddressSpace) -> None:
        self._space = space
        self._range: AddressRange | None = None
        self.tensor = torch.empty(0, dtype=torch.uint8, device=space.device)

    def grow(self, size_bytes: int) -> None:
        if self._range is None:
            self._range = self._space.reserve()
        self._space.grow(self._range, size_bytes)
        self.tensor = self._space.tensor(self._range)

    def give_back(self) -> None:
        self._range, self.tensor = None, self.tensor.new_empty(0)
        self._space.reclaim()

    def rest(self) -> None:
        self.tensor = self.tensor.new_empty(0)
        if self._range is not None:
            self._space.empty(self._range)


@dataclass
class Extent:
    """Say where a range of addresses begins, how many there are, and how many have memory."""

    address: int
    capacity_bytes: int
    size_bytes: int = 0


class AddressRange:
    """This owns a range of addresses; tensors in it keep this alive."""

    def __init__(self, extent: Extent) -> None:
        self.extent = extent

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        extent = self.extent
        return {
            "shape": (extent.size_bytes,),
            "typestr": "|u1",
            "data": (extent.address, False),
            "version": 3,
        }


class AddressSpace:
    """This holds all ranges of one device, and what they come to.

    A range that nobody refers to any more may still be in use by kernels that run. Its memory goes
    back to the device where somebody grows or gives back and can wait for these: Python drops
    objects anywhere, also amid a capture, which cannot.
    """

    def __init__(self, pages: VirtualMemory) -> None:
        self._pages, self.device = pages, pages.device
        self._left: deque[Extent] = deque()  # to be given back
        self._lock = threading.Lock()
        self.held_bytes = 0
        self.before_change: Callable[[], None] | None = None  # of ``held_bytes``

    def reserve(self) -> AddressRange:
        """Return a range in which all memory of the device would have room."""
        size_bytes = self._pages.most_bytes
        made = AddressRange(Extent(self._pages.reserve(size_bytes), size_bytes))
        weakref.finalize(made, self._left.append, made.extent)
        return made

    def tensor(self, given: AddressRange) -> Tensor:
        return self._pages.tensor(given)

    def grow(self, given: AddressRange, size_bytes: int) -> None:
        """Have so many bytes in a range at least. Raises torch.OutOfMemoryError, and the range is
        as it was."""
        self.reclaim()
        with self._lock:
            extent, page = given.extent, self._pages.page_bytes
            more = -(-size_bytes // page) * page - extent.size_bytes
            if more <= 0:
                return
            if extent.size_bytes + more > extent.capacity_bytes:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory: working memory of {size_bytes / 2**30:.2f} GiB is more"
                    f" than all memory of {self.device}"
                )
            self._put(extent.address + extent.size_bytes, more)
            extent.size_bytes += more
            self._change(more)

    def empty(self, given: AddressRange) -> None:
        """Give the memory behind a range back to the device, and keep its addresses."""
        with self._lock:
            extent = given.extent
            if not extent.size_bytes:
                return
            self._pages.wait()
            self._pages.take(extent.address, extent.size_bytes)
            self._change(-extent.size_bytes)
            extent.size_bytes = 0

    def reclaim(self) -> None:
        """Give memory that nobody refers to any more back to the device."""
        if not self._left or self._pages.is_capturing():
            return
        with self._lock:
            count = len(self._left)  # of those that no work begins in from here on
            self._pages.wait()
            for _ in range(count):
                extent = self._left.popleft()
                if extent.size_bytes:
                    self._pages.take(extent.address, extent.size_bytes)
                self._pages.free(extent.address, extent.capacity_bytes)
                self._change(-extent.size_bytes)

    def _change(self, more_bytes: int) -> None:
        if self.before_change is not None:
            self.before_change()
        self.held_bytes += more_bytes

    def _put(self, address: int, size_bytes: int) -> None:
        """Put memory behind addresses. Where there is too little, torch gives back what it keeps
        for later, as when it allocates itself."""
        try:
            self._pages.put(address, size_bytes, beside_bytes=self.held_bytes)
        except torch.OutOfMemoryError:
            if self._pages.is_capturing():  # torch gives nothing back meanwhile
                raise
        else:
            return
        self._pages.empty_cache()
        self._pages.put(address, size_bytes, beside_bytes=self.held_bytes)


_SPACES: dict[torch.device, AddressSpace | None] = {}
_SPACES_LOCK = threading.Lock()


def space_of(device: torch.device) -> AddressSpace | None:
    """Return the ranges of a device; None where memory has to move to grow: on a CPU, and with
    drivers that keep addresses and memory together, as some of virtual machines do."""
    device = with_index(device)
    with _SPACES_LOCK:
        if device not in _SPACES:
            _SPACES[device] = _made(device) if device.type == "cuda" else None
        return _SPACES[device]


def _made(device: torch.device) -> AddressSpace | None:
    torch.cuda.init()
    if not is_supported(device.index):
        return None
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return AddressSpace(VirtualMemory(device, total_bytes))


def with_index(device: torch.device) -> torch.device:
    """Return the device that "cuda" without a number stands for now."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def memory_on(device: torch.device) -> GrowingMemory:
    """Return memory of a device, without any bytes."""
    space = space_of(device)
    return MovingMemory(device) if space is None else StayingMemory(space)


def held_bytes(device: torch.device) -> int:
    """Return how much device memory Strop holds that torch does not count."""
    space = _SPACES.get(with_index(device))
    return space.held_bytes if space else 0


def held_by_device() -> dict[torch.device, int]:
    """Return it of each device where that is anything."""
    spaces = [(device, space) for device, space in _SPACES.items() if space is not None]
    return {device: space.held_bytes for device, space in spaces if space.held_bytes}


def watch(device: torch.device, before_change: Callable[[], None]) -> None:
    """Have this be called before ``held_bytes`` of a device changes, instead of what was before."""
    space = space_of(device)
    if space is not None:
        space.before_change = before_change

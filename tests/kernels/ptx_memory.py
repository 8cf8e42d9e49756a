"""Memory as kernels in PTX see it: shared memory, barriers in it, global memory, tensor maps.

A part of ``ptx_machine``. Shared memory is NaN until something is written. What a bulk load will
write is NaN from its issue on, and nobody may touch it till it has landed; what a product or a bulk
store is reading may not be written until the kernel has waited for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.kernels.ptx_history import History, Slots
from tests.kernels.ptx_instruction import Array
from tests.kernels.ptx_text import PtxError

UNIT = 16  # bytes in which lines of shared memory are mixed, and what is in flight is noted
WINDOW = 24  # bits of an address within one program's shared memory, as a cluster sees it
MOST_SHARED = 227 * 1024
MOST_BYTES = 1 << 20  # that a barrier can expect
_REGION = 40  # bits of an address within one tensor's memory


class Barrier:
    """An mbarrier: a phase ends when no arrival and no bytes are outstanding."""

    def __init__(self, count: int, slots: Slots, changed: Callable[[], None]) -> None:
        if not 0 < count < 1 << 20:
            raise PtxError(f"a barrier of {count} arrivals")
        self.count = self.pending = count
        self.bytes = self.phase = 0
        self.slot = slots.new()
        self.told, self.coming = slots.clock(), slots.clock()  # up to the last phase; in this one
        self.is_fenced = False  # whether other programs and bulk loads may know of it
        self._changed = changed

    def arrive(self, count: int = 1) -> None:
        if count > self.pending:
            raise PtxError(f"{self}: more arrivals than it counts in a phase")
        self.pending -= count
        self._settle()

    def expect(self, count: int) -> None:
        self.bytes += count
        self._settle()

    def _settle(self) -> None:
        if abs(self.bytes) >= MOST_BYTES:
            raise PtxError(f"{self}: too many bytes")
        if not self.pending and not self.bytes:
            self.phase += 1
            self.pending = self.count
            np.maximum(self.told, self.coming, out=self.told)
            self.told[self.slot] = self.phase
        self._changed()

    def is_past(self, parity: int) -> bool:
        return self.phase & 1 != parity

    def __str__(self) -> str:
        return (
            f"barrier in phase {self.phase}, {self.pending} of {self.count} arrivals and "
            f"{self.bytes} bytes outstanding"
        )


class SharedMemory:
    """Of one program; its first ``base`` bytes are not there. ``landing``: bulk loads on their way,
    ``reading``: bulk stores that nobody has waited for, both by units of 16 bytes. ``dirty``: what
    threads have written that bulk copies and products do not see yet, by 2 bytes."""

    def __init__(self, base: int, size: int) -> None:
        self.base, self.end = base, base + size
        room = -(-self.end // 1024) * 1024
        self.bytes = np.full(room, 0xFF, np.uint8)
        self.units = self.bytes.reshape(-1, UNIT)
        self.words = {n: self.bytes.view(f"u{n}") for n in (2, 4, 8)}
        self.landing = np.zeros(room // UNIT, np.uint8)
        self.reading = np.zeros(room // UNIT, np.int16)
        self.dirty = np.zeros(room // 2, np.uint16)
        self.barriers: dict[int, Barrier] = {}
        self.is_barrier = np.zeros(room // 8, np.uint8)
        self.loads = self.readers = 0  # in flight
        self.is_gone = self.was_written = False
        self.has_started = False
        self.history = History(room)

    def check(self, at: Array, size: int) -> None:
        """Addresses of threads' own loads and stores."""
        if self.is_gone:
            raise PtxError("shared memory of a program that has ended")
        if not self.has_started:
            raise PtxError("shared memory of a program that may not have begun")
        if (at & (size - 1)).any():
            raise PtxError(f"address {at[(at & (size - 1)) != 0][0]} is no multiple of {size}")
        if at.min() < self.base or at.max() + size > self.end:
            raise PtxError(
                f"addresses {at.min()}..{at.max()} + {size} leave shared memory, "
                f"{self.base}..{self.end}"
            )
        if self.loads and self.landing[at // UNIT].any():
            raise PtxError("touches what a bulk load is writing")
        if self.is_barrier[at >> 3].any() or (size > 8 and self.is_barrier[(at >> 3) + 1].any()):
            raise PtxError("touches a barrier")

    def load(self, w: Any, at: Array, size: int, count: int, numbers: Array) -> list[Array]:
        """``numbers``: of the lanes whose addresses these are."""
        self.check(at, size * count)
        for n in range(max(size * count // 4, 1)):
            self.history.read(w, (at >> 2) + n, numbers)
        self._note_far(w)
        first = at // size
        return [self.words[size][first + n] for n in range(count)]

    def _note_far(self, w: Any) -> None:
        if w.cta.shared is not self:
            self.history.far[w.slot] = int(w.clock[w.slot])

    def store(
        self, w: Any, at: Array, size: int, values: Sequence[Array], numbers: Array, owners: Array
    ) -> None:
        self.check(at, size * len(values))
        if self.readers and self.reading[at // UNIT].any():
            raise PtxError("writes what a bulk store may still read")
        for n in range(max(size * len(values) // 4, 1)):
            self.history.write(w, (at >> 2) + n, numbers)
        self._note_far(w)
        first = at // size
        for n, value in enumerate(values):
            self.words[size][first + n] = value
        for n in range(size * len(values) // 2):
            self.dirty[(at >> 1) + n] = owners
        self.was_written = True

    def clean(self, at: Array, size: int, owners: Array) -> None:
        for n in range(size // 2):
            place = (at >> 1) + n
            self.dirty[place] = np.where(self.dirty[place] == owners, 0, self.dirty[place])

    def check_units(self, units: Array) -> None:
        """What bulk copies and products touch."""
        if self.is_gone:
            raise PtxError("shared memory of a program that has ended")
        if not self.has_started:
            raise PtxError("shared memory of a program that may not have begun")
        if units.min() * UNIT < self.base or (units.max() + 1) * UNIT > self.end:
            raise PtxError(
                f"bytes {units.min() * UNIT}..{(units.max() + 1) * UNIT} leave shared "
                f"memory, {self.base}..{self.end}"
            )
        if self.was_written and self.dirty.reshape(-1, UNIT // 2)[units].any():
            raise PtxError("no fence.proxy.async behind a thread's write to these bytes")
        if self.is_barrier.reshape(-1, 2)[units].any():
            raise PtxError("touches a barrier")

    def read_units(self, w: Any, units: Array, lane: int | None = None) -> None:
        """A product, or a bulk store of one lane, that begins."""
        self.check_units(units)
        if self.loads and self.landing[units].any():
            raise PtxError("reads what a bulk load is writing")
        self.history.read_units(w, units, lane)

    def begin_store(self, w: Any, units: Array, lane: int) -> None:
        self.read_units(w, units, lane)
        self.reading[units] += 1
        self.readers += 1

    def end_store(self, w: Any, units: Array) -> None:
        self.reading[units] -= 1
        self.readers -= 1
        self.history.note_read(w, units)

    def begin_load(self, w: Any, units: Array) -> None:
        self.check_units(units)
        if self.landing[units].any():
            raise PtxError("two bulk loads to the same bytes")
        if self.readers and self.reading[units].any():
            raise PtxError("loads where a bulk store may still read")
        self.history.write_units(w, units)
        self.landing[units] = 1
        self.units[units] = 0xFF
        self.loads += 1

    def end_load(self, units: Array, data: Array, barrier: Barrier) -> None:
        self.history.note_load(barrier.slot, barrier.phase + 1, units)
        self.landing[units] = 0
        self.units[units] = data
        self.loads -= 1

    def begin_barrier(self, at: int, barrier: Barrier) -> None:
        place = np.array([at])
        if at not in self.barriers:
            self.check(place, 8)
        if (self.readers and self.reading[place // UNIT].any()) or at % 8:
            raise PtxError("a barrier cannot lie here")
        self.barriers[at] = barrier
        self.is_barrier[at >> 3] = 1

    def far_barrier(self, w: Any, at: int) -> Barrier:
        found = self.barrier(at, w.cta.shared is not self)
        self._note_far(w)
        return found

    def barrier(self, at: int, is_far: bool = False) -> Barrier:
        """``is_far``: from another program, or for a bulk load."""
        if self.is_gone:
            raise PtxError("a barrier of a program that has ended")
        if at not in self.barriers:
            raise PtxError(f"no barrier at {at}")
        found = self.barriers[at]
        if is_far and not found.is_fenced:
            raise PtxError("no fence.mbarrier_init behind the barrier's init")
        return found


class Region:
    """The memory of one tensor, or of several that share it. ``writers``: threads, by bytes."""

    def __init__(self, base: int, data: Array) -> None:
        self.base, self.data = base, data
        self.writers = np.zeros(len(data), np.int32)
        self.was_stored = False


class GlobalMemory:
    def __init__(self, allow_rewrites: bool) -> None:
        self.regions: dict[int, Region] = {}
        self.allow_rewrites = allow_rewrites
        self._keys: dict[int, int] = {}

    def pointer(self, tensor: Tensor) -> int:
        """Aligned as its memory on this machine is, to 16 bytes at least; 0 for an empty one."""
        if not tensor.numel():
            return 0
        if tensor.device.type != "cpu":
            raise PtxError(f"a tensor on {tensor.device}")
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._keys:
            key = self._keys[storage.data_ptr()] = len(self._keys) + 1
            raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self.regions[key] = Region(key << _REGION | storage.data_ptr() % 256, raw)
        region = self.regions[self._keys[storage.data_ptr()]]
        return region.base + int(tensor.storage_offset()) * tensor.itemsize

    def region(self, pointer: int) -> Region:
        return self.regions[pointer >> _REGION]

    def _places(self, at: Array, size: int) -> tuple[Region, Array]:
        keys = at >> np.uint64(_REGION)
        key = int(keys[0])
        if key not in self.regions or (keys != keys[0]).any():
            raise PtxError(f"address {int(at[0]):#x} is in no tensor (or lanes are in several)")
        if (at % np.uint64(size)).any():
            raise PtxError(f"an address is no multiple of {size}")
        region = self.regions[key]
        places = at.astype(np.int64) - region.base
        if places.min() < 0 or places.max() + size > len(region.data):
            raise PtxError(
                f"bytes {places.min()}..{places.max() + size} of a tensor's memory of "
                f"{len(region.data)}"
            )
        return region, places[:, None] + np.arange(size)

    def load(self, at: Array, size: int, count: int, threads: Array) -> list[Array]:
        region, places = self._places(at, size * count)
        if region.was_stored and not self.allow_rewrites:
            before = region.writers[places]
            if ((before != 0) & (before != threads[:, None])).any():
                raise PtxError("loads what another thread of this launch has stored")
        found = region.data[places].view(f"u{size}")
        return [found[:, n] for n in range(count)]

    def store(self, at: Array, size: int, values: Sequence[Array], threads: Array) -> None:
        region, places = self._places(at, size * len(values))
        raw = np.stack(values, 1).view(np.uint8)
        self.note(region, places, np.broadcast_to(threads[:, None], places.shape))
        region.data[places] = raw

    def note(self, region: Region, places: Array, threads: Array) -> None:
        """Who stores where; at most one thread does."""
        region.was_stored = True
        before = region.writers[places]
        region.writers[places] = threads
        other = ((before != 0) & (before != threads)) | (region.writers[places] != threads)
        if other.any() and not self.allow_rewrites:
            raise PtxError("two threads store to the same bytes of global memory")


class TensorMap:
    """A tensor whose boxes bulk copies move, lines of 128 bytes mixed in shared memory. The inner
    dim of a box and its coordinates comes last here, first in PTX."""

    def __init__(
        self,
        memory: GlobalMemory,
        tensor: Tensor,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        steps: Sequence[int] = (),
    ) -> None:
        """``steps``: elements of the tensor from one of a box to the next, by dim."""
        width, pointer = tensor.itemsize, memory.pointer(tensor)
        self.apart = tuple(steps) or (1,) * len(box)
        reach = [n * step for n, step in zip(box, self.apart, strict=True)]
        _check_map(pointer, width, sizes, strides, reach)
        self.box, self.sizes, self.memory = tuple(box), tuple(sizes), memory
        self.region, self.width, self.dtype = memory.region(pointer), width, tensor.dtype
        first = pointer - self.region.base
        last = first + width * (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)))
        if last > len(self.region.data):
            raise PtxError("a tensor map of more than the tensor's memory")
        self.first, self.steps = first, tuple(s * width for s in strides)
        self.view: Array = np.ndarray(sizes, f"u{width}", self.region.data, first, self.steps)
        self.count = int(np.prod(box))  # of elements
        at = tuple(4 * step for step in self.steps)
        self.writers: Array = np.ndarray(sizes, np.int32, self.region.writers, 4 * first, at)

    def _overlap(self, corner: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        inner, outer = list[slice](), list[slice]()
        for at, size, box, step in zip(corner, self.sizes, self.box, self.apart, strict=True):
            low, high = max(-(at // step), 0), min(-((at - size) // step), box)
            if low >= high:
                return None
            inner.append(slice(low, high))
            outer.append(slice(at + low * step, at + (high - 1) * step + 1, step))
        return tuple(inner), tuple(outer)

    def load(self, corner: Sequence[int]) -> Array:
        """In units of 16 bytes, not yet mixed; zeros outside of the tensor."""
        found = np.zeros(self.box, f"u{self.width}")
        if both := self._overlap(corner):
            is_new = self.region.was_stored and not self.memory.allow_rewrites
            if is_new and self.writers[both[1]].any():
                raise PtxError("a bulk load of what a thread of this launch has stored")
            found[both[0]] = self.view[both[1]]
        return found.view(np.uint8).reshape(-1, UNIT)

    def store(self, corner: Sequence[int], units: Array, thread: int) -> None:
        if not (both := self._overlap(corner)):
            return
        data = np.ascontiguousarray(units).view(f"u{self.width}").reshape(self.box)[both[0]]
        starts = np.full((1,) * len(self.sizes), self.first)
        for n, (part, step) in enumerate(zip(both[1], self.steps, strict=True)):
            along = [1] * len(self.sizes)
            along[n] = -1
            starts = starts + (np.arange(part.start, part.stop, part.step) * step).reshape(along)
        places = (starts[..., None] + np.arange(self.width)).reshape(-1)
        self.memory.note(self.region, places, np.full(places.shape, thread))
        self.view[both[1]] = data

    def add(self, corner: Sequence[int], units: Array, thread: int) -> None:
        """Each sum is rounded once."""
        there = np.ascontiguousarray(self.load(corner))
        summands = (
            torch.from_numpy(raw.reshape(-1)).view(self.dtype)
            for raw in (there, np.ascontiguousarray(units))
        )
        total = sum(each.double() for each in summands)
        self.store(corner, total.to(self.dtype).view(torch.uint8).numpy().reshape(-1, UNIT), thread)

    def units(self, at: int) -> Array:
        """Where a box at this address lies."""
        if at % 128:
            raise PtxError(f"a box at {at}, no multiple of 128 bytes")
        first = at // UNIT
        units = np.arange(first, first + self.count * self.width // UNIT)
        return mixed(units, self.box[-1] * self.width)


def mixed(units: Array, line: int = 128) -> Array:
    """Numbers of units as lines of 128 bytes are mixed: by the address, bits 4-6 by bits 7-9; of 64
    bytes bits 4 and 5 by 7 and 8, of 32 bit 4 by 7."""
    found: Array = units ^ (units >> 3 & (line // UNIT - 1))
    return found


def _check_map(
    pointer: int, width: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> None:
    if not len(sizes) == len(strides) == len(box) <= 5:
        raise PtxError(f"a box {tuple(box)} of {tuple(sizes)}")
    if not pointer or pointer % 16 or strides[-1] != 1:
        raise PtxError("a tensor map's address is a multiple of 16, and its last dim is dense")
    if any(s * width % 16 or s <= 0 for s in strides[:-1]):
        raise PtxError(f"strides {tuple(strides)} are no multiples of 16 bytes")
    if box[-1] * width not in (16, 32, 64, 128) or not all(0 < n <= 256 for n in box):
        raise PtxError(f"box {tuple(box)}: lines of 16 to 128 bytes are known, and 256 at most")
    if not all(0 < n < 1 << 32 for n in sizes):
        raise PtxError(f"sizes {tuple(sizes)} of a tensor map")

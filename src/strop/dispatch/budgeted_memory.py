"""Weights under a budget lie in memory of a device, where they stay, or in pinned memory of the
host, from where they are copied into one of two slots on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strop.dispatch.module_state import ModuleState
from strop.dispatch.weight_regions import Region, Regions
from strop.runtime.run.pinned_memory import give_back_cached, pinned
from strop.runtime.run.stream_plan import Block
from strop.runtime.run.weight_layout import aligned
from strop.runtime.run.weight_stream import Copy, Lane, StreamedBlock, lane_for
from strop.runtime.run.workspace import rest_on

HOST_PIECE_BYTES = 256 << 20  # that are pinned together, while weights are copied there

Key = tuple[int, ...]  # the ids of a region's weights


class BudgetedMemory:
    """This holds the memory in which the weights of one module lie, and moves them there. The
    device is the one where ``state`` has calls run."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self._host: list[Tensor] = []  # pinned pieces that regions lie in
        self._reserved: dict[Key, Tensor] = {}  # parts of these, for regions that come back
        self._device: list[Tensor] = []  # where that is a CPU too: what stands for its memory
        self._slots: Tensor | None = None
        self.lane: Lane | None = None  # which copies into the slots

    @property
    def place(self) -> torch.device:
        assert self._state.place is not None
        return self._state.place

    @property
    def is_gpu(self) -> bool:
        return self._state.place is not None and self._state.place.type == "cuda"

    @property
    def slots_bytes(self) -> int:
        """Return the memory of the device that both slots take."""
        return self._slots.numel() if self._slots is not None else 0

    @property
    def slot_bytes(self) -> int:
        return self.slots_bytes // 2

    def is_resident(self, region: Region) -> bool:
        """Tell whether a region lies on the device."""
        if region.device.type != "cpu":
            return region.device == self._state.place
        return _holder(self._device, region) is not None

    def resident(self, regions: Regions) -> set[int]:
        """Return the numbers of the regions that lie on the device."""
        return {n for n, region in enumerate(regions.all) if self.is_resident(region)}

    def is_pinned(self, region: Region) -> bool:
        """Tell whether a region lies in pinned memory of ours."""
        return _holder(self._host, region) is not None

    # moving

    def take_home(self, regions: Sequence[Region]) -> None:
        """Take regions to pinned memory of the host, which is what they had there before, or new
        pieces of it, one behind the other, a few at a time: their old memory is free then."""
        some, size = list[Region](), 0
        for region in (*(r for r in regions if not self._has_returned(r)), None):
            if some and (region is None or size + region.size_bytes > HOST_PIECE_BYTES):
                self._take_piece(some)
                some, size = [], 0
            if region is not None:
                some.append(region)
                size += aligned(region.size_bytes)

    def _take_piece(self, regions: Sequence[Region]) -> None:
        sizes = [aligned(region.size_bytes) for region in regions]
        piece, start = pinned(sum(sizes), for_gpu=self.is_gpu), 0
        for region, size in zip(regions, sizes, strict=True):
            region.move(piece[start : start + region.size_bytes])
            start += size
        self._host.append(piece)

    def rest(self, regions: Regions) -> None:
        """Take all regions that lie on the device to the host, where each gets the same memory
        every time: a system pins memory more slowly than a GPU copies into it."""
        going = [region for region in regions.all if self.is_resident(region)]
        keys = {*map(_key, regions.all)}
        self._reserved = {key: own for key, own in self._reserved.items() if key in keys}
        self.take_home(going)
        self._reserved |= {_key(region): self._bytes(region) for region in going}

    def _has_returned(self, region: Region) -> bool:
        """Take a region to the memory of the host that is kept for it, if there is any."""
        own = self._reserved.get(_key(region))
        if own is None or own.numel() != region.size_bytes:
            return False
        region.move(own)
        return True

    def bring(self, region: Region) -> None:
        """Take a region to the device, where it stays."""
        memory = device_memory(region.size_bytes, self.place)
        region.move(memory)
        if memory.device.type == "cpu":  # elsewhere the device tells
            self._device.append(memory)

    def hold_slots(self, slot_bytes: int) -> None:
        """Have two slots of this size, or none."""
        if self._slots is not None and self._slots.numel() == 2 * slot_bytes:
            return
        self.drop_slots()
        if slot_bytes:
            self._slots = device_memory(2 * slot_bytes, self.place)
            self.lane = lane_for(self._slots)

    def drop_slots(self) -> None:
        self._slots = self.lane = None

    def let_go(self, regions: Regions) -> None:
        """Keep no memory in which nothing lies any more."""
        self._device = [memory for memory in self._device if _is_used(memory, regions)]
        kept = {own.untyped_storage().data_ptr() for own in self._reserved.values()}
        self._host = [
            memory
            for memory in self._host
            if memory.untyped_storage().data_ptr() in kept or _is_used(memory, regions)
        ]

    def give_to_others(self, *, of_device: bool, of_host: bool = False) -> None:
        """Have memory that weights have left be free for everybody, and not kept for torch."""
        if of_device and self.is_gpu:
            torch.cuda.empty_cache()
        if of_host and self.is_gpu:
            give_back_cached()  # libraries may have pinned them, too

    def make_room(self) -> None:
        """Have working memory rest, in which other models have run: it would lie beside weights
        that are about to come."""
        rest_on(self.place)

    def wait(self) -> None:
        """Wait until no stream reads weights any more, which are about to leave the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.place)

    def forget(self) -> None:
        """Hold nothing, and leave weights where they are."""
        self.drop_slots()
        self._host, self._device, self._reserved = [], [], {}

    # reading

    def part_of_slot(self, block: Block, offset: int, region: Region) -> Tensor:
        """Return the bytes where a region comes to lie with its block."""
        assert self._slots is not None
        start = block.slot * self.slot_bytes + offset
        return self._slots[start : start + region.size_bytes]

    def streamed(self, regions: Regions, block: Block) -> StreamedBlock:
        """Return what is copied for a block, and from where."""
        copies = list[Copy]()
        for number, offset in block.offsets.items():
            region = regions.all[number]
            place = self.part_of_slot(block, offset, region)
            copies.append((place, region.bytes() if region.is_fixed else self._bytes(region)))
        return StreamedBlock(block.slot, block.first, block.last, _joined(copies))

    def _bytes(self, region: Region) -> Tensor:
        """Return a region in its pinned piece."""
        piece = _holder(self._host, region)
        assert piece is not None
        start = region.start - piece.data_ptr()
        return piece[start : start + region.size_bytes]


def device_memory(size_bytes: int, device: torch.device) -> Tensor:
    """Return memory of a device for weights. Tests count it."""
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def _key(region: Region) -> Key:
    return tuple(map(id, region.weights))


def _joined(copies: Sequence[Copy]) -> tuple[Copy, ...]:
    """Return the same copies with those as one that lie behind each other on both sides."""
    found = list[Copy]()
    for copy in copies:
        if found and (both := _one_piece(found[-1], copy)) is not None:
            found[-1] = both
        else:
            found.append(copy)
    return tuple(found)


def _one_piece(first: Copy, second: Copy) -> Copy | None:
    gaps = [b.data_ptr() - a.data_ptr() for a, b in zip(first, second, strict=True)]
    is_one = all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        for a, b in zip(first, second, strict=True)
    )
    if not is_one or gaps[0] != gaps[1] or gaps[0] != aligned(first[0].numel()):
        return None
    size = gaps[0] + second[0].numel()
    into, source = (t.as_strided((size,), (1,)) for t in first)
    return into, source


def _holder(pieces: Sequence[Tensor], region: Region) -> Tensor | None:
    return next((piece for piece in pieces if _lies_in(region, piece)), None)


def _lies_in(region: Region, memory: Tensor) -> bool:
    start = memory.data_ptr()
    return region.device == memory.device and start <= region.start < start + memory.numel()


def _is_used(memory: Tensor, regions: Regions) -> bool:
    return any(_lies_in(region, memory) for region in regions.all)

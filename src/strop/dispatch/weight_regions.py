"""Regions are the pieces of memory in which the weights of a module lie: one weight, or several
that are parts of one merged weight or tied by their data. A region is moved as a whole."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from strop.dispatch.moved_weights import lie_in
from strop.dispatch.placed_weights import note_wholes, wholes_among
from strop.ir.program import Program
from strop.runtime.loop.hoisting import read_by
from strop.runtime.run.run_order import RunOrder
from strop.runtime.run.stream_plan import Use
from strop.runtime.run.weight_layout import PlacedTensor, extent_bytes


@dataclass
class Region:
    """These tensors lie in one piece of memory, from ``start`` to before ``end``: ``weights``, and
    ``wholes`` that weights are parts of. One that ``is_fixed`` cannot be moved, as others refer to
    it."""

    device: torch.device
    start: int
    end: int
    weights: list[Tensor] = field(default_factory=list)
    wholes: list[Tensor] = field(default_factory=list)
    is_fixed: bool = False

    @property
    def size_bytes(self) -> int:
        return self.end - self.start

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.wholes, *self.weights]

    def bytes(self) -> Tensor:
        """Return all of its memory, of which one tensor has to hold all."""
        whole = max(self.tensors, key=lambda t: _end(t) - t.data_ptr())
        first = whole.storage_offset() * whole.itemsize - (whole.data_ptr() - self.start)
        flat = torch.empty(0, dtype=torch.uint8, device=self.device)
        return flat.set_(whole.untyped_storage(), first, (self.size_bytes,), (1,))

    def move(self, place: Tensor) -> None:
        """Have all of it lie in other memory, which is bytes. Weights stay the same objects."""
        looks, done = [self.placed(tensor) for tensor in self.tensors], self.start
        new = [look.at(place) for look in looks]
        by_start = sorted(zip(self.tensors, new, strict=True), key=lambda pair: _span(pair[0]))
        for tensor, own in by_start:
            if _end(tensor) > done:  # else a larger one has it
                own.copy_(tensor)
                done = _end(tensor)
        count = len(self.wholes)
        for tensor, own in zip(self.weights, new[count:], strict=True):
            lie_in(tensor, own)
        self.wholes = new[:count]
        self.device, self.start = place.device, place.data_ptr()
        self.end = self.start + place.numel()
        note_wholes(self.wholes, self.weights)

    def placed(self, tensor: Tensor) -> PlacedTensor:
        """Say where a tensor lies in it."""
        start = tensor.data_ptr() - self.start
        return PlacedTensor(start, tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Regions:
    """These are all regions of a module, by number, which are found by address."""

    def __init__(self, weights: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """``others`` are what stands for state beside weights: pieces of them, and what cannot be
        moved."""
        wholes = wholes_among(weights)
        self.all = _grouped(weights, wholes)
        self._known = self._by_address()
        apart = [t for t in others if t.numel() and self.number_of(t) is None]
        self.all += [replace(region, is_fixed=True) for region in _grouped(apart, ())]
        self._known = self._by_address()

    @property
    def sizes(self) -> dict[int, int]:
        return {number: region.size_bytes for number, region in enumerate(self.all)}

    def number_of(self, tensor: Tensor) -> int | None:
        """Return in which region a tensor lies, or None for one without elements."""
        places = self._known.get(tensor.device, []) if tensor.numel() else []
        at = bisect_right(places, (tensor.data_ptr(), len(self.all))) - 1
        if at < 0 or tensor.data_ptr() >= self.all[places[at][1]].end:
            return None
        return places[at][1]

    def _by_address(self) -> Mapping[torch.device, list[tuple[int, int]]]:
        found: dict[torch.device, list[tuple[int, int]]] = {}
        for number, region in enumerate(self.all):
            found.setdefault(region.device, []).append((region.start, number))
        return {device: sorted(places) for device, places in found.items()}


def _grouped(weights: Sequence[Tensor], wholes: Sequence[Tensor]) -> list[Region]:
    """Return the regions of tensors, by device and address."""
    found = list[Region]()
    pairs = [*((t, True) for t in wholes), *((t, False) for t in weights)]
    held = (pair for pair in pairs if pair[0].numel())
    for tensor, is_whole in sorted(held, key=lambda pair: (str(pair[0].device), _span(pair[0]))):
        start, end = tensor.data_ptr(), _end(tensor)
        if not found or found[-1].device != tensor.device or start >= found[-1].end:
            found.append(Region(tensor.device, start, end))
        (found[-1].wholes if is_whole else found[-1].weights).append(tensor)
        found[-1].end = max(found[-1].end, end)
    return found


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), -_end(tensor)


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + extent_bytes(tensor.shape, tensor.stride(), tensor.dtype)


def uses_of(program: Program, order: RunOrder, numbers: Mapping[int, int]) -> list[Use]:
    """Return what each step of a run reads of regions. ``numbers``: of the region of each state
    argument that lies in one."""
    found = []
    for position in (p for part in order.parts for p in part):
        read = state_in(program, read_by(order.steps[position]))
        regions = tuple(dict.fromkeys(numbers[n] for n in read if n in numbers))
        if regions:
            found.append(Use(position, regions))
    return found


def state_in(program: Program, buffers: Iterable[int]) -> list[int]:
    """Return the state arguments among buffers."""
    held = [program.buffers[number] for number in buffers]
    indices = [b.index for b in held if b.kind == "input"]
    return [index for index in indices if program.inputs[index].is_state]


def returned_state(program: Program) -> list[int]:
    """Return the state arguments that lie in what a program gives back."""
    refs = [item.tensor for item in program.returned if item.tensor is not None]
    return state_in(program, [ref.buffer for ref in refs])

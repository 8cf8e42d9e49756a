"""Weights are copied from the host into two slots of a device, ahead of the steps that read them.

A *lane* copies beside what is computed. On a GPU it is a stream of its own: it waits by events for
the last step that reads what lies in a slot, and the first step that reads a block waits for its
copy. No step is launched before its weights are on their way, and a call ends when all copies have
been read from the host, where weights may be written to from then on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from strop.errors import OptionError

Copy = tuple[Tensor, Tensor]  # bytes of a slot, and those of the host that come there


class Lane(Protocol):
    """This copies blocks of weights into the slots of one module."""

    def begin(self) -> None:
        """Begin a run. Raises OptionError where there can be none."""

    def copy(self, slot: int, copies: Sequence[Copy]) -> None:
        """Have these copies made when the slot has been given up."""

    def wait(self, slot: int) -> None:
        """Let no step that is launched from here on begin before the slot has its block."""

    def give_up(self, slot: int) -> None:
        """Say that no step which is launched from here on reads what the slot has."""

    def end(self) -> None:
        """End a run, also one that was broken off: nothing is read from the host any more."""


class StreamLane:
    """This copies on a stream of a GPU."""

    def __init__(self, slots: Tensor) -> None:
        self._slots, self._device = slots, slots.device
        self._stream = torch.cuda.Stream(self._device)
        self._copied, self._free = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))

    def begin(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise OptionError(
                "weights_budget_bytes: a call cannot be captured in a CUDA graph, since it reads"
                " weights of the host at each replay: capture without a budget"
            )
        for slot in range(2):
            self.give_up(slot)  # whatever stream was here before

    def copy(self, slot: int, copies: Sequence[Copy]) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free[slot])
            for place, source in copies:
                place.copy_(source, non_blocking=True)
            self._copied[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied[slot])

    def give_up(self, slot: int) -> None:
        self._free[slot].record(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        current = torch.cuda.current_stream(self._device)
        for slot in range(2):
            current.wait_event(self._copied[slot])  # the slots are torch's again behind this run
        self._slots.record_stream(current)
        self._stream.synchronize()


class PlainLane:
    """This copies at once, where there is nothing beside which to copy: on a CPU."""

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots

    def begin(self) -> None:
        pass

    def copy(self, slot: int, copies: Sequence[Copy]) -> None:
        for place, source in copies:
            place.copy_(source)

    def wait(self, slot: int) -> None:
        pass

    def give_up(self, slot: int) -> None:
        pass

    def end(self) -> None:
        pass


def lane_for(slots: Tensor) -> Lane:
    """Return what copies into these slots, two halves of one piece of bytes."""
    return StreamLane(slots) if slots.is_cuda else PlainLane(slots)


@dataclass(frozen=True, slots=True)
class StreamedBlock:
    """This block lies in ``slot`` from before the step at ``first`` to behind that at ``last``."""

    slot: int
    first: int
    last: int
    copies: tuple[Copy, ...]


class Streaming:
    """This has the weights of one program at one shape in place when its steps want them."""

    def __init__(self, lane: Lane, blocks: Sequence[StreamedBlock]) -> None:
        self._lane, self._blocks = lane, tuple(blocks)
        self._begins = {block.first: number for number, block in enumerate(blocks)}
        self._ends = {block.last: number for number, block in enumerate(blocks)}

    @property
    def fences(self) -> frozenset[int]:
        """Return the positions of steps that may not be launched early: weights that they read, or
        steps that read what lay in their slot, may not be done before."""
        return frozenset(self._begins)

    def walk(self, positions: Sequence[int], launch: Callable[[int], None]) -> None:
        """Launch the steps at these positions, each with its weights in place."""
        lane = self._lane
        walked = frozenset(positions)
        todo = [block for block in self._blocks if block.first in walked]
        lane.begin()
        try:
            for block in todo[:2]:
                lane.copy(block.slot, block.copies)
            following = iter(todo[2:])
            for position in positions:
                if (number := self._begins.get(position)) is not None:
                    lane.wait(self._blocks[number].slot)
                launch(position)
                if (number := self._ends.get(position)) is not None:
                    lane.give_up(self._blocks[number].slot)
                    for block in itertools.islice(following, 1):
                        lane.copy(block.slot, block.copies)
        finally:
            lane.end()

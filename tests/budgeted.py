"""Memory and copies of a CPU stand for those of a GPU here, where weights have a budget. Copies
come as late as they may or at once, and junk is read by whoever reads a slot at another time."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from strop.dispatch import budgeted_memory, weights_budget
from strop.runtime.run.weight_stream import Copy

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # fp32 sums of sixteen in another order
JUNK = 0xFF  # NaN, read as floats


class LateLane:
    """This copies as late as it may, and a slot that is given up holds junk at once."""

    def __init__(self, slots: Tensor) -> None:
        self._halves, self._due = slots.view(2, -1), dict[int, Sequence[Copy]]()

    def begin(self) -> None:
        self._due.clear()

    def copy(self, slot: int, copies: Sequence[Copy]) -> None:
        assert slot not in self._due, "nobody has read what was to come there before"
        self._due[slot] = copies

    def wait(self, slot: int) -> None:
        for place, source in self._due.pop(slot):
            place.copy_(source)

    def give_up(self, slot: int) -> None:
        self._halves[slot].fill_(JUNK)

    def end(self) -> None:
        self._halves.fill_(JUNK)


class HastyLane(LateLane):
    """This copies at once."""

    def copy(self, slot: int, copies: Sequence[Copy]) -> None:
        super().copy(slot, copies)
        for place, source in copies:
            place.copy_(source)

    def wait(self, slot: int) -> None:
        del self._due[slot]


class CountedMemory:
    """It counts the memory that weights have on what stands for a GPU."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def __call__(self, size_bytes: int, device: torch.device) -> Tensor:
        pages = mmap.mmap(-1, size_bytes)
        self.now += size_bytes
        self.most = max(self.most, self.now)
        weakref.finalize(pages, self._give_back, size_bytes)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def _give_back(self, size_bytes: int) -> None:
        self.now -= size_bytes


LANES = {"late": LateLane, "hasty": HastyLane}


def lend_memory(monkeypatch: pytest.MonkeyPatch, lane: str = "late") -> CountedMemory:
    """Have weights go to other memory of the CPU, as to a GPU's."""
    counted = CountedMemory()
    monkeypatch.setattr(weights_budget, "DEVICES", ("cpu",))
    monkeypatch.setattr(budgeted_memory, "lane_for", LANES[lane])
    monkeypatch.setattr(budgeted_memory, "device_memory", counted)
    return counted


def wrong_in_threads(
    net: Callable[[Tensor], Tensor], given: Sequence[Tensor], expected: Sequence[Tensor], calls: int
) -> list[int]:
    """Call a model from a thread for each argument, all at once; return the numbers of those whose
    result was another one, once for each such call."""
    wrong, begin = list[int](), threading.Barrier(len(given))

    def work(number: int) -> None:
        begin.wait()
        for _ in range(calls):
            if not torch.allclose(net(given[number]), expected[number], **CLOSE):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong

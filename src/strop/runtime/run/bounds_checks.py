"""Check lookups outside of a tensor: kernels leave a mark, the host raises.

A kernel never reads outside of a tensor. One that was asked to reads element 0 and sets its mark,
which lies in memory of the host: a run on a CPU looks at the marks when it ends, a run on a GPU
when the next one begins, so that nobody has to wait for the device. A mark that no next run finds
is shown by ``explain``, and logged when the program or the process ends.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import weakref

import torch

from strop.errors import OutOfRangeError
from strop.ir.program import KernelStep, Program

log = logging.getLogger("strop")
_APART = 2  # numbers from one mark to the next: kernels take every pointer for 16-byte aligned


class BoundsChecks:
    """The marks of one bound program."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self._is_late = device.type == "cuda"
        self._marks: ctypes.Array[ctypes.c_int64] | tuple[()] = ()
        self._steps = {
            position: step
            for position, step in enumerate(program.steps)
            if isinstance(step, KernelStep)
            and any(s.faults for s in program.sources[step.kernel].scratch)
        }
        self._place = {position: _APART * n for n, position in enumerate(self._steps)}
        count = _APART * len(self._place)
        self._memory = torch.zeros(count, dtype=torch.int64)
        if count and self._is_late:
            self._memory = self._memory.pin_memory()
        pointer = self._memory.data_ptr()
        self._marks = (ctypes.c_int64 * count).from_address(pointer) if count else ()
        if count and self._is_late:
            _LATE.add(self)

    def __bool__(self) -> bool:
        """Tell whether any kernel could leave a mark."""
        return bool(self._steps)

    def pointer(self, position: int) -> int:
        """Return where the kernel of this step leaves its mark."""
        return self._memory.data_ptr() + self._memory.itemsize * self._place[position]

    def check(self) -> None:
        """Raises OutOfRangeError for the first mark, and takes all away."""
        if any(self._marks):
            text = self.text()
            self.clear()
            raise OutOfRangeError(text)

    def clear(self) -> None:
        """Take away all marks. On a GPU, nothing may be at work that could leave one."""
        self._memory.zero_()

    def __del__(self) -> None:
        if self._is_late and any(self._marks):  # no next run will come
            log.error("%s", self.text())

    def text(self) -> str:
        """Return what the first mark says, or nothing."""
        marked = next((p for p, place in self._place.items() if self._marks[place]), None)
        if marked is None:
            return ""
        names = self._steps[marked].lookups or (self._steps[marked].origin,)
        when = " of an earlier call, whose results are wrong," if self._is_late else ""
        return (
            f"index out of range: an index{when} lies outside of the tensor that it looks into,"
            f" in {' or '.join(name or 'the module itself' for name in names)}"
        )


_LATE: weakref.WeakSet[BoundsChecks] = weakref.WeakSet()


def unreported() -> list[str]:
    """Marks of programs on GPUs that no later call has raised. Waits for the devices."""
    if not _LATE:
        return []
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
    return [text for text in (faults.text() for faults in list(_LATE)) if text]


def _report_last() -> None:
    for text in unreported():
        log.error("%s", text)


atexit.register(_report_last)

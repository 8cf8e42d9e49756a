"""Copy a flat piece of the host's memory to a GPU in chunks, and take sums of each chunk while the
next one is on its way.

Memory is put behind addresses chunk by chunk too, so that the bus is busy while the driver works.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from strop.runtime.run.growing_memory import GrowingMemory

ROW_BYTES = 8 * 4096  # of the matrix of whole numbers that sums are taken of
CHUNK_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class FlatSums:
    """Sums over the columns and the rows of a matrix of whole numbers, which is what bytes are read
    as. Whoever changes one number changes one of each."""

    columns: Tensor
    rows: Tensor

    @staticmethod
    def of(flat: Tensor) -> FlatSums:
        numbers = _numbers(flat)
        return FlatSums(numbers.sum(0), numbers.sum(1))

    def equal(self, other: FlatSums) -> bool:
        return torch.equal(self.columns, other.columns) and torch.equal(self.rows, other.rows)


def _numbers(flat: Tensor) -> Tensor:
    return flat.view(torch.int64).view(-1, ROW_BYTES // 8)


@dataclass
class FlatCopy:
    """Copies ``host``, some rows of ``ROW_BYTES``, to memory of a device, from its start on."""

    host: Tensor
    memory: GrowingMemory
    copied_bytes: int = 0
    _sums: list[FlatSums] = field(default_factory=list)

    def go_on(self, end_bytes: int) -> None:
        """Queue copies of whole chunks up to ``end_bytes``, which wait for nothing that runs. Only
        memory that stays can take a part."""
        size = self.host.numel()
        while self.copied_bytes < size:
            end = min(self.copied_bytes + CHUNK_BYTES, size)
            if end > end_bytes:
                break
            self._copy(end)

    def finish(self) -> tuple[Tensor, FlatSums]:
        """Copy what is left; return all of it on the device, and its sums as it came. What is
        launched from here on waits for the copies."""
        device = self.memory.tensor.device
        if not self.memory.stays:
            self.memory.grow(self.host.numel())
            for stream in _streams(device):
                stream.wait_stream(torch.cuda.current_stream(device))
        self.go_on(self.host.numel())
        for stream in _streams(device):
            torch.cuda.current_stream(device).wait_stream(stream)
        columns = torch.stack([part.columns for part in self._sums]).sum(0)
        sums = FlatSums(columns, torch.cat([part.rows for part in self._sums]))
        return self.memory.tensor[: self.host.numel()], sums

    def _copy(self, end: int) -> None:
        if self.memory.stays:
            self.memory.grow(end)
        chunk = self.memory.tensor[self.copied_bytes : end]
        with contextlib.ExitStack() as stack:
            streams = _streams(chunk.device)
            if streams:
                stack.enter_context(torch.cuda.stream(streams[0]))
            chunk.copy_(self.host[self.copied_bytes : end], non_blocking=True)
            if streams:
                streams[1].wait_stream(streams[0])
                stack.enter_context(torch.cuda.stream(streams[1]))
            self._sums.append(FlatSums.of(chunk))
        self.copied_bytes = end


@lru_cache(maxsize=8)
def _streams(device: torch.device) -> tuple[Any, ...]:
    """Return a stream for copies and one for sums; none where there are no streams."""
    if device.type != "cuda":
        return ()
    return torch.cuda.Stream(device), torch.cuda.Stream(device)

"""Allocate scratch that is zero at the first launch, many pieces from one tensor.

Counters of kernels take a few bytes each, and are zero again when a kernel has run. Where a program
is linked while somebody captures a CUDA graph, each allocation of zeros would become a launch of
every replay, 1 us of a small model's 60. So zeros are set aside for that beforehand.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

CHUNK = 1 << 14  # bytes that are allocated at once
ALIGNED = 64  # bytes, as what torch allocates is at least
SET_ASIDE = 1 << 18  # bytes for captures, of each device


class SetAside:
    """Zeros for programs that are linked amid a capture. What is handed out stays for good: nobody
    says when the graph of somebody else is gone."""

    def __init__(self) -> None:
        self._memory: dict[torch.device, Tensor] = {}
        self._kept: list[Tensor] = []
        self._lock = threading.Lock()

    def prepare(self, device: torch.device) -> None:
        """Have zeros for a capture to come, and wait until they are there."""
        with self._lock:
            left = self._memory.get(device)
            if left is not None and left.numel() >= SET_ASIDE // 2:
                return
            made = torch.zeros(SET_ASIDE, dtype=torch.uint8, device=device)
            torch.cuda.current_stream(device).synchronize()
            self._memory[device] = made
            self._kept.append(made)

    def take(self, size: int, device: torch.device) -> Tensor | None:
        """Return so many bytes that are zero, or None if there are not as many left."""
        with self._lock:
            left = self._memory.get(device)
            if left is None or left.numel() < size:
                return None
            self._memory[device] = left[size:]
            return left[:size]


set_aside = SetAside()


class ZeroedScratch:
    """Hands out zeros of one device. What does not fit into a chunk gets a tensor of its own."""

    def __init__(self) -> None:
        self._chunk: Tensor | None = None
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return ``numel`` zeros that nobody else has."""
        size = -(-numel * dtype.itemsize // ALIGNED) * ALIGNED
        if device.type == "cuda":
            if not torch.cuda.is_current_stream_capturing():
                set_aside.prepare(device)
            elif (found := set_aside.take(size, device)) is not None:
                return found[: numel * dtype.itemsize].view(dtype)
        if size > CHUNK // 4:
            return torch.zeros(numel, dtype=dtype, device=device)
        if self._chunk is None or self._used + size > CHUNK or self._chunk.device != device:
            self._chunk, self._used = torch.zeros(CHUNK, dtype=torch.uint8, device=device), 0
        begin, self._used = self._used, self._used + size
        piece: Tensor = self._chunk[begin : begin + numel * dtype.itemsize].view(dtype)
        return piece

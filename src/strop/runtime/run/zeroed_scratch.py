"""Allocate scratch that is zero at the first launch, many pieces from one tensor.

Counters of kernels take a few bytes each. Where a program is linked while somebody captures a CUDA
graph, each allocation of zeros becomes a launch of every replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 14  # bytes that are allocated at once
ALIGNED = 64  # bytes, as what torch allocates is at least


class ZeroedScratch:
    """Hands out zeros of one device. What does not fit into a chunk gets a tensor of its own."""

    def __init__(self) -> None:
        self._chunk: Tensor | None = None
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return ``numel`` zeros that nobody else has."""
        size = -(-numel * dtype.itemsize // ALIGNED) * ALIGNED
        if size > CHUNK // 4:
            return torch.zeros(numel, dtype=dtype, device=device)
        if self._chunk is None or self._used + size > CHUNK or self._chunk.device != device:
            self._chunk, self._used = torch.zeros(CHUNK, dtype=torch.uint8, device=device), 0
        begin, self._used = self._used, self._used + size
        piece: Tensor = self._chunk[begin : begin + numel * dtype.itemsize].view(dtype)
        return piece

"""Copy tensors into memory of the host that is kept for the next time.

A training that goes on changes its weights, so what is to be saved is copied first, by a thread and
on a stream of its own: forward and backward passes only read weights, and go on meanwhile. What is
about to change them waits for the copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.errors import TrainingError

_CHUNK_BYTES = 256 << 20  # a power of two: torch rounds pinned memory up to one
_ALIGNED_BYTES = 64

Tensors = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class HostCopy:
    """Hold copies of tensors, by group and name, which are there after ``wait``."""

    tensors: Tensors
    _copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until the GPU has copied them."""
        if self._copied is not None:
            self._copied.synchronize()

    def hold_changes(self) -> None:
        """Let the GPU do nothing of what is queued from now on before it has copied them."""
        if self._copied is not None:
            self._copied.wait()


class HostCopies:
    """Make copies, each in the memory of the one before. ``purpose`` and ``instead`` are for the
    error of a host with too little memory."""

    def __init__(
        self,
        purpose: str = "a copy of what a checkpoint keeps",
        instead: str = "use --no_background_checkpoints",
    ) -> None:
        self._purpose, self._instead = purpose, instead
        self._looks: object = None
        self._places: dict[str, dict[str, Tensor]] = {}

    def reserve(self, tensors: Tensors) -> None:
        """Make memory for such tensors, if it is not there. Raises TrainingError where the host has
        too little."""
        looks = {
            group: [(name, t.shape, t.dtype, t.is_cuda) for name, t in named.items()]
            for group, named in tensors.items()
        }
        if looks == self._looks:
            return
        self._looks, self._places = None, {}  # the old memory goes before the new one comes
        try:
            self._places = _places(tensors)
        except (RuntimeError, MemoryError) as error:
            raise TrainingError(
                f"the host has no memory for {self._purpose} ({error}); {self._instead}"
            ) from error
        self._looks = looks

    @torch.no_grad()
    def take(self, tensors: Tensors, since: torch.cuda.Event | None) -> HostCopy:
        """Copy tensors as they are at ``since``, or now on a CPU. The copy before must not be
        in use any more."""
        self.reserve(tensors)
        pairs = [
            (self._places[group][name], tensor)
            for group, named in tensors.items()
            for name, tensor in named.items()
        ]
        if since is None:
            for into, tensor in pairs:
                into.copy_(tensor)
            return HostCopy(self._places)
        (device,) = {tensor.device for _, tensor in pairs if tensor.is_cuda}
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            since.wait()
            for into, tensor in pairs:
                into.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return HostCopy(self._places, copied)


def mark(tensors: Tensors) -> torch.cuda.Event | None:
    """Return the moment on the GPU when all that is queued now is done; None on a CPU."""
    if not any(t.is_cuda for named in tensors.values() for t in named.values()):
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class _Memory:
    """Hand out memory of the host in pieces of large chunks."""

    def __init__(self, pins: bool) -> None:
        self._pins = pins
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def piece(self, tensor: Tensor) -> Tensor:
        """Return contiguous memory for a tensor, which the system has given already."""
        size = tensor.numel() * tensor.element_size()
        if self._used + size > len(self._chunk):
            length = max(size, _CHUNK_BYTES) if self._pins else size
            self._chunk = torch.zeros(length, dtype=torch.uint8, pin_memory=self._pins)
            self._used = 0
        start, self._used = self._used, -(-(self._used + size) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return self._chunk[start : start + size].view(tensor.dtype).view(tensor.shape)


def _places(tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    pinned, plain = _Memory(pins=True), _Memory(pins=False)
    return {
        group: {name: (pinned if t.is_cuda else plain).piece(t) for name, t in named.items()}
        for group, named in tensors.items()
    }

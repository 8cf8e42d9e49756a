"""Copy tensors into memory of the host that is kept for the next time.

A training that goes on changes its weights, so what is to be saved is copied first. From a GPU the
copies are queued behind the work that makes the weights, and the host does not wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK_BYTES = 256 << 20  # a power of two: torch rounds pinned memory up to one
_ALIGNED_BYTES = 64

Tensors = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Snapshot:
    """Hold copies of tensors, by group and name, which are there after ``wait``."""

    tensors: Tensors
    _copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until the GPU has copied them."""
        if self._copied is not None:
            self._copied.synchronize()


class Snapshots:
    """Take snapshots, each in the memory of the one before."""

    def __init__(self) -> None:
        self._looks: object = None
        self._places: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def take(self, tensors: Tensors) -> Snapshot:
        """Copy tensors as they are now. The snapshot before must not be in use any more."""
        looks = {
            group: [(name, t.shape, t.dtype, t.is_cuda) for name, t in named.items()]
            for group, named in tensors.items()
        }
        if looks != self._looks:
            self._looks, self._places = looks, {}  # the old memory goes before the new one comes
            self._places = _places(tensors)
        devices = set()
        for group, named in tensors.items():
            for name, tensor in named.items():
                self._places[group][name].copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    devices.add(tensor.device)
        if not devices:
            return Snapshot(self._places)
        (device,) = devices
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(device))
        return Snapshot(self._places, copied)


class _Memory:
    """Hand out memory of the host in pieces of large chunks."""

    def __init__(self, pins: bool) -> None:
        self._pins = pins
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def piece(self, tensor: Tensor) -> Tensor:
        """Return contiguous memory for a tensor."""
        size = tensor.numel() * tensor.element_size()
        if self._used + size > len(self._chunk):
            length = max(size, _CHUNK_BYTES) if self._pins else size
            self._chunk = torch.empty(length, dtype=torch.uint8, pin_memory=self._pins)
            self._used = 0
        start, self._used = self._used, -(-(self._used + size) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return self._chunk[start : start + size].view(tensor.dtype).view(tensor.shape)


def _places(tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    pinned, plain = _Memory(pins=True), _Memory(pins=False)
    return {
        group: {name: (pinned if t.is_cuda else plain).piece(t) for name, t in named.items()}
        for group, named in tensors.items()
    }

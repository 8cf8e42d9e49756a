"""A stream has working memory, which its programs take turns in."""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from strop.runtime.run.growing_memory import MovingMemory, memory_on, with_index

# A program on a GPU that needs more works for so long that finding memory for each run costs
# nothing, while others may want that memory: a VAE that encodes 48 pictures needs 12.9 GB, which
# the training step behind it needs, too.
KEPT_BYTES = 2 << 30


class Tenant(Protocol):
    """The values of a tenant lie in a workspace's memory."""

    def let_go(self) -> None:
        """Forget the memory; find it anew at the next run."""


class Workspace:
    """This is the working memory of one stream. It grows, where it is if it can
    (``growing_memory.py``); else whoever is bound to the old memory binds again. Between runs it
    may ``rest``."""

    def __init__(self, device: torch.device, *, grows: bool = True) -> None:
        """Have torch allocate the memory unless it ``grows``: one program at one shape never needs
        more."""
        self.device = device
        self._bytes = memory_on(device) if grows else MovingMemory(device)
        # programs of several modules share this memory; a capture runs some in its own turn
        self.lock = threading.RLock()
        self._tenants: WeakSet[Tenant] = WeakSet()
        self._is_lent = False
        if grows:
            _GROWING.add(self)

    @property
    def memory(self) -> Tensor:
        return self._bytes.tensor

    def reserve(self, size_bytes: int, tenant: Tenant) -> Tensor:
        """Return memory of this size at least, which ``tenant`` has until it is told to let go."""
        if not size_bytes:  # nothing of it lies there
            return self.memory
        if self.memory.numel() < size_bytes:
            if not self._bytes.stays:
                self._empty()
            self._bytes.grow(size_bytes)
        self._tenants.add(tenant)
        return self.memory

    def is_at(self, memory: Tensor, size_bytes: int) -> bool:
        """Tell whether so many bytes of this memory, which ``reserve`` has returned, are still the
        workspace's: it may have grown behind its end. If they rest, they are there again."""
        if self.memory.numel() < size_bytes and self._bytes.stays:
            self._bytes.grow(size_bytes)
        return memory is self.memory or memory.data_ptr() == self.memory.data_ptr()

    def lend(self) -> None:
        """Have the memory never rest from here on: a CUDA graph of somebody else reads and writes
        it, and he replays it without asking."""
        self._is_lent = True

    def rest(self) -> None:
        """Have no memory until the next run, which finds it at the same addresses if it can."""
        with self.lock:
            if self._is_lent:
                return
            if self._bytes.stays:
                self._bytes.rest()
            else:
                self.give_back()

    def give_back(self) -> None:
        self._empty()
        self._bytes.give_back()

    def _empty(self) -> None:
        """Have all tenants let go, so that nobody keeps the memory."""
        for tenant in self._tenants:
            tenant.let_go()
        self._tenants.clear()


_GROWING: WeakSet[Workspace] = WeakSet()
_WORKSPACES: dict[tuple[torch.device, int], Workspace] = {}


def workspace_of(device: torch.device, stream: int) -> Workspace:
    """Return what all programs on this stream take turns in, forward and backward of a step too."""
    return _WORKSPACES.setdefault((device, stream), Workspace(device))


def rest_on(device: torch.device) -> None:
    """Have all working memory of a device rest, but what is lent."""
    device = with_index(device)
    for workspace in list(_GROWING):
        if workspace.device == device:
            workspace.rest()

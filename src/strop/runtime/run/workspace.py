"""A stream has working memory, which its programs take turns in."""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

# A program on a GPU that needs more works for so long that finding memory for each run costs
# nothing, while others may want that memory: a VAE that encodes 48 pictures needs 12.9 GB, which
# the training step behind it needs, too.
KEPT_BYTES = 2 << 30


class Tenant(Protocol):
    """The values of a tenant lie in a workspace's memory."""

    def let_go(self) -> None:
        """Forget the memory; find it anew at the next run."""


class Workspace:
    """This is the working memory of one stream. It grows; whoever is bound to the old memory binds
    again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        # programs of several modules share this memory; a capture runs some in its own turn
        self.lock = threading.RLock()
        self._tenants: WeakSet[Tenant] = WeakSet()

    def reserve(self, size_bytes: int, tenant: Tenant) -> Tensor:
        """Return memory of this size at least, which ``tenant`` has until it is told to let go."""
        if self.memory.numel() < size_bytes:
            self.give_back()  # first, so that there is never the old and the new one
            self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        self._tenants.add(tenant)
        return self.memory

    def give_back(self) -> None:
        for tenant in self._tenants:
            tenant.let_go()
        self._tenants.clear()
        self.memory = self.memory.new_empty(0)


_WORKSPACES: dict[tuple[torch.device, int], Workspace] = {}


def workspace_of(device: torch.device, stream: int) -> Workspace:
    """Return what all programs on this stream take turns in, forward and backward of a step too."""
    return _WORKSPACES.setdefault((device, stream), Workspace(device))

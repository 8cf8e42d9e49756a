"""Keep gradients that outlive a backward pass in memory that stands still.

A graph writes where it was captured to write. What one graph leaves for the next, in accumulation,
therefore lies in a home of its own, from the first call on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor


class StaticGradients:
    """Hold the homes of gradients, by parameter."""

    def __init__(self) -> None:
        self._homes: dict[Tensor, Tensor] = {}

    def settle(self, leaves: Sequence[Tensor]) -> bytes:
        """Move all gradients home; which leaves have one."""
        which = bytes(leaf.grad is not None for leaf in leaves)
        if any(which):
            for leaf in leaves:
                self.land(leaf)
        return which

    def land(self, leaf: Tensor) -> None:
        """Move a gradient home; the next backward pass adds to it there."""
        grad, home = leaf.grad, self._homes.get(leaf)
        if grad is None or grad is home:
            return
        if home is None or (home.dtype, home.device) != (grad.dtype, grad.device):
            home = self._homes[leaf] = torch.empty_like(grad)
        with torch.no_grad():
            home.copy_(grad)
        leaf.grad = home

    @contextmanager
    def kept(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        """Keep gradients of a backward pass in here at home when it ends, each as soon as it is
        there."""
        with ExitStack() as stack:
            for leaf in leaves:
                hook = leaf.register_post_accumulate_grad_hook(self.land)
                stack.callback(hook.remove)
            yield

    def put(self, leaves: Sequence[Tensor], which: bytes) -> None:
        """Say which leaves have a gradient: those of a graph are there without Python's doing."""
        for leaf, has in zip(leaves, which, strict=True):
            leaf.grad = self._homes[leaf] if has else None

    def places(self, leaves: Sequence[Tensor], which: bytes) -> list[int]:
        """Return addresses that a graph was captured with."""
        homes = (self._homes.get(leaf) for leaf, has in zip(leaves, which, strict=True) if has)
        return [0 if home is None else home.data_ptr() for home in homes]

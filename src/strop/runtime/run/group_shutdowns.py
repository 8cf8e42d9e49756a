"""CUDA graphs that hold collectives are let go before their process group shuts down.

NCCL destroys a communicator only when no CUDA graph refers to it any more, and waits for that
without a limit (``ncclCommDestroy``). So ``torch.distributed.destroy_process_group`` would never
return while a compiled model or step still held such a graph. Whoever captures while there are
process groups is told of a shutdown here, before it begins.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol
from weakref import WeakSet

import torch


class HoldsGraphs(Protocol):
    """Hold CUDA graphs that can be captured anew."""

    def let_go_of_graphs(self) -> object:
        """Let go of them all. The next call runs without one, or captures again."""
        ...


_HOLDERS = WeakSet[HoldsGraphs]()
_LOCK = threading.Lock()


def note_capture(holder: HoldsGraphs) -> None:
    """Note who has captured. Which group a graph speaks to is not looked into: where one of several
    groups shuts down, graphs are captured again for nothing."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    with _LOCK:
        _HOLDERS.add(holder)
        _watch(torch.distributed.ProcessGroup)


def let_go() -> None:
    """Have all graphs destroyed that may hold collectives."""
    with _LOCK:
        holders = list(_HOLDERS)
        _HOLDERS.clear()
    if holders and torch.cuda.is_available():
        torch.cuda.synchronize()  # one of their graphs may be running
    for holder in holders:
        holder.let_go_of_graphs()


def _watch(kind: Any) -> None:
    """Stand before ``shutdown``, which everything that destroys a group calls, whoever imported
    it by whatever name."""
    inner = kind.shutdown
    if getattr(inner, "lets_go", False):
        return

    @functools.wraps(inner)
    def shutdown(group: Any) -> Any:
        let_go()
        return inner(group)

    shutdown.lets_go = True  # type: ignore[attr-defined]
    kind.shutdown = shutdown

"""Exchange tensors between the processes of a group, each of which makes the same calls."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

ALL_TO_ALL = "all_to_all"  # piece i of what a process has goes to process i
ALL_GATHER = "all_gather"  # each process gets what all have, in their order
_is_rehearsal: ContextVar[bool] = ContextVar("is_rehearsal", default=False)


@contextmanager
def rehearsed() -> Iterator[None]:
    """Have exchanges of this thread give zeros meanwhile, and tell the other processes nothing: a
    run whose results nobody sees need not be one that they make too."""
    token = _is_rehearsal.set(True)
    try:
        yield
    finally:
        _is_rehearsal.reset(token)


def exchanged(x: Tensor, how: str, group: str, size: int) -> Tensor:
    """Exchange ``x`` (n,) with the other processes of the group with that name, ``size`` in all:
    (n,), or (size n,) where all get everything. Nothing is computed.

    The call is for the stream of the caller: it waits for what was launched there before, and what
    is launched there next waits for it. Under capture it becomes a part of the CUDA graph.
    """
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    if x.dtype is torch.bool:  # libraries have no such type
        return exchanged(x.view(torch.uint8), how, group, size).view(torch.bool)
    x = x.contiguous()
    made = x.new_empty(x.shape[0] * (size if how == ALL_GATHER else 1))
    if _is_rehearsal.get():
        return made.zero_()
    processes = c10d._resolve_process_group(group)
    if how == ALL_TO_ALL:
        torch.distributed.all_to_all_single(made, x, group=processes)
    else:
        gather = getattr(c10d, "all_gather_single", None) or c10d.all_gather_into_tensor
        gather(made, x, group=processes)
    return made


def bytes_sent(own_bytes: int, how: str, size: int) -> int:
    """Return how many bytes a process sends to others of an operand that has so many: all but its
    own piece, or all of it to each."""
    return own_bytes * (size - 1) // (size if how == ALL_TO_ALL else 1)

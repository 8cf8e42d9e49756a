"""Trace what ``torch.utils.checkpoint`` covers once, and tag it to be computed again.

Eager runs a checkpoint in the forward pass and once more in the backward pass. In a trace of both
one run is enough: ``dispatch/partition.py`` hands the tags to torch's min-cut, which has the
backward compute again what the region holds, from what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import noop_context_fn

from strop.errors import CaptureError
from strop.frontend.copied_nodes import is_size, last_node, nodes_behind
from strop.frontend.regions import mark

# Looked up at each call by whatever has imported ``checkpoint``.
_PLAIN, _REENTRANT = "_checkpoint_without_reentrant_generator", "CheckpointFunction"


@contextmanager
def tagged_checkpoints() -> Iterator[None]:
    """Have checkpoints tag what this thread traces. Raises CaptureError in a checkpoint that
    chooses itself what it keeps, and in a reentrant one, whose gradients are not always those of
    its function."""
    table = vars(torch.utils.checkpoint)
    usual, function = table[_PLAIN], table[_REENTRANT]

    def reentrant(*args: Any) -> Any:
        if get_proxy_mode() is None:  # another thread's call
            return function.apply(*args)
        raise CaptureError("it uses torch.utils.checkpoint with use_reentrant=True")

    reentrant.apply = reentrant  # type: ignore[attr-defined]
    table |= {_PLAIN: _around(usual), _REENTRANT: reentrant}
    try:
        yield
    finally:
        table |= {_PLAIN: usual, _REENTRANT: function}


def _around(usual: Callable[..., Any]) -> Callable[..., Iterator[None]]:
    """Return what torch runs around a checkpoint's function: up to its yield, and behind it."""

    def around(*args: Any, **kwargs: Any) -> Iterator[None]:
        mode = get_proxy_mode()
        if mode is None:  # another thread's call
            yield from usual(*args, **kwargs)
            return
        _, _, context_fn, *_ = args
        if context_fn is not noop_context_fn:
            raise CaptureError("it uses torch.utils.checkpoint with a context_fn")
        tracer = mode.tracer
        last = last_node(tracer)
        yield
        mark(node for node in nodes_behind(last, tracer) if not is_size(node))

    return around

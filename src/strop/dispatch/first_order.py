"""Gradients that have no gradients of their own.

A backward graph computes gradients and nothing beyond. Where a caller wants to differentiate them
(``create_graph=True``), an error has to come, and not a penalty that counts for nothing. Torch's
``once_differentiable`` hands out gradients without a graph as soon as none of the tensors that it
gets requires a gradient. AOTAutograd's error stands beside the graph: ``torch.autograd.grad`` by
the module's inputs never meets it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_REASON = (
    "Strop's backward graphs are once_differentiable: they give no gradients of gradients"
    " (create_graph=True). Run the module in eager where a loss needs those"
)
# what AOTAutograd runs a backward in where the caller wants a graph
_OF_AOT = ".CompiledFunctionBackward.forward"
_MOST_FRAMES = 16  # between that and the backward graph


class _Once(torch.autograd.Function):
    """Gradients as they are, behind the tensors that they were computed from."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Any:
        return tuple(gradient.view_as(gradient) for gradient in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(_REASON)


def once(gradients: Sequence[Any], sources: Sequence[Tensor]) -> list[Any]:
    """``gradients``, some of which may be None. If the caller records what is done with them, they
    raise RuntimeError where a gradient is to go through them to one of ``sources``."""
    if not torch.is_grad_enabled():
        return list(gradients)
    given = [gradient for gradient in gradients if gradient is not None]
    marked = iter(_Once.apply(len(given), *given, *sources))  # type: ignore[no-untyped-call]
    return [None if gradient is None else next(marked) for gradient in gradients]


def refuse_twice() -> None:
    """Raises RuntimeError in a backward of AOTAutograd whose gradients are to be differentiated."""
    frame = sys._getframe(1).f_back
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        if frame.f_code.co_qualname.endswith(_OF_AOT):
            raise RuntimeError(_REASON)
        frame = frame.f_back

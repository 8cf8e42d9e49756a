"""Define a linear recurrence: h[t] = a[t] * h[t - 1] + b[t], which begins with h[0] = b[0]."""

from __future__ import annotations

import torch
from torch import Tensor

STATES = {  # the type in which states go from step to step
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.float64: torch.float64,
}


def linear_scan(a: Tensor, b: Tensor, dim: int = 2) -> Tensor:
    """Return all states h of b's shape and type, dense, where ``dim`` counts the steps.

    ``a`` and ``b`` have one shape and one type of STATES. States go from step to step in a wider
    type and each is rounded once, since errors of slow decays add up: eager's tree of products
    rounds as often as the logarithm of the length, and a plain walk as often as the length.
    """
    wide, state, states = STATES[b.dtype], None, list[Tensor]()
    for decay, more in zip(a.unbind(dim), b.unbind(dim), strict=True):
        added = more.to(wide)
        state = added if state is None else torch.addcmul(added, decay.to(wide), state)
        states.append(state.to(b.dtype))
    return torch.stack(states, dim) if states else b.new_empty(b.shape)

"""Cut a symbolic size that divides into equal pieces, without a question about how many there are.

torch's ``chunk`` computes how many pieces there will be by a quotient of quotients, which its
solver cannot prove to be that of a size such as 2 b, and plants a guard that fixes b.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


def call_chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Return what ``x.chunk(chunks, dim)`` does."""
    size = x.shape[dim]
    if not isinstance(size, SymInt) or not statically_known_true(size % chunks == 0):
        return x.chunk(chunks, dim)
    piece = size // chunks
    return tuple(x.narrow(dim, number * piece, piece) for number in range(chunks))


PIECES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.chunk: call_chunk,
    Tensor.chunk: call_chunk,
}

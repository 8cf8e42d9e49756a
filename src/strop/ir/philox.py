"""Draw random numbers by counting: Philox4x32-10, a function of a seed and a position.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Any kernel
can draw the number of any element, in any order, and twice the same one if it computes it again.
``uniform`` in ``codegen/rt/vmath.h`` and Triton's own ``philox`` give equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEYS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_SCALE = 4.6566127342e-10  # a little less than 2^-31: the result stays below 1


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Draw fp32 numbers in [0, 1), from int64 tensors of shapes that broadcast."""
    seed, position = torch.broadcast_tensors(seed, position)
    key = seed & _WORD, (seed >> 32) & _WORD
    zero = torch.zeros_like(position)
    words = position & _WORD, (position >> 32) & _WORD, zero, zero
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = (
            _product(m, w) for m, w in zip(_MULTIPLIERS, words[::2], strict=True)
        )
        words = high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0
        key = (key[0] + _KEYS[0]) & _WORD, (key[1] + _KEYS[1]) & _WORD
    first = words[0]
    folded = torch.where(first >= 1 << 31, _WORD - first, first)  # -x - 1 of a negative word
    return folded.float() * torch.tensor(_SCALE, dtype=torch.float32, device=seed.device)


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return high and low word of factor * word, which need not fit into int64."""
    low, high = word & 0xFFFF, word >> 16
    above = (factor * high + ((factor * low) >> 16)) >> 16
    return above, (factor * word) & _WORD

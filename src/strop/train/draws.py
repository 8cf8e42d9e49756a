"""Draw random numbers that depend on the seed, a purpose and a number, and on nothing before them.

No generator lives longer than the batch, the epoch or the picture it serves, so a training that
continues at batch n draws what the one that never stopped draws there.
"""

from __future__ import annotations

import hashlib

import torch

_BITS = 63


def seed_of(seed: int, purpose: str, number: int) -> int:
    digest = hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - _BITS)


def generator(
    seed: int, purpose: str, number: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed_of(seed, purpose, number))

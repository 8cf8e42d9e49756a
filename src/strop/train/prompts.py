"""Hold prompts of a batch, as token ids or as what text encoders make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompts:
    """Hold a row for each prompt: token ids by text encoder, or what all encoders together give, by
    name."""

    tensors: dict[str, Tensor]
    is_encoded: bool = False

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def rows(self, places: Tensor | slice) -> Prompts:
        return Prompts({name: t[places] for name, t in self.tensors.items()}, self.is_encoded)

    def to(self, device: torch.device) -> Prompts:
        moved = {name: t.to(device, non_blocking=True) for name, t in self.tensors.items()}
        return Prompts(moved, self.is_encoded)

    def pinned(self) -> Prompts:
        """Move rows into memory that a GPU copies from while the host goes on."""
        return Prompts({name: pinned(t) for name, t in self.tensors.items()}, self.is_encoded)


def pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def joined(parts: Sequence[Prompts]) -> Prompts:
    """Return the rows of all parts, one behind the other."""
    names = parts[0].tensors
    tensors = {name: torch.cat([part.tensors[name] for part in parts]) for name in names}
    return Prompts(tensors, parts[0].is_encoded)

"""Count the layers with adapters that a program computes as peft does, for want of a plain layer
that could stand for them."""

from __future__ import annotations

from collections import Counter

from torch import nn

from strop.frontend.adapted_layers import unfolded_reason


def unfolded_layers(module: nn.Module) -> dict[str, int]:
    """Return how many there are in a module, by reason."""
    wrapped = [part for part in module.modules() if hasattr(part, "merged_adapters")]
    return dict(Counter(filter(None, map(unfolded_reason, wrapped))))

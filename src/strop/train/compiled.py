"""Where a compiled forward and backward pass of the UNet takes its place."""

from __future__ import annotations

from torch import nn


def prepare(unet: nn.Module) -> nn.Module:
    """What the training calls instead of ``unet``, with the same arguments and the same weights.

    The module itself: forward and backward are torch's.
    """
    return unet

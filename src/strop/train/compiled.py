"""Put a compiled forward and backward pass of the UNet in its place."""

from __future__ import annotations

from torch import nn

from strop.api import optimize


def prepare(unet: nn.Module, compiled: bool) -> nn.Module:
    """Return what the training calls: the module itself, in place ``compiled`` or as it is."""
    return optimize(unet, train=True) if compiled else unet

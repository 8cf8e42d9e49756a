"""Put compiled forward and backward passes of what is called in each step in its place."""

from __future__ import annotations

from torch import nn

from strop.api import optimize
from strop.train.model import DiffusionModel


def prepare(model: DiffusionModel, compiled: bool) -> nn.Module:
    """Return what the training calls in the place of the UNet: the module itself, or the UNet with
    its ControlNet; each of them in place ``compiled`` or as it is."""
    for network in model.denoisers if compiled else ():
        optimize(network, train=True)
    networks = model.denoisers
    found: nn.Module = model.unet
    return model.family.control.joined(*networks) if len(networks) > 1 else found

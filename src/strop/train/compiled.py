"""Put compiled forward and backward passes of what is called in each step in its place."""

from __future__ import annotations

from torch import nn

from strop.api import optimize
from strop.train.controlnet import Controlled
from strop.train.model import DiffusionModel


def prepare(model: DiffusionModel, compiled: bool) -> nn.Module:
    """Return what the training calls in the place of the UNet: the module itself, or the UNet with
    its ControlNet; each of them in place ``compiled`` or as it is."""
    for network in model.denoisers if compiled else ():
        optimize(network, train=True)
    found: nn.Module = Controlled(*model.denoisers) if len(model.denoisers) > 1 else model.unet
    return found

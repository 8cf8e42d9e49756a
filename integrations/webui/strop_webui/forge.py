"""Stand in for the forward of Forge's UNet while a picture is made.

Forge calls ``forge_objects.unet.model.apply_model``, and that calls ``diffusion_model``. The
instance of the latter gets a forward, which steps aside for the time of each call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from modules import script_callbacks
from torch import nn

from .calls import Call, origin_of
from .compiled_unet import Status, compiled_for, keep_weights_of

NAMES = ("x", "timesteps", "context", "y", "control", "transformer_options")


class Attached:
    """This is the forward of one UNet of Forge."""

    def __init__(self, owner: Any, status: Status) -> None:
        """``owner`` is Forge's KModel."""
        self.owner, self.model, self.status = owner, owner.diffusion_model, status
        self._layers = [part for part in self.model.modules() if hasattr(part, "weight")]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the UNet returns."""
        call = Call.of(NAMES, args, kwargs)
        with self._aside():
            reason = call.reason or self._reason(call.given["x"].device)
            if reason:
                self.status.add_plain(reason)
                return self.model.forward(*args, **kwargs)
            call.given.setdefault("control", None)
            compiled = compiled_for(self.owner, self.model)
            return compiled.run(call, partial(self.model.forward, *args, **kwargs), self.status)

    def _reason(self, device: Any) -> str:
        for layer in self._layers:
            if getattr(layer, "forge_online_loras", None):
                return "LoRA is computed in each step (the choice 'Diffusion in Low Bits')"
            if layer.weight is not None and layer.weight.device != device:
                return "the UNet is loaded in part (GPU Weights)"
        return ""

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        before = self.model.__dict__.pop("forward")
        try:
            yield
        finally:
            self.model.__dict__["forward"] = before


_attached: list[Attached] = []


def attach(p: Any, status: Status) -> str:
    """Stand in for the UNet of the picture ``p``. Return why that cannot be, or nothing."""
    owner = p.sd_model.forge_objects.unet.model
    model: nn.Module = owner.diffusion_model
    own = model.__dict__.get("forward")
    if isinstance(own, Attached):
        own.status = status
        return ""
    if own is not None:
        return f"the UNet has another forward: {origin_of(own)}"
    found = Attached(owner, status)
    model.__dict__["forward"] = found
    _attached.append(found)
    return ""


def detach() -> None:
    """Take all forwards away that were put there."""
    while _attached:
        model = _attached[-1].model
        if model.__dict__.get("forward") is _attached[-1]:
            del model.__dict__["forward"]
        _attached.pop()


def install() -> None:
    """Hear of models that are loaded."""
    script_callbacks.on_model_loaded(
        lambda loaded: keep_weights_of(loaded.forge_objects.unet.model)
    )

"""Stand in for the forward of Forge's UNet while a picture is made.

Forge calls ``forge_objects.unet.model.apply_model``, and that calls ``diffusion_model``. The
instance of the latter gets a forward, which steps aside for the time of each call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from .calls import Call, origin_of
from .compiled_unet import Status, compiled_for

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
                return self.model(*args, **kwargs)
            call.given.setdefault("control", None)
            compiled = compiled_for(self.owner, self.model)
            return compiled.run(call, lambda: self.model(*args, **kwargs), self.status)

    def _reason(self, device: Any) -> str:
        for path, part in self.model.named_modules():
            if "forward" in part.__dict__:
                named = path or "the UNet"
                return f"{named} has another forward: {origin_of(part.__dict__['forward'])}"
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


def attach(owner: Any, status: Status) -> str:
    """Stand in for the UNet of a KModel. Return why that cannot be, or nothing."""
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

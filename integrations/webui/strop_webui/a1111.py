"""Stand in for the UNet of A1111, by its interface for that: ``modules.sd_unet``.

The class of a UNet there asks ``sd_unet.current_unet`` before it runs. It is set by a choice in the
settings ("SD Unet"), or by the checkbox of this extension for the time of a picture.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from modules import devices, script_callbacks, sd_unet, shared
from torch import nn

from . import networks
from .calls import Call, origin_of
from .compiled_unet import Status, compiled_for, keep_weights_of

NAMES = ("x", "timesteps", "context")
LABEL = "Strop"


class StropUnet(sd_unet.SdUnet):
    """This is what A1111 calls in place of its UNet, which it keeps: its weights are Strop's."""

    def __init__(self, status: Status) -> None:
        super().__init__()
        self.status = status
        self._layers: networks.NetworkLayers | None = None

    def forward(self, x: Any, timesteps: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the UNet returns."""
        model = _unet()
        if self._layers is None or self._layers.model is not model:
            self._layers = networks.NetworkLayers(model)
        call = Call.of(NAMES, (x, timesteps, context, *args), kwargs)
        reason = call.reason or networks.reason_against(shared.opts)
        if shared.cmd_opts.lowvram:
            reason = "the UNet is brought to the GPU in parts (--lowvram)"
        with _aside(self, model):
            plain = functools.partial(model.forward, x, timesteps, context, *args, **kwargs)
            if reason:
                self.status.add_plain(reason)
                return plain()
            self._layers.bring_in_line()
            with self._layers.without_networks():
                return compiled_for(shared.sd_model, model).run(call, plain, self.status)

    def activate(self) -> None:
        """Bring the UNet back from the CPU, where A1111 puts it when another is chosen."""
        if not shared.sd_model.lowvram:
            _unet().to(devices.device)


class StropOption(sd_unet.SdUnetOption):
    """This is the choice "Strop" among A1111's settings."""

    label, model_name = LABEL, None

    def create_unet(self) -> StropUnet:
        return StropUnet(Status())


def _unet() -> nn.Module:
    return shared.sd_model.model.diffusion_model  # type: ignore[no-any-return]


@contextlib.contextmanager
def _aside(unet: StropUnet, model: nn.Module) -> Iterator[None]:
    """Have A1111's UNet run the forward of its class meanwhile. Who calls that may have set
    another one in the object, which must not run once more."""
    sd_unet.current_unet = None
    other = model.__dict__.pop("forward", None)
    try:
        yield
    finally:
        sd_unet.current_unet = unet
        if other is not None:
            model.__dict__["forward"] = other


def attach(p: Any, status: Status) -> str:
    """Stand in for the UNet. Return what may keep A1111 from asking for it, or nothing."""
    found = sd_unet.current_unet
    if found is None:
        sd_unet.current_unet = StropUnet(status)
    elif isinstance(found, StropUnet):
        found.status = status
    else:
        return f"another UNet is chosen in the settings: {found.option.label}"
    # ControlNet's goes through the blocks itself. Then nobody ever asks for another UNet.
    own = _unet().__dict__.get("forward")
    return "" if own is None else f"the UNet has another forward: {origin_of(own)}"


def detach() -> None:
    """Take away what the checkbox has set. A choice in the settings stays."""
    if isinstance(sd_unet.current_unet, StropUnet) and sd_unet.current_unet_option is None:
        sd_unet.current_unet = None


def install() -> None:
    """Add the choice to A1111's settings, and hear of models that are loaded."""
    script_callbacks.on_list_unets(lambda options: options.append(StropOption()))
    script_callbacks.on_model_loaded(keep_weights_of)

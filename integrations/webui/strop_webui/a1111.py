"""Stand in for the UNet of A1111, by its interface for that: ``modules.sd_unet``.

The class of a UNet there asks ``sd_unet.current_unet`` before it runs. It is set by a choice in the
settings ("SD Unet"), or by the checkbox of this extension for the time of a picture.
"""

from __future__ import annotations

import contextlib
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
        self._layers: list[nn.Module] = []
        self._model: list[nn.Module] = []  # in a list, since a module would become a part of this

    def forward(self, x: Any, timesteps: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the UNet returns."""
        model = _unet()
        self._take(model)
        call = Call.of(NAMES, (x, timesteps, context, *args), kwargs)
        reason = call.reason or networks.reason_against(shared.opts) or _reason_against(model)
        with _aside(self):
            if reason:
                self.status.add_plain(reason)
                return model(x, timesteps, context, *args, **kwargs)
            networks.bring_in_line(self._layers)
            compiled = compiled_for(shared.sd_model, model)
            with networks.own_forwards():
                plain = lambda: model(x, timesteps, context, *args, **kwargs)  # noqa: E731
                return compiled.run(call, plain, self.status)

    def _take(self, model: nn.Module) -> None:
        if not self._model or self._model[0] is not model:
            self._model, self._layers = [model], networks.layers_of(model)

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


def _reason_against(model: nn.Module) -> str:
    """Say why this UNet cannot run compiled, or nothing."""
    if shared.cmd_opts.lowvram:
        return "the UNet is brought to the GPU in parts (--lowvram)"
    return next(
        (
            f"{path or 'the UNet'} has another forward: {origin_of(part.__dict__['forward'])}"
            for path, part in model.named_modules()
            if "forward" in part.__dict__
        ),
        "",
    )


@contextlib.contextmanager
def _aside(unet: StropUnet) -> Iterator[None]:
    """Have A1111's UNet run itself meanwhile."""
    sd_unet.current_unet = None
    try:
        yield
    finally:
        sd_unet.current_unet = unet


def attach(status: Status) -> str:
    """Stand in for the UNet. Return why that cannot be, or nothing."""
    found = sd_unet.current_unet
    if found is not None and not isinstance(found, StropUnet):
        return f"another UNet is chosen in the settings: {found.option.label}"
    if found is None:
        sd_unet.current_unet = StropUnet(status)
    else:
        found.status = status
    return ""


def detach() -> None:
    """Take away what the checkbox has set. A choice in the settings stays."""
    if isinstance(sd_unet.current_unet, StropUnet) and sd_unet.current_unet_option is None:
        sd_unet.current_unet = None


def forward_of_others() -> str:
    """Say what stands before the class's forward, which then never asks for another UNet."""
    own = _unet().__dict__.get("forward")
    return "" if own is None else f"the UNet has another forward: {origin_of(own)}"


def install() -> None:
    """Add the choice to A1111's settings, and hear of models that are loaded."""
    script_callbacks.on_list_unets(lambda options: options.append(StropOption()))
    script_callbacks.on_model_loaded(keep_weights_of)

"""Have the UNet run compiled for the time of one batch, in whichever web UI this is."""

from __future__ import annotations

from typing import Any

from . import forge
from .compiled_unet import Status

try:
    from . import a1111
except ImportError:  # Forge Neo has no modules.sd_unet
    a1111 = None  # type: ignore[assignment]


def install() -> None:
    """Tell A1111 of its new UNet. Forge has no place for one."""
    if a1111 is not None:
        a1111.install()


class Picture:
    """This holds what is known of the batch that is being made."""

    def __init__(self) -> None:
        self._status = Status()

    def begin(self, p: Any) -> None:
        """Begin a batch of the picture ``p``, as the web UI calls it."""
        self._status = Status()
        self.go_on(p)

    def go_on(self, p: Any) -> None:
        """Stand in for the UNet that is there now."""
        objects = getattr(p.sd_model, "forge_objects", None)
        if objects is not None:
            reason = forge.attach(objects.unet.model, self._status)
        elif a1111 is not None:
            reason = a1111.attach(self._status) or a1111.forward_of_others()
        else:
            reason = "neither A1111's interface for a UNet nor Forge's is there"
        if reason:
            self._status.add_plain(reason)

    def end(self) -> str:
        """Leave all as it was. Return what ran, in one line."""
        forge.detach()
        if a1111 is not None:
            a1111.detach()
        return self._status.line()

"""Have the UNet run compiled for the time of one batch, in whichever web UI this is."""

from __future__ import annotations

import importlib.util
from typing import Any

from .compiled_unet import Status

if importlib.util.find_spec("modules_forge") is not None:
    from . import forge as web_ui
else:
    from . import a1111 as web_ui  # type: ignore[no-redef]

install = web_ui.install


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
        self._status.refusal = web_ui.attach(p, self._status)

    def end(self) -> str:
        """Leave all as it was. Return what ran, in one line."""
        web_ui.detach()
        return self._status.line()

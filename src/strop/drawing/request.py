"""Say what to draw, and what happened on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


@dataclass(frozen=True)
class PictureSize:
    """Hold a picture size in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    @property
    def num_pixels(self) -> int:
        return self.width * self.height


@dataclass(frozen=True)
class ControlPicture:
    """Name a ControlNet, the picture that it sees, as large as the one to draw, and how strong its
    effect is. It has effect in the steps that lie between the shares ``begin`` and ``end`` of all
    steps, as in diffusers."""

    net: str
    picture: Image
    weight: float = 1.0
    begin: float = 0.0
    end: float = 1.0


@dataclass(frozen=True)
class PictureRequest:
    """Say what to draw. The noise comes from the CPU, so a seed means the same on every device.

    ``start`` is a picture, as large as ``size``, that the drawing begins with, and ``strength``
    how much of it is noise: 1 leaves nothing of it. ``mask``, as large again, is white where the
    start is drawn anew; without one all of it is. ``sampler`` and ``schedule`` are of
    ``strop.drawing.samplers``; without a name it is the model's own. ``is_weighted`` reads the
    prompts as ``strop.drawing.emphasis`` does, in at least ``chunks`` chunks of tokens. ``second``
    draws the picture once more, larger; each pass has its own ``controls``. ``more`` are arguments
    of the pipeline for what is added to the model.
    """

    prompt: str
    size: PictureSize
    steps: int
    guidance: float
    seed: int = 0
    negative: str = ""
    start: Image | None = None
    strength: float = 1.0
    mask: Image | None = None
    sampler: str = ""
    schedule: str = "automatic"
    is_weighted: bool = False
    chunks: int = 1
    second: SecondPass | None = None
    controls: tuple[ControlPicture, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Return how many steps are taken, in both passes: a start spares those before it. Heun's
        sampler calls the model twice in each but the last."""
        own = self.steps if self.start is None else self.begun_steps
        return own if self.second is None else own + self.second.request.begun_steps

    @property
    def begun_steps(self) -> int:
        """Return how many steps there are behind a start."""
        return min(int(self.steps * self.strength), self.steps)

    @property
    def final_size(self) -> PictureSize:
        """Return the size of the picture that is made in the end."""
        return self.size if self.second is None else self.second.request.size


@dataclass(frozen=True)
class SecondPass:
    """Say how a picture is drawn once more: it is brought to the size ``cover`` by one of the
    ``strop.drawing.twice.UPSCALERS``, cut to the size of ``request``, and is its start then, with
    the strength that stands there."""

    request: PictureRequest
    cover: PictureSize
    upscaler: str


@dataclass(frozen=True)
class StepDone:
    """Tell that ``number`` of ``total`` steps of a call are done. ``latents`` [batch, ...] are what
    the next step will be given."""

    number: int
    total: int
    latents: Tensor

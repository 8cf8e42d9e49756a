"""Bring what a first pass has drawn to the size that a second pass begins with.

The names are those of the upscalers of A1111's hires fix that need no model of their own: some
make latents larger, the others the picture, which is then encoded anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from strop.drawing.request import PictureSize, SecondPass

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Upscaler:
    """Hold what makes latents or a picture larger: a mode of torch's ``interpolate``, or the name
    of a filter of Pillow."""

    mode: str
    is_of_latents: bool
    is_antialiased: bool = False


UPSCALERS: Mapping[str, Upscaler] = MappingProxyType(
    {
        "Latent": Upscaler("bilinear", True),
        "Latent (antialiased)": Upscaler("bilinear", True, True),
        "Latent (bicubic)": Upscaler("bicubic", True),
        "Latent (bicubic antialiased)": Upscaler("bicubic", True, True),
        "Latent (nearest)": Upscaler("nearest", True),
        "Latent (nearest-exact)": Upscaler("nearest-exact", True),
        "None": Upscaler("LANCZOS", False),
        "Lanczos": Upscaler("LANCZOS", False),
        "Nearest": Upscaler("NEAREST", False),
    }
)


def draws_twice(pipe: Any) -> bool:
    """Tell whether a model can draw a picture once more, larger: its latents are pictures."""
    return getattr(pipe, "unet", None) is not None


def enlarged_latents(latents: Tensor, second: SecondPass, factor: int) -> Tensor:
    """Return latents [batch, channels, h, w] in the size of a second pass, computed in fp32.
    ``factor`` is how many pixels a latent stands for, along each side."""
    kind, cover, size = UPSCALERS[second.upscaler], second.cover, second.request.size
    made = functional.interpolate(
        latents.float(),
        size=(cover.height // factor, cover.width // factor),
        mode=kind.mode,
        antialias=kind.is_antialiased,
    )
    top, left = _margins(made.shape[-2], made.shape[-1], size, factor)
    bottom, right = top + size.height // factor, left + size.width // factor
    return made[..., top:bottom, left:right].to(latents.dtype).contiguous()


def enlarged_picture(pixels: Tensor, second: SecondPass) -> Image:
    """Return a picture in the size of a second pass, of pixels [3, height, width] from 0 to 1 that
    are rounded to 8 bits before, as A1111 does."""
    from PIL import Image

    size, cover = second.request.size, second.cover
    rounded = (pixels * 255).round().clamp(0, 255).byte().permute(1, 2, 0).contiguous()
    picture = Image.frombytes("RGB", rounded.shape[1::-1], rounded.numpy().tobytes())
    way = Image.Resampling[UPSCALERS[second.upscaler].mode]
    made = picture.resize((cover.width, cover.height), way)
    top, left = _margins(cover.height, cover.width, size, 1)
    return made.crop((left, top, left + size.width, top + size.height))


def _margins(height: int, width: int, size: PictureSize, factor: int) -> tuple[int, int]:
    """Return what is cut off at the top and at the left, half of what is too much."""
    return (height - size.height // factor) // 2, (width - size.width // factor) // 2

"""Draw with ControlNets: networks that see a picture, such as edges or a depth map, and add to what
the UNet computes in each step.

Source: L. Zhang et al., Adding Conditional Control to Text-to-Image Diffusion Models, ICCV 2023.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from strop.drawing.request import ControlPicture, PictureRequest

Nets = Mapping[str, Any]  # ControlNets of diffusers, by their names
NO_NETS: Nets = MappingProxyType({})


def control_key(controls: Sequence[ControlPicture]) -> Hashable:
    """Return what the controls of requests must have in common that are drawn by one call: all but
    their pictures."""
    return tuple((one.net, one.weight, one.begin, one.end) for one in controls)


def net_of(controls: Sequence[ControlPicture], nets: Nets) -> Any:
    """Return what a pipeline takes as its ControlNet: one, or a list of several, of which one may
    stand in it twice. Raises ValueError for a name that is not among them."""
    missing = [one.net for one in controls if one.net not in nets]
    if missing:
        raise ValueError(f"there is no ControlNet {missing[0]!r}; there are {[*nets]}")
    found = [nets[one.net] for one in controls]
    return found[0] if len(found) == 1 else found


def control_arguments(requests: Sequence[PictureRequest], *, has_begin: bool) -> dict[str, Any]:
    """Return the arguments of a call for the controls of some requests. A pipeline that begins with
    a picture has that one as its ``image``, and takes those of controls by another name."""
    controls = requests[0].controls
    seen = [_values(requests, number) for number in range(len(controls))]
    name = "control_image" if has_begin else "image"
    is_one = len(controls) == 1
    return {
        name: seen[0] if is_one else seen,
        "controlnet_conditioning_scale": _one_or_all([one.weight for one in controls]),
        "control_guidance_start": [one.begin for one in controls],
        "control_guidance_end": [one.end for one in controls],
    }


def _one_or_all(numbers: list[float]) -> float | list[float]:
    return numbers[0] if len(numbers) == 1 else numbers


def _values(requests: Sequence[PictureRequest], number: int) -> Tensor:
    """Return the pictures of one control [batch, 3, height, width], from 0 to 1."""
    return torch.stack([_pixels(request.controls[number]) for request in requests])


def _pixels(control: ControlPicture) -> Tensor:
    picture = control.picture.convert("RGB")
    flat = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return flat.view(picture.height, picture.width, 3).permute(2, 0, 1).float() / 255

"""Draw with ControlNets, which see a picture, such as edges, and add to what the UNet computes.

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
    """Return what the controls of requests of one call have in common: all but their pictures."""
    return tuple((one.net, one.weight, one.begin, one.end) for one in controls)


def net_of(controls: Sequence[ControlPicture], nets: Nets) -> Any:
    """Return the ControlNet of a pipeline: one, or a list of several. Raises ValueError for a name
    that is not there."""
    for one in controls:
        if one.net not in nets:
            raise ValueError(f"there is no ControlNet {one.net!r}; there are {[*nets]}")
    return _one_or_all([nets[one.net] for one in controls])


def control_arguments(requests: Sequence[PictureRequest], *, has_begin: bool) -> dict[str, Any]:
    """Return the arguments of a call for controls. The ``image`` of a pipeline that begins with a
    picture is that one."""
    controls = requests[0].controls
    seen = [
        torch.stack([_pixels(request.controls[number]) for request in requests])
        for number in range(len(controls))
    ]
    return {
        "control_image" if has_begin else "image": _one_or_all(seen),
        "controlnet_conditioning_scale": _one_or_all([one.weight for one in controls]),
        "control_guidance_start": [one.begin for one in controls],
        "control_guidance_end": [one.end for one in controls],
    }


def _one_or_all(found: list[Any]) -> Any:
    return found[0] if len(found) == 1 else found


def _pixels(control: ControlPicture) -> Tensor:
    """Return a picture [3, height, width], from 0 to 1."""
    picture = control.picture.convert("RGB")
    flat = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return flat.view(picture.height, picture.width, 3).permute(2, 0, 1).float() / 255

"""Have weights lie in other memory, as the same objects."""

from __future__ import annotations

import torch
from torch import Tensor


def lie_in(weight: Tensor, place: Tensor) -> None:
    """Have a weight lie where ``place``, of its sizes, does.

    A weight that was made in inference mode counts no writes, and keeps that when it is given
    memory of a tensor that counts them: eager can then no longer look at a part of it. It gets a
    tensor of its own kind over the same memory.
    """
    if weight.is_inference() and not place.is_inference():
        with torch.inference_mode():
            storage, first = place.untyped_storage(), place.storage_offset()
            place = place.new_empty(0).set_(storage, first, place.shape, place.stride())
    weight.data = place

"""Send noise that is drawn on the host, as by a ``torch.Generator()`` without a device, on its way
to the GPU while the host goes on.

diffusers copies it from pageable memory, and torch waits then until the GPU has done all that came
before. A picture from a picture draws noise behind the encoder of its picture: by the time the
first step is launched, the GPU has been idle for two milliseconds. From pinned memory, which torch
keeps until the copy is made
(https://docs.pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers), nobody waits. The
numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strop.diffusion.changes import Changes
from strop.diffusion.optimised import is_called_by_optimised
from strop.diffusion.stand_ins import StandIn, put_in_place

PLACE, NAME = "diffusers.utils.torch_utils", "randn_tensor"
# It asks for these names in the editions of diffusers whose answer is known.
ASKED = frozenset(
    (
        "isinstance",
        "str",
        "torch",
        "device",
        "strided",
        "type",
        "list",
        "logger",
        "info",
        "ValueError",
        "len",
        "range",
        "cat",
        "to",
        "randn",
    )
)


class Unwaited(StandIn):
    """It draws the same numbers."""

    def is_for(
        self,
        shape: Sequence[int],
        generator: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
    ) -> bool:
        is_apart = is_drawn_on_host(generator, device) and layout in (None, torch.strided)
        return is_apart and is_called_by_optimised()

    def answer(
        self,
        shape: Sequence[int],
        generator: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
    ) -> Tensor:
        place = torch.device("cpu")
        noise: Tensor = self.own(
            shape, generator=generator, device=place, dtype=dtype, layout=layout
        )
        return sent(noise, device)


def sent(noise: Tensor, device: Any) -> Tensor:
    """Return noise that is on its way to a GPU."""
    return noise.pin_memory().to(device, non_blocking=True)


def draw_without_waiting(changes: Changes) -> bool:
    """Have it stand in the place of diffusers' function, and tell whether it does: another function
    than the known one stays."""
    return put_in_place(changes, PLACE, NAME, ASKED, Unwaited)


def is_drawn_on_host(generator: Any, device: Any) -> bool:
    """Tell whether noise for a GPU of NVIDIA's comes from a generator, or from several, of the
    host."""
    if device is None or torch.device(device).type != "cuda":
        return False
    every = generator if isinstance(generator, list) else [generator]
    return bool(every) and all(
        isinstance(each, torch.Generator) and each.device.type == "cpu" for each in every
    )

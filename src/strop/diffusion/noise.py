"""Noise that is drawn on the host, as by a ``torch.Generator()`` without a device, is on its way to
the GPU while the host goes on.

diffusers copies it from pageable memory, and torch waits then until the GPU has done all that came
before. A picture from a picture draws noise behind the encoder of its picture: by the time the
first step is launched, the GPU has been idle for two milliseconds. From pinned memory, which torch
keeps until the copy is made
(https://docs.pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers), nobody waits. The
numbers are the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from strop.diffusion.offloading import replace_everywhere

PLACE, NAME = "diffusers.utils.torch_utils", "randn_tensor"
# What it asks in the editions of diffusers whose answer is known.
ASKED = frozenset((
    "isinstance", "str", "torch", "device", "strided", "type", "list", "logger", "info",
    "ValueError", "len", "range", "cat", "to", "randn",
))  # fmt: skip


class Unwaited:
    """Stands in the place of diffusers' function, ``own``, and gives the same numbers."""

    def __init__(self, own: Callable[..., Tensor]) -> None:
        self.own = own

    def __call__(self, shape: Sequence[int], generator: Any = None, device: Any = None,
                 dtype: torch.dtype | None = None, layout: torch.layout | None = None
                 ) -> Tensor:  # fmt: skip
        if not is_drawn_on_host(generator, device) or layout not in (None, torch.strided):
            return self.own(shape, generator=generator, device=device, dtype=dtype, layout=layout)
        noise = self.own(shape, generator=generator, device=torch.device("cpu"), dtype=dtype)
        return noise.pin_memory().to(device, non_blocking=True)


def draw_without_waiting() -> bool:
    """Put it there, for all pipelines of this process. False where diffusers has another function
    than the known one, which stays, or is not installed."""
    try:
        own = getattr(importlib.import_module(PLACE), NAME, None)
    except ImportError:
        return False
    if isinstance(own, FunctionType) and frozenset(own.__code__.co_names) == ASKED:
        replace_everywhere(NAME, own, Unwaited(own))
        return True
    return isinstance(own, Unwaited)


def is_drawn_on_host(generator: Any, device: Any) -> bool:
    """Whether noise for a GPU of NVIDIA's comes from a generator, or from several, of the host."""
    if device is None or torch.device(device).type != "cuda":
        return False
    every = generator if isinstance(generator, list) else [generator]
    return bool(every) and all(
        isinstance(each, torch.Generator) and each.device.type == "cpu" for each in every
    )

"""Schedulers that ask the GPU for the time: within a denoise loop they are told by the host.

Some of diffusers' schedulers look up what belongs to a timestep in a table on the host, and compare
the timestep with 0. The loop hands them a number in GPU memory, so each step waits until the GPU is
done with the UNet, and the GPU then waits for the host. The numbers are known when the loop begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor

from strop.runtime.loop import place_among

# Those whose ``step`` reads nothing from the GPU but its timestep. DDPM, LCM and TCD look for it
# among all timesteps there, which waits as well; the others count their steps.
ASKING = ("DDIMScheduler", "PNDMScheduler")


class Known:
    """Timesteps (n,) of a loop, on the host too. The copy is waited for when the first of them is
    asked for, by when the GPU has made it: what the loop begins with need not wait."""

    def __init__(self, timesteps: Tensor) -> None:
        self._timesteps, self._version = timesteps, timesteps._version
        self._copied: torch.cuda.Event | None = None
        self._on_host = torch.empty_like(timesteps, device="cpu", pin_memory=timesteps.is_cuda)
        self._on_host.copy_(timesteps, non_blocking=timesteps.is_cuda)
        if timesteps.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(timesteps.device))

    def __call__(self, timestep: Any) -> Any:
        """The same number on the host if it is one of them, as iteration gives them and nobody has
        written to them since; else as it came."""
        ours = self._timesteps
        if not isinstance(timestep, Tensor) or timestep.dim() or ours._version != self._version:
            return timestep
        place = place_among(ours, timestep)
        if place is None:
            return timestep
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._on_host[place]


@contextmanager
def host_timesteps(scheduler: Any, host: str = "cpu") -> Iterator[None]:
    """Within: ``scheduler.step`` gets timesteps on the host, where that spares it from waiting."""
    timesteps = getattr(scheduler, "timesteps", None)
    if type(scheduler).__name__ not in ASKING or not _is_known(timesteps, host):
        yield
        return
    before = scheduler.__dict__.get("step")  # somebody's own
    scheduler.step = _with(scheduler.step, Known(timesteps))
    try:
        yield
    finally:
        if before is None:
            del scheduler.step
        else:
            scheduler.step = before


def _is_known(timesteps: Any, host: str) -> TypeGuard[Tensor]:
    """Whether they are elsewhere, offsets tell their places, and torch counts writes to them."""
    if not isinstance(timesteps, Tensor) or timesteps.device.type == host:
        return False
    return timesteps.dim() == 1 and timesteps.is_contiguous() and not timesteps.is_inference()


def _with(step: Callable[..., Any], known: Known) -> Callable[..., Any]:
    @functools.wraps(step)
    def step_of_host(model_output: Any, timestep: Any, *args: Any, **kwargs: Any) -> Any:
        return step(model_output, known(timestep), *args, **kwargs)

    return step_of_host

"""Tell schedulers the time on the host within a denoise loop, where they would ask the GPU for it.

Some of diffusers' schedulers look up what belongs to a timestep in a table on the host, and compare
the timestep with 0. The loop hands them a number in GPU memory, so each step waits until the GPU is
done with the UNet, and the GPU then waits for the host. The numbers are known when the loop begins.
A step that is linear becomes two kernels (``linear_step.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor

from strop.diffusion.changes import Changes, in_force
from strop.diffusion.linear_step import FORGETFUL, linear_step
from strop.runtime.loop.denoise_loop import place_among

# Those whose ``step`` reads nothing from the GPU but its timestep. DDPM, LCM and TCD look for it
# among all timesteps there, which waits as well; the others count their steps.
ASKING = ("DDIMScheduler", "PNDMScheduler")

# Those schedulers look up in this table what belongs to a timestep. ``add_noise``, with which a
# picture from a picture begins, leaves it in GPU memory for good: each step then has some twenty
# more kernels.
TABLE = "alphas_cumprod"


class OnHost:
    """Hold a tensor on the host too. The copy is waited for when it is first asked for, by when the
    GPU has made it: what the loop begins with need not wait."""

    def __init__(self, source: Tensor) -> None:
        self.source, self._version = source, source._version
        self._copied: torch.cuda.Event | None = None
        self._copy = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
        self._copy.copy_(source, non_blocking=source.is_cuda)
        if source.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(source.device))

    @property
    def is_current(self) -> bool:
        """Tell whether nobody has written to it since."""
        return self.source._version == self._version

    def __call__(self) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._copy


class Known:
    """Hold the timesteps (n,) of a loop, and what a scheduler looks up by them, on the host too."""

    def __init__(self, timesteps: Tensor, table: Tensor | None = None) -> None:
        self._timesteps = OnHost(timesteps)
        self._table = None if table is None else OnHost(table)

    def __call__(self, timestep: Any) -> Any:
        """Return the same number on the host if it is one of them, as iteration gives them and
        nobody has written to them since; otherwise return it as it came."""
        if not isinstance(timestep, Tensor) or timestep.dim() or not self._timesteps.is_current:
            return timestep
        place = place_among(self._timesteps.source, timestep)
        return timestep if place is None else self._timesteps()[place]

    @contextmanager
    def at_hand(self, scheduler: Any) -> Iterator[None]:
        """Let the scheduler's table be that of the host, if it is the one that was copied."""
        table, ours = self._table, getattr(scheduler, TABLE, None)
        if table is None or ours is not table.source or not table.is_current:
            yield
            return
        setattr(scheduler, TABLE, table())
        try:
            yield
        finally:
            setattr(scheduler, TABLE, ours)


@contextmanager
def host_timesteps(scheduler: Any, host: str = "cpu") -> Iterator[None]:
    """Give ``scheduler.step`` timesteps on the host, where that spares it from waiting, and let it
    find its table there."""
    timesteps = getattr(scheduler, "timesteps", None)
    if type(scheduler).__name__ not in ASKING or not _is_known(timesteps, host):
        yield
        return
    table = getattr(scheduler, TABLE, None)
    known = Known(timesteps, table if _is_known(table, host) else None)
    changes = Changes()
    changes.put([scheduler], "step", _with(scheduler.step, known, scheduler))
    try:
        yield
    finally:
        changes.undo()


def _is_known(timesteps: Any, host: str) -> TypeGuard[Tensor]:
    """Tell whether they are elsewhere, offsets tell their places, and torch counts writes to
    them."""
    if not isinstance(timesteps, Tensor) or timesteps.device.type == host:
        return False
    return timesteps.dim() == 1 and timesteps.is_contiguous() and not timesteps.is_inference()


def _with(step: Callable[..., Any], known: Known, scheduler: Any) -> Callable[..., Any]:
    is_forgetful = type(scheduler).__name__ in FORGETFUL and "step" not in vars(scheduler)

    @functools.wraps(step)
    def step_of_host(model_output: Any, timestep: Any, *args: Any, **kwargs: Any) -> Any:
        number = known(timestep) if in_force(step_of_host) else timestep
        if number is timestep:
            return step(model_output, timestep, *args, **kwargs)
        with known.at_hand(scheduler):
            found = None
            if is_forgetful and len(args) == 1:
                found = linear_step(step, model_output, number, *args, kwargs)
            return step(model_output, number, *args, **kwargs) if found is None else found

    return step_of_host

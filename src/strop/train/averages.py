"""Keep moving averages of weights beside an optimizer: on their device, or in the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from strop.train.ema import EMASchedule
from strop.train.host_copies import HostCopies, HostCopy, mark


class Averages:
    """Average weights after each step of an optimizer, on their device."""

    def __init__(self, parameters: Sequence[Tensor], schedule: EMASchedule) -> None:
        self.parameters, self.schedule = list(parameters), schedule
        self.steps = 0
        self._found: dict[Tensor, Tensor] = {}

    def settle(self) -> None:
        """Wait for what still reads the weights, which are about to change."""

    def wait(self) -> None:
        """Wait until the averages are those of the last step."""

    def of(self, parameter: Tensor) -> Tensor | None:
        """Return a weight's average, or None if there is none: before the first step."""
        self.wait()
        return self._found.get(parameter)

    def step(self) -> None:
        """Average the weights as they are now, by the decay of the next step."""
        self.steps += 1
        self._follow(1.0 - self.schedule.decay_at(self.steps))

    def take(self, parameter: Tensor, average: Tensor) -> None:
        """Take over an average."""
        self.wait()
        self._found[parameter] = average.to(parameter.device, copy=True)

    @torch.no_grad()
    def write(self) -> None:
        """Write the averages over the weights."""
        self.wait()
        for parameter, average in self._found.items():
            parameter.copy_(average)

    def _follow(self, weight: float) -> None:
        self._lerp(self.parameters, weight)

    @torch.no_grad()
    def _lerp(self, values: Sequence[Tensor], weight: float) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            # The first step's weight is 1, whatever the average was.
            average = self._found.setdefault(parameter, value.detach().clone())
            average.lerp_(value, weight)


class HostAverages(Averages):
    """Average in the host's memory, which takes 8 bytes of a weight there and none of a GPU.

    A thread copies the weights and averages them while the next forward and backward pass runs.
    Only what changes the weights waits for the copy, and on a GPU it does so in the GPU's queue.
    """

    def __init__(self, parameters: Sequence[Tensor], schedule: EMASchedule) -> None:
        super().__init__(parameters, schedule)
        self._copies = HostCopies("the weights to be averaged", "leave out --offload_ema")
        self._pool = ThreadPoolExecutor(1, "strop-averages")
        self._copying: Future[HostCopy] | None = None
        self._running: Future[None] | None = None

    def settle(self) -> None:
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result().hold_changes()

    def wait(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def take(self, parameter: Tensor, average: Tensor) -> None:
        self.wait()
        self._found[parameter] = average.to("cpu", copy=True)

    def _follow(self, weight: float) -> None:
        self.wait()  # the copy before lies where the next one will
        now = {"weights": {str(place): p.detach() for place, p in enumerate(self.parameters)}}
        copying = self._pool.submit(self._copies.take, now, mark(now))
        self._copying = copying
        self._running = self._pool.submit(self._average, copying, weight)

    def _average(self, copying: Future[HostCopy], weight: float) -> None:
        copied = copying.result()  # the pool has one thread: it is there by now
        copied.wait()
        self._lerp(list(copied.tensors["weights"].values()), weight)


def make(parameters: Sequence[Tensor], schedule: EMASchedule, on_host: bool) -> Averages:
    return (HostAverages if on_host else Averages)(parameters, schedule)

"""Training steps that are replayed on a CPU, in the order of those on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from strop.dispatch import step_graphs
from strop.dispatch.step_graphs import CapturedHalf, StreamGraphs
from strop.runtime.run import cuda_graphs
from tests.diffusion.replayed import Recorded


class OnCpu(StreamGraphs):
    """Runs again what was captured, into the memory of its results."""

    def __init__(self) -> None:
        self.lock, self.num_calls = threading.RLock(), 0
        self._pairs = WeakSet()
        self.num_captures = 0

    def capture(
        self,
        run: Callable[[Sequence[Tensor]], Sequence[Any]],
        given: Sequence[Tensor],
        written: Sequence[Tensor] = (),
    ) -> CapturedHalf:
        static = tuple(tensor.detach().clone() for tensor in given)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            before = [tensor.clone() for tensor in written]
            graph = Recorded(lambda: run(static))
            for tensor, kept in zip(written, before, strict=True):
                tensor.copy_(kept)
        self.num_captures += 1
        return CapturedHalf(_WithoutGradients(graph), static, graph.results, ())


class _WithoutGradients:
    def __init__(self, graph: Recorded) -> None:
        self._graph = graph

    def replay(self) -> None:
        with torch.no_grad():
            self._graph.replay()


@contextmanager
def replayed_steps() -> Iterator[OnCpu]:
    """While it lasts, steps on the CPU are captured as on a GPU."""
    home = OnCpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "DEVICES", ("cuda", "cpu"))
        patch.setattr(step_graphs, "graphs_of", lambda device, stream: home)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield home

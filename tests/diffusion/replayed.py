"""Replays on a CPU, in the order of those on a GPU: a program runs first, with the weights that it
was bound to, and the model is looked at afterwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.entry import Entry
from strop.dispatch.entry_runner import EntryRunner
from strop.runtime.run import cuda_graphs as graphs
from strop.runtime.run.cuda_graphs import CapturedGraph, GraphPool, MakeBound
from strop.runtime.run.graph_copies import shared_by
from strop.runtime.run.workspace import workspace_of

CPU = torch.device("cpu")


class Recorded:
    """Stands in for a CUDA graph: what was recorded runs again, into the memory of its results."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run
        self.results = tuple(run() or ())

    def replay(self) -> None:
        for old, new in zip(self.results, self.run() or (), strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)


class Done:
    """Stands in for the event behind the latest replay."""

    is_done = True

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        pass


class Pool(GraphPool):
    """The graphs of the CPU. Prologues, tables and copied inputs are ``CapturedGraph``'s own."""

    def __init__(self) -> None:
        self.device, self.num_captures, self._graphs = CPU, 0, OrderedDict()
        self._lock, self._wander, self._kept = nullcontext(), set(), set()
        self._done = self.done = Done()
        self.num_replays = 0

    def run(
        self,
        key: Any,
        inputs: Any,
        specs: Any,
        make: MakeBound,
        budget_bytes: int,
        stamp: Any = None,
        moment: Any = None,
        repeated: Any = (),
    ) -> tuple[list[Any], int]:
        captured = self._captured(key, inputs, specs, make, budget_bytes, repeated)
        self.num_replays += 1
        return captured.replay(inputs, stamp, moment)

    def _capture(
        self, inputs: Sequence[Tensor], specs: Any, make: MakeBound, repeated: Any, **_: Any
    ) -> CapturedGraph:
        bound = make(workspace_of(CPU, 0), 0)
        in_place = graphs._in_place(bound, inputs, specs, repeated)
        own = tuple(
            None if n in in_place else s.empty(x.shape).copy_(x)
            for n, (x, s) in enumerate(zip(inputs, specs, strict=True))
        )
        static = [x if mine is None else mine for x, mine in zip(inputs, own, strict=True)]
        bound.run(static)
        prologue = timed = None
        if bound.hoisted.steps:
            prologue = Recorded(lambda: bound.run_prologue(static))
        if bound.timetable.steps:
            bound.timetable.record = lambda run: Recorded(run).replay
            timed = Recorded(lambda: bound.run_timed(static))
        graph = Recorded(lambda: _without_a_look(bound, lambda: bound.run_rest(static)))
        self.num_captures += 1
        return CapturedGraph(
            graph,
            prologue,
            timed,
            own,
            graph.results,
            bound,
            0,
            1,
            shared=shared_by(graph.results),
            in_place=in_place,
        )  # type: ignore


def _without_a_look(bound: Any, run: Callable[[], Any]) -> Any:
    """Run, and leave marks of lookups outside of a tensor to the next replay, as on a GPU."""
    faults = bound._resources.faults
    faults._is_late, faults.check = True, lambda: None
    try:
        return run()
    finally:
        del faults.check


def _run(self: EntryRunner, entry: Entry, tensors: list[Tensor], loop: int | None) -> Any:
    if self.wants_graph(entry):
        return self._replay(entry, tensors, loop)
    return self._run_bound(entry, tensors, 0, loop)


@contextmanager
def replayed_first() -> Iterator[Pool]:
    """While it lasts, programs on the CPU are captured at their second use and replayed before
    the model is looked at, as on a GPU, and no call takes the short way of CPUs."""
    pool = Pool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "DEVICES", ("cuda", "cpu"))
        patch.setattr(graphs, "pool_of", lambda device: pool)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(EntryRunner, "run", _run)
        patch.setattr(Dispatcher, "_prepare", lambda *args: None)
        yield pool

"""Each contender of ``strop bench load`` lives in a process of its own, so that what one of them
leaves in memory is not taken for another's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

import strop
from strop.bench import timer
from strop.bench.load_report import MeasuredContender
from strop.bench.load_threads import LoadWindow, called
from strop.bench.load_workloads import (
    LOAD_WORKLOADS,
    Given,
    LoadSize,
    LoadWorkload,
    add_adapter,
    cases_of,
)
from strop.errors import StropError

_WARM_UPS = 2  # calls of each case; on a GPU the second one captures a graph


@dataclass(frozen=True, slots=True)
class Contender:
    """Say what is built, and from how many threads it is called. ``name`` is "strop" or
    "eager"."""

    name: str
    workload: str
    sizes: Sequence[LoadSize]
    threads: int
    baseline_threads: int
    with_adapter: bool
    device: torch.device


class ContenderProcess:
    """This is a contender in its own process, which measures when it is told to, and sleeps
    meanwhile."""

    def __init__(self, contender: Contender) -> None:
        """Build the model there, and wait for it. Raises StropError where that fails."""
        self.measured = MeasuredContender(contender.name)
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(contender, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.num_cases: int = self._answer()

    def __enter__(self) -> ContenderProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()

    def measure(self, order: Sequence[int]) -> None:
        """Measure one round, whose calls have these cases."""
        self._pipe.send(order)
        for window in self._answer():
            self.measured.windows.setdefault(window.threads, []).append(window)

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise StropError(
                f"the process of {self.measured.name} ended with exit code {code}: see above"
            ) from None
        if isinstance(answer, StropError):
            raise answer
        return answer


def _serve(contender: Contender, pipe: Connection) -> None:
    """Answer with the number of cases, then each order with its windows. A mistake of the user is
    an answer, too."""
    try:
        made = LoadedContender(contender)
        pipe.send(len(made.expected))
        while True:
            pipe.send(made.measured(pipe.recv()))
    except StropError as error:
        pipe.send(error)


class LoadedContender:
    """This is a model, and what each of its cases gives when it is called alone: each call under
    load must give the same bits."""

    def __init__(self, contender: Contender) -> None:
        self._contender, device = contender, contender.device
        workload = LOAD_WORKLOADS[contender.workload]
        module = _module(contender, workload)
        cases = cases_of(
            workload, module, contender.sizes, device, with_adapter=contender.with_adapter
        )
        self._call = partial(_call, workload, module, cases)
        with torch.no_grad():
            for _ in range(_WARM_UPS):
                self.expected = [self._call(number) for number in range(len(cases))]
        timer.synchronise(device)

    def measured(self, order: Sequence[int]) -> list[LoadWindow]:
        """Return what calls of one thread, of a few, and of all took."""
        contender = self._contender
        few = contender.baseline_threads
        alone = order[: max(len(self.expected), len(order) // 10)]
        fewer = order[: max(2 * few, len(order) // 2)]
        return [
            called(self._call, self.expected, part, threads, contender.device)
            for part, threads in ((alone, 1), (fewer, few), (order, contender.threads))
        ]


def _module(contender: Contender, workload: LoadWorkload) -> nn.Module:
    device = contender.device
    module = workload.build(device, workload.dtypes[device.type])
    if contender.with_adapter:
        add_adapter(module, device)
    if contender.name == "strop":
        adapted = strop.Options(lora="unmerged")
        strop.optimize(module, options=adapted if contender.with_adapter else strop.Options())
    return module


def _call(
    workload: LoadWorkload, module: nn.Module, cases: Sequence[Mapping[str, Any]], number: int
) -> Tensor:
    given: Given = cases[number]
    return workload.call(module, given)

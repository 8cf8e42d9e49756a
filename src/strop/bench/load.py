"""Measure one optimised model that many threads call at once (``strop bench load``)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from strop.bench import environment, report
from strop.bench.load_contenders import Contender, ContenderProcess
from strop.bench.load_report import result_of
from strop.bench.load_workloads import LOAD_WORKLOADS, LoadSize
from strop.errors import OptionError

CONTENDERS = ("strop", "eager")


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Say what is measured. Calls are shared out among ``rounds``, in each of which all contenders
    take turns: a neighbour that takes a core away meets every one of them. Memory is compared
    between the first and the last."""

    workload: str = "sprites"
    threads: int = 200
    calls: int = 10_000
    baseline_threads: int = 8
    rounds: int = 5
    sizes: Sequence[LoadSize] = field(default=())
    contenders: Sequence[str] = CONTENDERS
    with_adapter: bool = False

    def check(self) -> None:
        """Raise OptionError for what cannot be measured."""
        workload = LOAD_WORKLOADS[self.workload]
        if self.with_adapter and not workload.takes_adapters:
            raise OptionError(f"{self.workload} takes no adapters")
        if self.baseline_threads > self.threads:
            raise OptionError(
                f"{self.baseline_threads} threads to compare with are more than {self.threads}"
            )
        if self.rounds < 2:
            raise OptionError("growth of memory is seen over two rounds or more")
        if self.calls < 2 * self.rounds * self.threads:
            raise OptionError(
                f"{self.calls} calls are less than two for each of {self.threads} threads in"
                f" {self.rounds} rounds"
            )


def run(
    plan: LoadPlan, device: torch.device, step: Callable[[str], object] = lambda note: None
) -> dict[str, Any]:
    """Measure by a plan, and return the result. ``step`` is told what is being measured."""
    plan.check()
    workload = LOAD_WORKLOADS[plan.workload]
    sizes = plan.sizes or workload.sizes
    with ExitStack() as stack:
        made = []
        for name in plan.contenders:
            step(f"building {workload.name} for {name}")
            made.append(
                stack.enter_context(ContenderProcess(_contender(plan, name, sizes, device)))
            )
        num_cases = made[0].num_cases
        _measure(made, plan, step)
    measured = [each.measured for each in made]
    found = result_of(plan.workload, measured, plan.threads, plan.baseline_threads)
    return found | {
        "sizes": [list(size) for size in sizes],
        "calls": plan.calls,
        "rounds": plan.rounds,
        "num_cases": num_cases,
        "has_adapter": plan.with_adapter,
        "environment": environment.describe(device),
    }


def _contender(
    plan: LoadPlan, name: str, sizes: Sequence[LoadSize], device: torch.device
) -> Contender:
    counts = plan.threads, plan.baseline_threads
    return Contender(name, plan.workload, sizes, *counts, plan.with_adapter, device)


def _measure(
    made: Sequence[ContenderProcess], plan: LoadPlan, step: Callable[[str], object]
) -> None:
    source, cases = random.Random(0), range(made[0].num_cases)
    for number in range(plan.rounds):
        order = source.choices(cases, k=plan.calls // plan.rounds)
        for each in made:
            step(f"round {number + 1} of {plan.rounds}: {each.measured.name}")
            each.measure(order)


def written(result: Mapping[str, Any], folder: Path, device: torch.device) -> Path:
    """Write the result as ``load-<workload>_<device>_<date>.json``, and return where."""
    date, label = result["environment"]["date"][:10], environment.device_label(device)
    adapted = "-adapter" if result["has_adapter"] else ""
    return report.write_json(
        result, folder / f"load-{result['workload']}{adapted}_{label}_{date}.json"
    )

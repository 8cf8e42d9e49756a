"""Measure one optimised model that many threads call at once (``strop bench load``)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import strop
from strop.bench import environment, report, timer
from strop.bench.load_report import LoadedContender, result_of
from strop.bench.load_threads import called
from strop.bench.load_workloads import (
    LOAD_WORKLOADS,
    Given,
    LoadSize,
    LoadWorkload,
    add_adapter,
    cases_of,
)
from strop.errors import OptionError

CONTENDERS = ("strop", "eager")
_WARM_UPS = 2  # calls of each case; on a GPU the second one captures a graph


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Say what is measured. Calls are shared out among ``rounds``, in each of which all contenders
    take turns: a neighbour that takes a core away meets every one of them."""

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
    made = [_contender(name, workload, sizes, plan, device, step) for name in plan.contenders]
    source, num_cases = random.Random(0), len(made[0].expected)
    for number in range(plan.rounds):
        order = source.choices(range(num_cases), k=plan.calls // plan.rounds)
        for contender in made:
            step(f"round {number + 1} of {plan.rounds}: {contender.name}")
            _measure(contender, order, plan, device)
    found = result_of(plan.workload, made, plan.threads, plan.baseline_threads)
    return found | {
        "sizes": [list(size) for size in sizes],
        "calls": plan.calls,
        "rounds": plan.rounds,
        "num_cases": num_cases,
        "has_adapter": plan.with_adapter,
        "environment": environment.describe(device),
    }


def written(result: Mapping[str, Any], folder: Path, device: torch.device) -> Path:
    """Write the result as ``load-<workload>_<device>_<date>.json``, and return where."""
    date, label = result["environment"]["date"][:10], environment.device_label(device)
    adapted = "-adapter" if result["has_adapter"] else ""
    return report.write_json(
        result, folder / f"load-{result['workload']}{adapted}_{label}_{date}.json"
    )


def _contender(
    name: str,
    workload: LoadWorkload,
    sizes: Sequence[LoadSize],
    plan: LoadPlan,
    device: torch.device,
    step: Callable[[str], object],
) -> LoadedContender:
    """Build a model, call it once with each case alone, and keep these results: each call under
    load must give the same bits."""
    step(f"building {workload.name} for {name}")
    module = workload.build(device, workload.dtypes[device.type])
    if plan.with_adapter:
        add_adapter(module, device)
    cases = cases_of(workload, module, sizes, device, with_adapter=plan.with_adapter)
    if name == "strop":
        options = strop.Options(lora="unmerged") if plan.with_adapter else strop.Options()
        strop.optimize(module, options=options)
    call = partial(_call, workload, module, cases)
    with torch.no_grad():
        for _ in range(_WARM_UPS):
            expected = [call(number) for number in range(len(cases))]
    timer.synchronise(device)
    return LoadedContender(name, call, expected)


def _call(workload: LoadWorkload, module: nn.Module, cases: Sequence[Given], number: int) -> Tensor:
    return workload.call(module, cases[number])


def _measure(
    contender: LoadedContender, order: Sequence[int], plan: LoadPlan, device: torch.device
) -> None:
    """Measure one round: calls of one thread, of a few, and of all."""
    alone = order[: max(len(contender.expected), len(order) // 10)]
    fewer = order[: max(2 * plan.baseline_threads, len(order) // 2)]
    for part, threads in ((alone, 1), (fewer, plan.baseline_threads), (order, plan.threads)):
        window = called(contender.call, contender.expected, part, threads, device)
        contender.windows.setdefault(threads, []).append(window)

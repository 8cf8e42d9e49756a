"""Judge models of the zoo and time them, several at once (``strop bench models --times``).

Each model has a process of its own, which compiles it and judges it beside the others, and is then
timed alone. What is done is handed over at once, so that a run that is cut off has its rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from strop.bench import census, environment, turns, zoo_times
from strop.bench.census import Row
from strop.bench.zoo_model import ZooModel
from strop.bench.zoo_times import TimesPlan

Result = dict[str, Any]


def run(
    models: Sequence[ZooModel],
    plan: TimesPlan,
    done: Mapping[str, Row],
    each: Callable[[str, Result], None] = lambda name, result: None,
) -> Result:
    """Return the contents of a file with a row for each model. ``done`` are rows of an earlier
    run, of other models too, which stay; ``each`` hears of a model that is ready, with the contents
    so far. What the budget has no time for is named in them."""
    began, rows = time.perf_counter(), dict(done)
    where = environment.describe(torch.device(plan.device))  # once: it runs programs
    waiting = [model.name for model in models if model.name not in rows]
    while waiting and time.perf_counter() - began <= plan.budget_s:
        wave, waiting = waiting[: plan.jobs], waiting[plan.jobs :]
        for number, row in enumerate(_wave(wave, plan)):
            rows[row["name"]] = row
            each(row["name"], _result(rows, where, plan, [*wave[number + 1 :], *waiting]))
    return _result(rows, where, plan, waiting)


def _result(
    rows: Mapping[str, Row], where: Mapping[str, Any], plan: TimesPlan, waiting: Sequence[str]
) -> Result:
    result = census.result_of([*rows.values()], where, plan.num_shapes)
    told = {key: getattr(plan, key) for key in ("batches", "peers", "samples", "jobs")}
    return {**result, "times": told, **({"not_begun": list(waiting)} if waiting else {})}


def _wave(names: Sequence[str], plan: TimesPlan) -> Iterator[Row]:
    works = [partial(work, name, plan) for name in names]
    if plan.jobs > 1:
        yield from turns.in_turns(works)
        return
    for each in works:
        steps = each()
        next(steps)
        yield next(steps)


def work(name: str, plan: TimesPlan) -> Iterator[Any]:
    """Yield None when the model is compiled and judged, and then its row, with its times."""
    from strop.bench.zoo import ZOO

    model = next(model for model in ZOO if model.name == name)
    verdict = census.judge(model, torch.device(plan.device), plan.options, plan.num_shapes)
    steps, times = zoo_times.steps_of(model, plan), dict[str, Any]()
    try:
        next(steps)
    except Exception as error:  # of a model that the judge has found fault with, too
        times = zoo_times.failed_by(error)
    yield None
    yield {**census.kept(verdict), "times": times or next(steps)}

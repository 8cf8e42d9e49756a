"""Report what came through ``torch.compile(backend="strop")``, and how long Dynamo took for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from strop.debug.costs import Machine
from strop.debug.explain import (
    component_row,
    machine_of,
    report_on,
    step_graph_texts,
    trained_launches,
    trained_row,
)
from strop.debug.report import ComponentRow, Report
from strop.dispatch import dynamo
from strop.dispatch.counters import Counters
from strop.dispatch.served_graph import ServedGraph
from strop.dispatch.served_steps import ServedSteps
from strop.dispatch.torch_compile import FRAMES
from strop.errors import OptionError
from strop.wording import counted

MOST_SHOWN = 6  # traces of Dynamo's in the line about it


def explain_compiled(obj: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
    """Report all graphs that somebody may still call. Raises OptionError where there are none."""
    if args or kwargs:
        with torch.no_grad():
            obj(*args, **kwargs)
    log = dynamo.AOT_LOG
    graphs = sorted((g for g in log.served if isinstance(g, ServedGraph)), key=_name)
    if not (graphs or log.records):
        raise OptionError(
            f"strop.explain: nothing of this {type(obj).__name__} has come through"
            " torch.compile(backend='strop'); call it first, or give explain the arguments of a"
            " call"
        )
    able, on_gpu = machine_of([d for graph in graphs for d in graph.dispatchers])
    components = [_graph_row(graph, able) for graph in graphs if graph.dispatchers]
    if log.records or log.through_aot:
        steps = [served for served in log.served if isinstance(served, ServedSteps)]
        components.append(_log_row(log, [served.counters for served in steps], able))
    return report_on(tuple(components), able, on_gpu, dynamo_lines())


def dynamo_lines() -> tuple[str, ...]:
    """Say how long Dynamo has traced in this process, without Strop's part, what each of its latest
    traces took, and where it could not trace for all sizes."""
    clock = FRAMES.clock
    each = [f"{t.dynamo_seconds:.2f} + {t.own_seconds:.2f}" for t in clock.traces[-MOST_SHOWN:]]
    constant = (
        f"Dynamo takes the sizes of {name}'s arguments for constants, as a trace for all sizes"
        f" failed: {reason}"
        for name, reason in FRAMES.constant.items()
    )
    return (
        f"Dynamo traced {counted(clock.num_traces, 'time')} for Strop, in"
        f" {clock.dynamo_seconds:.2f} s; Strop's part in it took {clock.own_seconds:.2f} s more"
        f" (the latest, Dynamo + Strop: {', '.join(each)} s)",
        *constant,
    )


def _name(graph: ServedGraph) -> str:
    return graph.name


def _graph_row(graph: ServedGraph, able: Machine) -> ComponentRow:
    """Describe a graph by its dispatchers, which share programs: one for each set of weights."""
    rows = [component_row(graph.name, dispatcher, able) for dispatcher in graph.dispatchers]
    return replace(
        rows[0],
        num_shapes=_total(rows, "num_shapes"),
        num_calls=_total(rows, "num_calls"),
        num_eager_calls=_total(rows, "num_eager_calls"),
        num_replays=_total(rows, "num_replays"),
        num_rebinds=_total(rows, "num_rebinds"),
        fallbacks=dict(sum((Counter(row.fallbacks) for row in rows), Counter())),
        nonfinite=tuple(text for row in rows for text in row.nonfinite),
        findings=tuple(text for row in rows for text in row.findings),
    )


def _total(rows: Sequence[ComponentRow], name: str) -> int:
    return sum(getattr(row, name) for row in rows)


def _log_row(log: dynamo.AotLog, steps: Sequence[Counters], able: Machine) -> ComponentRow:
    """Describe graphs that have their weights as arguments: those with gradients, and those that
    went through AOTAutograd. ``steps`` count the calls of the former that ran in eager."""
    runners = [record.runner for record in log.records if record.role != "backward"]
    num_eager_calls = sum(counters.eager_calls for counters in steps)
    num_calls = sum(runner.num_calls for runner in runners if runner is not None)
    return ComponentRow(
        name="graphs with their weights as arguments",
        graphs=tuple(trained_row(record, able) for record in log.records),
        num_recompiles=0,
        num_captures=len(runners),
        num_shapes=0,
        num_calls=num_calls + num_eager_calls + log.step_replays,
        num_eager_calls=num_eager_calls,
        num_replays=log.step_replays,
        num_rebinds=0,
        num_launches=trained_launches(log.records),
        fallbacks=dict(sum((Counter(c.fallbacks) for c in steps), Counter(log.fallbacks))),
        nonfinite=(),
        traced_by_torch=dict(log.through_aot),
        texts=tuple(step_graph_texts(log)),
    )

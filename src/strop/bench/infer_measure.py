"""Measure in one process what it has of rows for ``strop bench infer``: contenders in turns, or a
start.

Every function hands what it has so far to ``save``: a process that is cut leaves that.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from strop.bench import accuracy, environment, peers, timer
from strop.bench import compile as compile_bench
from strop.bench.cases import BenchCase
from strop.bench.infer_contenders import (
    DTYPES,
    Deadline,
    Field,
    Found,
    Plan,
    Save,
    attempt,
    in_order,
    is_there,
    take_turns,
)
from strop.bench.infer_rows import InferRow
from strop.debug.explain import explain

PROFILE_S = 10.0
TURNS_S = 45.0  # for timing and profiles, which no slow peer's compile may use up
LOAD_CALLS = 8  # in a row while the GPU is looked at
WRONG = 0.3  # of a result's size: half types lose less in any model here
MAX_TOP = 20  # kernels of a profile that are kept
MEMORY_PEERS = ("eager", "eager-naive")


def measure_rows(
    rows: Sequence[InferRow],
    plan: Plan,
    clock: Deadline,
    save: Save,
    wait_for_turn: Callable[[], None] | None = None,
) -> dict[str, Found]:
    """Measure Strop and its peers on the rows of one model, by the row's name. With a turn
    to wait for, all rows are prepared before it and timed behind it."""
    results: dict[str, Found] = {}
    ready: dict[str, _Prepared] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        group = Field.of(rows[0], plan, cache)
        for row in rows:
            refusal = clock.refusal(row.cost_s)
            if refusal:
                results[row.name] = {"skipped": refusal}
            else:
                result = results[row.name] = {"contenders": {}}
                note = partial(save, results)
                ready[row.name] = _prepare(row, group, plan, clock, result, note)
                if wait_for_turn is None:
                    _time(row, ready[row.name], group, plan, clock, result)
            save(results)
        if wait_for_turn is not None:
            wait_for_turn()
            for row in rows:
                if row.name in ready:
                    _time(row, ready[row.name], group, plan, clock, results[row.name])
                    save(results)
        for row in rows:  # last: the profiler leaves its traces
            is_profiled = row.kind != "memory" and not row.samples
            if row.name in ready and is_profiled and plan.where.type == "cuda":
                _profile(row, ready[row.name].calls, results[row.name], group, clock)
                save(results)
    return results


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Hold the calls of contenders that have run, and the exact result, if it is known."""

    calls: dict[str, timer.Call]
    exact: Tensor | None


def _prepare(
    row: InferRow,
    group: Field,
    plan: Plan,
    clock: Deadline,
    result: Found,
    note: Callable[[], None],
) -> _Prepared:
    """Run each contender twice. Fill in ``result`` but for what is timed."""
    case = replace(group.case, name=row.name, sizes=(row.size,), batches=(row.batch,))
    outputs: dict[str, Any] = {}
    if row.kind == "step" and not row.samples:
        result["references"] = attempt(partial(_references, case, plan, outputs))
        timer.give_back(plan.where)
    calls: dict[str, timer.Call] = {}
    for name in ("strop", *in_order(MEMORY_PEERS if row.kind == "memory" else plan.peers)):
        reason, limit_s = _terms(name, case, plan, clock)
        found = (
            {"skipped": reason}
            if reason
            else attempt(partial(_start, name, row, group, calls, outputs), limit_s)
        )
        result["contenders"][name] = found
        note()
    if "strop" in calls:
        result["counts"] = explain(group.target).summary()
        result["error"] = _error(row, outputs)
    known = outputs.get("references")
    return _Prepared(calls, known[1] if known else None)


def _time(
    row: InferRow, ready: _Prepared, group: Field, plan: Plan, clock: Deadline, result: Found
) -> None:
    """Time contenders in turns, and fill that in."""
    calls = ready.calls
    if not calls or row.kind == "memory":
        return
    group.wait()
    before = clock.left()
    samples = min(plan.samples, row.samples or plan.samples)
    how = (row.kind, plan.where, samples, plan.calls, clock)
    times = take_turns(calls, *how, is_long=bool(row.samples))
    for name, timing in times.items():
        result["contenders"][name] |= timing
    if ready.exact is not None:
        _check(calls, ready.exact, result["contenders"])
    if row.kind == "step" and not row.samples and plan.where.type == "cuda":
        for name, call in calls.items():
            result["contenders"][name]["load"] = environment.gpu_load(
                partial(timer.elapsed_ms, call, plan.where, LOAD_CALLS)
            )
    result["timing_s"] = round(before - clock.left(), 2)


def _check(calls: Mapping[str, timer.Call], exact: Tensor, contenders: dict[str, Found]) -> None:
    """Note how far from the exact result each is that was timed, relative to its size; say of those
    that have another one that they failed. Wrong numbers may even be faster: NaN take less power,
    and the clock rises."""
    for name, call in calls.items():
        off = accuracy.rms_error(call(), exact)
        contenders[name]["rms"] = off
        if not off <= WRONG:
            contenders[name]["failed"] = f"its result is {off:.2g} of its size off"


def _terms(name: str, case: BenchCase, plan: Plan, clock: Deadline) -> tuple[str, float]:
    """Return why a contender cannot run here and now, or nothing; and when it is given up."""
    if name == "strop":
        return "", 0.0
    peer = peers.peer_named(name)
    mine = Deadline(clock.end - TURNS_S) if peer.is_slow else clock
    return (
        peer.serves(case, plan.where) or mine.refusal(peer.first_s),
        min(peer.limit_s, mine.left()),
    )


def _references(case: BenchCase, plan: Plan, outputs: dict[str, Any]) -> Found:
    (outputs["references"],) = accuracy.references(case, plan.where)
    return {}


def _start(
    name: str, row: InferRow, group: Field, calls: dict[str, timer.Call], outputs: dict[str, Any]
) -> Found:
    num_calls = 1 if row.samples and name != "strop" else 2
    call, found, results = group.start(name, row.size, row.batch, num_calls=num_calls)
    calls[name] = call
    if name in ("strop", "eager"):
        outputs[name] = results
    return found


def _error(row: InferRow, outputs: Mapping[str, Any]) -> Found | None:
    """Return the error of the first and of the second call, which may run another way (a CUDA
    graph); of a long step, how far it is from eager's result."""
    if row.samples and row.kind == "step":
        if "eager" not in outputs:
            return None
        wide = outputs["eager"][0].double()
        return {"rms_to_eager": max(accuracy.rms_error(x, wide) for x in outputs["strop"])}
    known = outputs.get("references") or (outputs.get("eager", [None])[0], None)
    return accuracy.worst(outputs["strop"], *known)


def _profile(
    row: InferRow, calls: Mapping[str, timer.Call], result: Found, group: Field, clock: Deadline
) -> None:
    """Count the launches of everything whose graph is not made by hand; for a picture, only
    Strop's."""
    generated: set[str] = set()
    if "strop" in calls:
        generated = {k.name for graph in explain(group.target).graphs for k in graph.kernels}
    for name, call in calls.items():
        is_other = name != "strop"
        if is_other and (row.kind == "picture" or peers.peer_named(name).by_graph):
            continue
        refusal = clock.refusal(PROFILE_S)
        own = set() if is_other else generated
        found = (
            {"skipped": refusal}
            if refusal
            else attempt(partial(timer.profiled, call, own, 3 if row.kind == "step" else 1))
        )
        if is_there(found):
            found["top"] = found["top"][:MAX_TOP]
        result["contenders"][name]["profile"] = found


def measure_start(row: InferRow, plan: Plan, clock: Deadline, save: Save) -> Found:
    """Measure the seconds from ``optimize`` to the first result with an empty cache, and where they
    went."""
    case = row.case(DTYPES[plan.dtype_of(row)])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        found = compile_bench.measure_here(case, plan.where, cache, 1)
    first_s = found["first_s"]
    # what the background has done so far is nothing that anybody waited for
    stages = {name: s for name, s in found["stages_s"].items() if name != "kernels_later"}
    split = {name: stages[name] for name in ("capture", "libraries", "kernels") if name in stages}
    split["passes + codegen"] = sum(stages.values()) - sum(split.values())
    split["first run"] = first_s - sum(stages.values())
    second_s = found["shapes"][0]["second_s"]
    return {
        "contenders": {"strop": {"first_s": first_s, "second_s": second_s}},
        "split_s": {name: round(s, 3) for name, s in split.items()},
        "stages_s": found["stages_s"],
        "counts": found["counts"],
    }

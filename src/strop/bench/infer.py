"""Measure the table of speeds (``strop bench infer``). Rows of one model run in one process, in
turns with their peers; random shapes, switches and cold starts each run in a process of their
own."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strop.bench import environment, infer_measure, infer_variants, peers, report
from strop.bench.infer_contenders import Deadline, Found, Plan, Save, is_there
from strop.bench.infer_rows import InferRow, chosen_rows, groups_of
from strop.bench.queue_of_rows import LEAST_S, TAIL_S, Answer, as_ready
from strop.bench.worker import Task, Worker

SAME = ("gpu", "cpu", "torch", "triton", "cuda", "cudnn", "diffusers")  # or a peer runs again
ORDER = ("rows", "start", "random", "switches")  # the most important first
Step = Callable[[str, int], None]
Note = Callable[[dict[str, Any]], None]


def run(
    rows: Sequence[InferRow],
    plan: Plan,
    *,
    budget_s: float = 3600.0,
    out: Path | None = None,
    earlier: Path | None = None,
    is_apart: bool = True,
    jobs: int = 1,
    step: Step = lambda text, done: None,
    note: Note = lambda result: None,
) -> list[dict[str, Any]]:
    """Measure ``rows``; one JSON file a row in the folder ``out``, if any, and the same returned.

    What the budget does not allow is in there by name, with the reason. Slow peers that were not
    asked for come from the newest file in ``earlier`` of the same row, device and versions.
    ``step`` hears what is being measured, and how much is done; ``note`` of each row's result so
    far. Not ``is_apart``: everything runs
    in this process. ``jobs``: so many models are prepared at the same time, and timed one after
    another.
    """
    for name in plan.peers:
        peers.peer_named(name)
    clock = Deadline.of(budget_s)
    tasks = [(group, task) for group in groups_of(rows) for task in _tasks(group, plan)]
    tasks.sort(key=lambda pair: ORDER.index(pair[1]["do"]))
    found: dict[str, dict[str, Any]] = {}
    answers: Iterator[Answer]
    described = environment.describe(plan.where)
    described["commit"] = plan.commit or described["commit"]
    texts = [f"{', '.join(row.name for row in group)}: {task['do']}" for group, task in tasks]
    todo = [task for _, task in tasks]
    if not is_apart:
        answers = enumerate(_here(todo, texts, clock, step))
    elif jobs > 1:
        answers = as_ready(todo, texts, jobs, clock.left, step)
    else:
        answers = enumerate(_in_processes(todo, texts, clock, step))
    for place, answer in answers:
        group, task = tasks[place]
        for row in group:
            result = found.setdefault(row.name, _empty(row, plan, described))
            _put(result, task["do"], answer, is_first=row is group[0])
            _finish(result, plan, out, earlier)
            note(result)
    return list(found.values())


def _here(
    tasks: Sequence[Task], texts: Sequence[str], clock: Deadline, step: Step
) -> Iterator[dict[str, Any]]:
    for done, task in enumerate(tasks):
        step(texts[done], done)
        yield perform({**task, "until": _until(clock)}, lambda saved: None)


def _in_processes(
    tasks: Sequence[Task], texts: Sequence[str], clock: Deadline, step: Step
) -> Iterator[dict[str, Any]]:
    with contextlib.closing(Processes()) as processes:
        for done, task in enumerate(tasks):
            step(texts[done], done)
            yield processes.perform(task, clock, is_last=done == len(tasks) - 1)


def num_tasks(rows: Sequence[InferRow], plan: Plan) -> int:
    return sum(len(_tasks(group, plan)) for group in groups_of(rows))


def _tasks(group: Sequence[InferRow], plan: Plan) -> list[dict[str, Any]]:
    """Return what has to be done for the rows of one model."""
    kinds = ["start"] if group[0].kind == "start" else ["rows"]
    if group[0].kind in ("step", "picture"):
        kinds += ["random"] * bool(plan.random) + ["switches"] * plan.ablate
    return [
        {
            "do": kind,
            "rows": [row.name for row in group],
            "is_tiny": group[0].is_tiny,
            "plan": asdict(plan),
        }
        for kind in kinds
    ]


class Processes:
    """Keep one process for each task. The next is there before its task is, so that its imports
    cost nothing, but never beside a measured start."""

    def __init__(self, is_needed: bool = True) -> None:
        self._next = Worker() if is_needed else None

    def perform(self, task: Task, clock: Deadline, *, is_last: bool) -> dict[str, Any]:
        refusal = clock.refusal(LEAST_S)
        if refusal:
            return {"skipped": refusal}
        worker = self._next or Worker()
        is_cold = task["do"] == "start" or task.get("is_cold", False)
        self._next = None if is_last or is_cold else Worker()
        with worker:
            return worker.perform({**task, "until": _until(clock) - TAIL_S}, clock.left())

    def close(self) -> None:
        if self._next is not None:
            self._next.close()


def _until(clock: Deadline) -> float:
    """Return the end of the clock as a time that other processes know too."""
    return time.time() + clock.left()


def perform(
    task: Task, save: Save, wait_for_turn: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Do one task in this process. One that "has_turn" waits for it before it times anything."""
    clock = Deadline.of(task["until"] - time.time())
    plan = Plan(**{**task["plan"], "peers": tuple(task["plan"]["peers"])})
    rows = chosen_rows(task["rows"], tiny=task["is_tiny"])
    if task["do"] == "rows":
        turn = wait_for_turn if task.get("has_turn") else None
        return infer_measure.measure_rows(rows, plan, clock, save, turn)
    refusal = clock.refusal(rows[0].cost_s)
    if refusal:
        return {"skipped": refusal}
    measure = {
        "random": infer_variants.measure_random,
        "start": infer_measure.measure_start,
        "switches": infer_variants.measure_switches,
    }[task["do"]]
    return measure(rows[0], plan, clock, save)


def _put(result: dict[str, Any], what: str, answer: Found, *, is_first: bool) -> None:
    """Put ``answer`` into the result of a row. A process that was cut leaves what it had saved."""
    reason: Found = {k: answer[k] for k in ("failed", "skipped", "log") if k in answer}
    had: Found = answer.get("partial", {}) if "failed" in answer else answer
    name = result["row"]
    if what == "rows":
        result |= had.get(name) or reason or {"skipped": "its process ended before it"}
        if reason and name in had:
            result["cut"] = reason
    elif what == "start":
        result |= had | reason
    elif what == "random" or is_first:  # random shapes are those of the model
        result[what] = had | reason


def _empty(row: InferRow, plan: Plan, described: dict[str, Any]) -> dict[str, Any]:
    return {
        "row": row.name,
        "kind": "infer",
        "title": row.title,
        "measures": row.kind,
        "unit": row.unit,
        "numerics": row.numerics,
        "must": row.must,
        "stretch": row.stretch,
        "must_share": row.must_share,
        "stretch_share": row.stretch_share,
        "public": row.public,
        "model": row.model,
        "size": row.size,
        "batch": row.batch,
        "steps": row.steps,
        "is_tiny": row.is_tiny,
        "calls": plan.calls,
        "dtype": plan.dtype_of(row),
        "environment": described,
        "contenders": {},
    }


def _finish(result: dict[str, Any], plan: Plan, out: Path | None, earlier: Path | None) -> None:
    """Put results of earlier runs beside the new ones, then write the file."""
    if earlier is not None:
        for name, old in earlier_peers(result, earlier).items():
            if not is_there(result["contenders"].get(name, {"skipped": ""})):
                result["contenders"][name] = old
    result.pop("file", None)  # of an earlier task; no part of the JSON
    if out is not None:
        result["file"] = str(report.write_row(result, out, plan.where))


def earlier_peers(result: dict[str, Any], folder: Path) -> dict[str, Found]:
    """Return slow peers of the newest files with the same row, device and versions, with their
    dates."""
    slow = {peer.name for peer in peers.PEERS if peer.is_slow}
    kept = ("first_s",) if result["measures"] == "start" else None  # of the same model's step
    found: dict[str, Found] = {}
    for path in sorted(folder.glob("[PD][0-9]*.json"), reverse=True):
        old = json.loads(path.read_text())
        if not _is_comparable(old, result):
            continue
        for name, contender in old["contenders"].items():
            if name in slow and is_there(contender) and name not in found:
                values = {key: contender[key] for key in kept or contender}
                found[name] = {"from": old["environment"]["date"], **values}
    return found


def _is_comparable(old: dict[str, Any], new: dict[str, Any]) -> bool:
    if old.get("kind") != "infer" or "row" not in old:
        return False
    here, there = new["environment"], old["environment"]
    same = all(here.get(name) == there.get(name) for name in SAME)
    kind = "step" if new["measures"] == "start" else new["measures"]
    what = ("model", "batch", "steps", "dtype", "is_tiny")
    return (
        same
        and old["measures"] == kind
        and list(old["size"]) == list(new["size"])
        and all(old[k] == new[k] for k in what)
    )

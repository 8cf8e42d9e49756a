"""Measure the rows of training and the published ladder (``strop bench train``). Every contender
lives in a process of its own, so that one that fails or hangs costs no other, and all memory comes
back."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from strop.bench import environment, report, train_earlier, train_loader, train_measure
from strop.bench.infer import Processes
from strop.bench.infer_contenders import Deadline, Found, Save, attempt
from strop.bench.train_measure import Plan
from strop.bench.train_rows import contender_named
from strop.bench.train_work import MODELS, Contender, TrainRow
from strop.bench.worker import Task

Step = Callable[[str, int], None]


def run(
    rows: Sequence[TrainRow],
    plan: Plan,
    *,
    budget_s: float = 3600.0,
    out: Path | None = None,
    is_apart: bool = True,
    earlier: Sequence[Path] = (),
    step: Step = lambda text, done: None,
) -> list[Found]:
    """Measure ``rows``; one JSON file a row in the folder ``out``, if any, and the same returned.

    A file is written anew after each contender. What the budget does not allow is in there by
    name, with the reason. ``earlier`` are files of runs on this machine to go on with: what has
    its times there is not measured again. ``step`` hears what is being measured, and how much is
    done.
    """
    clock = Deadline.of(budget_s)
    described = environment.describe(plan.where)
    described["commit"] = plan.commit or described["commit"]
    had = train_earlier.read(earlier, rows)
    for result in had.values():
        train_earlier.check_same(result, described)
    rows = [train_earlier.left_of(row, had.get(row.name)) for row in rows]
    results, done = [], 0
    with contextlib.ExitStack() as stack:
        plan = _with_pictures(rows, plan, stack)
        processes = stack.enter_context(contextlib.closing(Processes(is_apart)))
        for row in rows:
            result = had.get(row.name) or _empty(row, described)
            results.append(result)
            for found in result["contenders"].values():
                plan = _with_best_loader(plan, found)
            if row.name in had:  # a table without anything left to measure is a file, too
                _write(result, plan, out)
            for contender in row.contenders:
                step(f"{row.name}: {contender.name}", done)
                done += 1
                is_last = done == num_contenders(rows)
                found = _measured(
                    row, contender, plan, clock, processes if is_apart else None, is_last
                )
                own = {k: described[k] for k in ("date", "commit")} if row.name in had else {}
                result["contenders"][contender.name] = _described(contender) | found | own
                plan = _with_best_loader(plan, found)
                _write(result, plan, out)
    return results


def num_contenders(rows: Sequence[TrainRow]) -> int:
    return sum(len(row.contenders) for row in rows)


def _with_pictures(rows: Sequence[TrainRow], plan: Plan, stack: contextlib.ExitStack) -> Plan:
    """Write files for the loaders, if there are any."""
    feeding = [
        c for row in rows for c in row.contenders if c.setup.loaders or c.setup.takes_best_loader
    ]
    if not feeding:
        return plan
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    is_tiny = rows[0].is_tiny
    files = train_loader.TINY_FILES if is_tiny else train_loader.FILES
    train_loader.write_pictures(Path(folder), MODELS[feeding[0].work.model].pixels, files)
    return replace(plan, pictures=folder, files=files)


def _measured(
    row: TrainRow,
    contender: Contender,
    plan: Plan,
    clock: Deadline,
    processes: Processes | None,
    is_last: bool,
) -> Found:
    """Return numbers, or why there are none; or both, of a process that was cut."""
    needed = contender.cost_s if processes is not None else 0.1
    reason = train_measure.refusal(contender) or clock.refusal(needed)
    if reason:
        return {"skipped": reason}
    mine = Deadline.of(min(clock.left(), contender.limit_s))
    task = {
        "do": "train",
        "row": row.name,
        "contender": contender.name,
        "is_tiny": row.is_tiny,
        "plan": asdict(plan),
        "is_cold": contender.setup.compiler == "strop",
    }
    if processes is None:
        return perform({**task, "until": time.time() + mine.left()}, lambda saved: None)
    answer = processes.perform(task, mine, is_last=is_last)
    return {**answer.pop("partial", {}), **answer}


def perform(task: Task, save: Save) -> Found:
    """Do one task in this process: what it finds, or has found when it fails, and why."""
    told = task["plan"]
    loader = told["best_loader"]
    plan = Plan(**{**told, "best_loader": None if loader is None else tuple(loader)})
    contender = contender_named(task["row"], task["contender"], tiny=task["is_tiny"])
    clock = Deadline.of(task["until"] - time.time())
    had: Found = {}

    def note(found: Found) -> None:
        had.update(found)
        save(found)

    found = attempt(partial(train_measure.measure, contender, plan, clock, note))
    return {**had, **found}


def _described(contender: Contender) -> Found:
    return {
        "note": contender.note,
        "published": contender.published,
        "work": asdict(contender.work),
        "does": contender.work.text,
    }


def _with_best_loader(plan: Plan, found: Found) -> Plan:
    """Give the loader that a sweep has found the best to the rungs after it."""
    if "loaders" not in found or "loader" not in found:
        return plan
    best = found["loader"]
    return replace(plan, best_loader=(best["workers"], best["is_pinned"]))


def _empty(row: TrainRow, described: Found) -> Found:
    return {
        "row": row.name,
        "kind": "train",
        "title": row.title,
        "unit": row.unit,
        "must": row.must,
        "stretch": row.stretch,
        "is_tiny": row.is_tiny,
        "published_split_ms": dict(row.published_split),
        "environment": described,
        "contenders": {},
    }


def _write(result: dict[str, Any], plan: Plan, out: Path | None) -> None:
    result.pop("file", None)  # of an earlier contender; no part of the JSON
    train_earlier.in_order(result)
    if out is not None:
        result["file"] = str(report.write_row(result, out, plan.where))

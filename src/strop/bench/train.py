"""Measure the rows of training and the published ladder (``strop bench train``). Every contender
lives in a process of its own, so that one that fails or hangs costs no other, and all memory comes
back."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from strop.bench import environment, mock_set, report, train_earlier, train_loader, train_measure
from strop.bench.infer import Processes
from strop.bench.infer_contenders import Deadline, Found, Save, attempt
from strop.bench.queue_of_rows import TAIL_S
from strop.bench.train_group import Places, perform_in_group
from strop.bench.train_measure import Plan
from strop.bench.train_rows import contender_named
from strop.bench.train_work import MODELS, Contender, TrainRow
from strop.bench.worker import Task
from strop.train.places import GroupPlace, place_of_this_process
from strop.train.ranks import group

Step = Callable[[str, int], None]
RANK_TIMEOUT_S = 600  # of a rank that waits for another, which compiles


def run(
    rows: Sequence[TrainRow],
    plan: Plan,
    *,
    budget_s: float = 3600.0,
    out: Path | None = None,
    is_apart: bool = True,
    earlier: Sequence[Path] = (),
    places: Places | None = None,
    step: Step = lambda text, done: None,
) -> list[Found]:
    """Measure ``rows``; one JSON file a row in the folder ``out``, if any, and the same returned.

    A file is written anew after each contender. What the budget does not allow is in there by
    name, with the reason. ``earlier`` are files of runs on this machine to go on with: what has
    its times there is not measured again. ``places`` are those of a group that a launcher has
    started; else this machine has all processes. ``step`` hears what is being measured, and how
    much is done.
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
            result = had.get(row.name) or _empty(row, described, plan.processes)
            results.append(result)
            for found in result["contenders"].values():
                plan = _with_best_loader(plan, found)
            if row.name in had:  # a table without anything left to measure is a file, too
                _write(result, plan, out)
            for contender in row.contenders:
                step(f"{row.name}: {contender.name}", done)
                done += 1
                here = replace(plan, row=row.name, log=_log_of(row, contender, plan, out))
                how: Perform = _inside
                if places is not None or train_measure.count_of(contender, plan) > 1:
                    how = partial(_together, places)
                elif is_apart:
                    how = partial(processes.perform, is_last=done == num_contenders(rows))
                found = _measured(row, contender, here, clock, how)
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
    mock_set.write(Path(folder), MODELS[feeding[0].work.model].pixels, files)
    return replace(plan, pictures=folder, files=files)


Perform = Callable[[Task, Deadline], Found]


def _measured(
    row: TrainRow, contender: Contender, plan: Plan, clock: Deadline, perform: Perform
) -> Found:
    """Return numbers, or why there are none; or both, of a process that was cut."""
    needed = contender.cost_s if plan.where.type == "cuda" else 0.1
    reason = train_measure.refusal(contender, plan) or _too_few(contender, plan)
    reason = reason or clock.refusal(needed)
    if reason:
        return {"skipped": reason}
    mine = Deadline.of(min(clock.left(), contender.limit_s))
    task = {
        "do": "train",
        "row": row.name,
        "contender": contender.name,
        "is_tiny": row.is_tiny,
        "batch": row.batch,
        "count": train_measure.count_of(contender, plan),
        "plan": asdict(plan),
        "is_cold": contender.setup.compiler == "strop",
    }
    answer = perform(task, mine)
    return {**answer.pop("partial", {}), **answer}


def _too_few(contender: Contender, plan: Plan) -> str:
    """Return that this machine has too few GPUs, or nothing."""
    count, where = train_measure.count_of(contender, plan), plan.where
    if where.type != "cuda" or plan.is_spread:
        return ""
    here = torch.cuda.device_count()
    return "" if here >= count else f"needs {count} GPUs, and this machine has {here}"


def _inside(task: Task, mine: Deadline) -> Found:
    """Perform in this process."""
    return perform({**task, "until": time.time() + mine.left()}, lambda saved: None)


def _together(places: Places | None, task: Task, mine: Deadline) -> Found:
    limit_s = mine.left()
    task = {**task, "until": time.time() + limit_s - TAIL_S}
    if places is not None:
        return places.perform(task, limit_s)
    return perform_in_group(task, task["count"], limit_s)


def _log_of(row: TrainRow, contender: Contender, plan: Plan, out: Path | None) -> str:
    """Return the file of the log of a contender, if results are written at all."""
    if out is None or not plan.log_freq:
        return ""
    count = train_measure.count_of(contender, plan)
    name = f"{report.row_name(_empty(row, {}, count))}-{contender.name}"
    return str(out / f"{name}_{environment.device_label(plan.where)}.jsonl")


def perform(task: Task, save: Save) -> Found:
    """Do one task in this process: what it finds, or has found when it fails, and why."""
    told = task["plan"]
    loader = told["best_loader"]
    plan = Plan(**{**told, "best_loader": None if loader is None else tuple(loader)})
    contender = contender_named(
        task["row"], task["contender"], tiny=task["is_tiny"], batch=task["batch"]
    )
    clock = Deadline.of(task["until"] - time.time())
    had: Found = {}

    def note(found: Found) -> None:
        had.update(found)
        save(found)

    def measured() -> Found:
        place = place_of_this_process() if task["count"] > 1 else GroupPlace()
        stacks = Path(tempfile.gettempdir(), "strop-bench")  # of ranks that are stuck
        joined = group(place, plan.where.type, RANK_TIMEOUT_S, stacks)
        with _pictures_here(plan, contender) as here, joined as ranks:
            return train_measure.measure(contender, here, clock, note, ranks)

    found = attempt(measured)
    return {**had, **found}


@contextlib.contextmanager
def _pictures_here(plan: Plan, contender: Contender) -> Iterator[Plan]:
    """Give the plan with pictures that this machine has: another one may have written them."""
    if not plan.pictures or Path(plan.pictures).is_dir():
        yield plan
        return
    with tempfile.TemporaryDirectory() as folder:
        mock_set.write(Path(folder), MODELS[contender.work.model].pixels, plan.files)
        yield replace(plan, pictures=folder)


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


def _empty(row: TrainRow, described: Found, processes: int = 1) -> Found:
    return {
        "row": row.name,
        "kind": "train",
        "title": row.title,
        "unit": row.unit,
        "must": row.must,
        "stretch": row.stretch,
        "is_tiny": row.is_tiny,
        "processes": processes,
        "batch": row.batch,
        "against": row.against,
        "any_batch": row.any_batch,
        "published_split_ms": dict(row.published_split),
        "environment": described,
        "contenders": {},
    }


def _write(result: dict[str, Any], plan: Plan, out: Path | None) -> None:
    result.pop("file", None)  # of an earlier contender; no part of the JSON
    train_earlier.in_order(result)
    if out is not None:
        result["file"] = str(report.write_row(result, out, plan.where))

"""Find out by running what becomes of each feature of diffusers: docs/compatibility.md.

A row is one pipeline, scheduler, adapter, cache or way of offloading, built from a configuration at
tiny widths with random weights. It is drawn in eager and optimised, and both pictures are compared.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import strop
from strop.api import dispatchers_of
from strop.bench.pipelines.actions import ACTIONS, CACHED, PICTURED, STABLE, UNET, Action
from strop.bench.pipelines.all import PIPELINES
from strop.bench.pipelines.not_built import NOT_BUILT
from strop.bench.pipelines.tiny import TinyPipeline, drawn, modules_of, takes
from strop.bench.pipelines.twins import BETWEEN, Drawn, attempt, nearness, outcome
from strop.dispatch.dispatcher import Dispatcher
from strop.wording import counted

COMPILED, PARTLY, EAGER = "compiled", "partly in eager", "in eager"
REFUSED, DIFFERS, NOT_RUN = "fails", "differs", "not run"
NEAR = 60.0  # decibels: below, differences could be seen in pictures of 8 bits
LONGEST = 200  # letters of a reason
EVERYWHERE = ("sd15", "flux")  # pipelines that schedulers, adapters and offloading are tried on
FEATURES_ON = {
    STABLE: ("sd15",),
    UNET: ("sd15",),
    CACHED: ("flux",),
    PICTURED: ("sd15-ip-adapter",),
}
SECTIONS = {
    "pipeline": "Pipelines",
    "scheduler": "Schedulers",
    "feature": "Adapters, caches, offloading and other switches",
}


@dataclass(frozen=True, slots=True)
class CompatibilityRow:
    """Hold what became of a feature. ``graphs``: the most of one component, over two sizes of
    pictures. ``why``: reasons for what runs in eager, or what was raised; ``left_out``: modules
    that ``optimize`` does not compile."""

    kind: str
    name: str
    on: str  # the class of the pipeline, or the tiny pipeline that a feature was tried on
    status: str
    graphs: int = 0
    decibels: float | None = None  # None: exactly equal, or nothing to compare
    why: str = ""
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """Describe a row to be made: its key, and what makes it."""

    key: str
    make: Callable[[strop.Options], CompatibilityRow]


def tasks() -> Iterator[Task]:
    for case in PIPELINES:
        yield Task(f"pipeline/{case.name}/{case.kind}", partial(pipeline_row, case))
    for name in schedulers():
        yield Task(f"scheduler/{name}/", partial(scheduler_row, name))
    by_name = {case.name: case for case in PIPELINES}
    for action in ACTIONS:
        for name in FEATURES_ON.get(action.on, EVERYWHERE) if action.feature else ():
            yield Task(
                f"feature/{action.feature}/{name}",
                partial(feature_row, action, by_name[name]),
            )


# rows


def pipeline_row(case: TinyPipeline, options: strop.Options) -> CompatibilityRow:
    """Draw two pictures of one size, and one of another size where eager draws that, and return the
    row."""
    try:
        eager = case.made()
    except (ImportError, NameError) as error:  # a package of its own is missing
        return CompatibilityRow("pipeline", case.name, case.kind, **_judged(error, error, {}))
    fast = strop.optimize(case.made(), options=options)
    dispatchers = dispatchers_of(fast)
    wanted, found = (attempt(partial(_twice, case, pipe)) for pipe in (eager, fast))
    wider = attempt(partial(drawn, case, eager, **OTHER_SIZE)) if _has_sizes(case, eager) else None
    if isinstance(wanted, list) and isinstance(wider, list):
        wanted = wanted + wider
        found = attempt(partial(_with_another, found, case, fast))
    row = _judged(wanted, found, dispatchers)
    left = [type(m).__name__ for m in modules_of(fast) if not _is_compiled(m)]
    return CompatibilityRow("pipeline", case.name, case.kind, **row, left_out=", ".join(left))


OTHER_SIZE = {"height": 64, "width": 32}


def _has_sizes(case: TinyPipeline, pipe: Any) -> bool:
    pictures = ("image", "control_image", "conditioning_frames")  # of the first size
    return takes(pipe, "height") and not any(takes(pipe, name) for name in pictures)


def _with_another(found: Drawn, case: TinyPipeline, pipe: Any) -> list[Tensor]:
    if isinstance(found, Exception):
        raise found
    return found + drawn(case, pipe, **OTHER_SIZE)


def _is_compiled(module: torch.nn.Module) -> bool:
    return any(isinstance(m.__dict__.get("forward"), Dispatcher) for m in module.modules())


def _twice(case: TinyPipeline, pipe: Any) -> list[Tensor]:
    return drawn(case, pipe) + drawn(case, pipe, seed=4)


def schedulers() -> list[str]:
    import diffusers

    return [name for name in dir(diffusers) if name.endswith("Scheduler") and name[0].isupper()]


# as the files of Stable Diffusion 1.x have it
AS_IN_MODELS: dict[str, dict[str, Any]] = {"PNDMScheduler": {"skip_prk_steps": True}}


def scheduler_row(name: str, options: strop.Options) -> CompatibilityRow:
    """Run a scheduler with Stable Diffusion, or with Flux if that pipeline cannot use it."""
    try:
        kind = getattr(importlib.import_module("diffusers"), name)
        kind()
    except (ImportError, TypeError) as error:  # another package, or arguments of its own
        return CompatibilityRow("scheduler", name, "", NOT_RUN, why=_first_line(error))
    first = None
    for case in (case for case in PIPELINES if case.name in EVERYWHERE):

        def made(case: TinyPipeline = case) -> Any:
            pipe = case.made()
            config = dict(pipe.scheduler.config) if case.name == "sd15" else {}
            pipe.scheduler = kind.from_config(config | AS_IN_MODELS.get(name, {}))
            return pipe

        eager, fast = made(), strop.optimize(made(), options=options)
        dispatchers = dispatchers_of(fast)
        wanted, found = (attempt(partial(_twice, case, pipe)) for pipe in (eager, fast))
        row = CompatibilityRow("scheduler", name, case.name, **_judged(wanted, found, dispatchers))
        if row.status != NOT_RUN:
            return row
        first = first or row
    assert first is not None
    return first


def feature_row(action: Action, case: TinyPipeline, options: strop.Options) -> CompatibilityRow:
    dispatchers: dict[str, Dispatcher] = {}
    found = outcome(case, action, BETWEEN, options, seen=dispatchers)
    assert found is not None, "FEATURES_ON names a pipeline that has no such thing"
    least = action.decibels if action.decibels < NEAR else NEAR
    return CompatibilityRow(
        "feature", action.feature, case.name, **_judged(found.eager, found.fast, dispatchers, least)
    )


def _judged(
    eager: Drawn, fast: Drawn, dispatchers: Mapping[str, Dispatcher], least: float = NEAR
) -> dict[str, Any]:
    if isinstance(eager, Exception):
        return {"status": NOT_RUN, "why": f"in eager: {_first_line(eager)}"}
    if isinstance(fast, Exception):
        return {"status": REFUSED, "why": _first_line(fast)}
    used = {
        name: d.counters
        for name, d in dispatchers.items()
        if d.variants.all or d.counters.eager_calls or d.cached.serving
    }
    reasons = [f"{name}: {why[:LONGEST]}" for name, c in used.items() for why in c.fallbacks]
    decibels = nearness(fast, eager)
    is_compiled = any(d.variants.all for d in dispatchers.values())
    is_partly = any(c.eager_calls for c in used.values())
    is_partly |= any(d.cached.serving for d in dispatchers.values())  # around them is eager
    status = EAGER if not is_compiled and is_partly else PARTLY if is_partly else COMPILED
    return {
        "status": status if decibels >= least else DIFFERS,
        "graphs": max((len(d.variants.all) for d in dispatchers.values()), default=0),
        "decibels": round(decibels, 1) if math.isfinite(decibels) else None,
        "why": "; ".join(reasons),
    }


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:LONGEST]


# the page


def key_of(row: Mapping[str, Any]) -> str:
    """Return the key of the task that makes a row."""
    on = "" if row["kind"] == "scheduler" else row["on"]
    return f"{row['kind']}/{row['name']}/{on}"


def as_json(rows: Sequence[CompatibilityRow]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def markdown(result: Mapping[str, Any]) -> str:
    """Return the page docs/compatibility.md."""
    rows, found = [CompatibilityRow(**row) for row in result["rows"]], result["environment"]
    counts = ", ".join(
        f"{sum(row.status == status for row in rows)} {status}"
        for status in (COMPILED, PARTLY, EAGER, REFUSED, DIFFERS, NOT_RUN)
    )
    lines = [
        "# Compatibility",
        "",
        "`python benchmarks/compatibility.py --write docs/compatibility.md` writes this page. It",
        "draws with every pipeline, scheduler, adapter, cache and way of offloading of diffusers",
        "that can be built from a configuration, at tiny widths with random weights, in eager and",
        "optimised, and compares the results.",
        "",
        "- **compiled**: no call ran in eager; the last column names operators that torch runs.",
        "- **partly in eager**: some calls ran in eager, for the reason in the last column.",
        "- **fails**: the optimised pipeline raises an error where eager does not.",
        f"- **differs**: the results are less than {NEAR:.0f} dB (PSNR) apart.",
        "- **not run**: eager itself raises an error.",
        "",
        "The column *graphs* is the largest number of graphs that one component needs, over two",
        "sizes of pictures where the pipeline takes a size.",
        "",
        f"{counted(len(rows), 'row')}: {counts}. {found['date'][:10]}, torch {found['torch']},"
        f" diffusers {found['diffusers']}, transformers {found['transformers']}, CPU, fp32.",
        "",
    ]
    for kind, title in SECTIONS.items():
        lines += [f"## {title}", "", *_table([row for row in rows if row.kind == kind]), ""]
    left = {task.key for task in tasks()} - {key_of(asdict(row)) for row in rows}
    if left:
        lines += ["## Not run yet", "", ", ".join(sorted(left)), ""]
    lines += ["## Not built", "", "| pipeline | why |", "| --- | --- |"]
    lines += [f"| {name} | {why} |" for name, why in sorted(NOT_BUILT.items())]
    return "\n".join([*lines, ""])


def _table(rows: Sequence[CompatibilityRow]) -> list[str]:
    lines = [
        "| | with | | graphs | dB | why, and what is not compiled |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        why = row.why + (
            f"{'; ' if row.why else ''}not compiled: {row.left_out}" if row.left_out else ""
        )
        cells = (row.name, row.on, row.status, str(row.graphs or ""), _decibels(row), why)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return lines


def _decibels(row: CompatibilityRow) -> str:
    if row.status in (NOT_RUN, REFUSED):
        return ""
    return "equal" if row.decibels is None else f"{row.decibels:.0f}"

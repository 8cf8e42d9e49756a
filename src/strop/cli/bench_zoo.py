"""Run ``strop bench models``: the census of the zoo, with times if they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from strop.cli.tables import known, show, wrong
from strop.wording import counted

if TYPE_CHECKING:
    from strop.bench.zoo_model import ZooModel
    from strop.bench.zoo_times import TimesPlan


def chosen(only: str) -> list[ZooModel]:
    """Return the models of these names, or all."""
    from strop.bench.zoo import ZOO

    wanted = [name for name in only.split(",") if name]
    known("--only", wanted, [model.name for model in ZOO])
    return [model for model in ZOO if not wanted or model.name in wanted]


def times_plan(
    device: str, batches: str, peers: str, budget_s: float, jobs: int, num_shapes: int
) -> TimesPlan:
    """Find what can be wrong before any work."""
    from strop.bench import zoo_times
    from strop.options import Options

    numbers = [text for text in batches.split(",") if text]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise typer.BadParameter(f"{batches!r} are no batches", param_hint="'--batches'")
    with wrong("--peers"):
        found = zoo_times.peers_on(device, peers.split(","))
    return zoo_times.TimesPlan(
        device,
        Options.from_environment(),
        tuple(map(int, numbers)) or zoo_times.BATCHES,
        found,
        jobs=jobs,
        budget_s=budget_s,
        num_shapes=num_shapes,
    )


def census(models: Sequence[ZooModel], device: str, num_shapes: int) -> dict[str, Any]:
    """Judge the models under a progress bar."""
    import torch

    from strop.bench import census as bench_census
    from strop.options import Options

    where, options = torch.device(device), Options.from_environment()
    with _progress(len(models)) as step:
        return bench_census.run(models, where, options, lambda v: step(v.name), num_shapes)


def timed(
    models: Sequence[ZooModel], plan: TimesPlan, out: Path | None, *, again: bool
) -> dict[str, Any]:
    """Judge and time the models under a progress bar. ``out`` is written whenever one is ready, and
    what it has already of the same peers and batches is kept, but with ``again``."""
    from strop.bench import report, zoo_runs

    done = _rows(out, plan) if out is not None and out.exists() and not again else {}
    with _progress(len(models), sum(model.name in done for model in models)) as step:

        def each(name: str, result: dict[str, Any]) -> None:
            if out is not None:
                report.write_json(result, out)
            step(name)

        return zoo_runs.run(models, plan, done, each)


def _rows(out: Path, plan: TimesPlan) -> dict[str, Any]:
    """Return the rows of an earlier run by the names of their models. Raises BadParameter where the
    file is of another kind of run."""
    import json

    import torch

    from strop.bench import environment

    try:
        told = json.loads(out.read_text())
        if not isinstance(told, dict) or "times" not in told:
            raise ValueError("it has no times")
    except ValueError as error:
        raise typer.BadParameter(
            f"{out} is no result of --times ({error}): give --again, or another file",
            param_hint="'--out'",
        ) from error
    wanted: dict[str, Any] = {
        "batches": [*plan.batches],
        "peers": [*plan.peers],
        "num_shapes": plan.num_shapes,
    }
    had = {**told["times"], "num_shapes": told.get("num_shapes")}
    before, compared = told.get("environment", {}), ("torch", "gpu", "cpu", "commit")
    here = environment.describe(torch.device(plan.device))
    differs = [key for key in wanted if had.get(key) != wanted[key]]
    differs += [key for key in compared if before.get(key) != here.get(key)]
    if differs:
        raise typer.BadParameter(
            f"{out} is of another run ({', '.join(differs)}): give --again, or another file",
            param_hint="'--out'",
        )
    return {row["name"]: row for row in told["models"]}


@contextmanager
def _progress(total: int, done: int = 0) -> Iterator[Callable[[str], None]]:
    """Show a progress bar, and keep the compiler's warnings off the table."""
    from strop.cli.models import quieten
    from strop.cli.stages import only_errors, progress_bar

    quieten()
    with only_errors(), progress_bar() as bar:
        task = bar.add_task("models", total=total, completed=done, note="")
        yield lambda name: bar.update(task, advance=1, note=name)


def write(result: dict[str, Any], out: Path | None, page: Path | None) -> None:
    from strop.bench import census as bench_census
    from strop.bench import report, zoo_times

    if out is not None:
        result["file"] = str(report.write_json(result, out))
    if page is not None:
        page.write_text(bench_census.markdown(result), encoding="utf-8")
    header, *rows = bench_census.rows_of(result)
    show(header, rows, result)
    print(f"passed: {result['num_good']} of {counted(result['num_models'], 'model')}")
    for line in zoo_times.verdict(result) if "times" in result else ():
        print(line)

"""Run ``strop bench models``: the census of the zoo, with times if they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
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


def times_plan(device: str, batches: str, peers: str, budget_s: float, jobs: int) -> TimesPlan:
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
    )


def census(
    models: Sequence[ZooModel], device: str, num_shapes: int, plan: TimesPlan | None
) -> dict[str, Any]:
    """Judge the models, and time them by a plan, under a progress bar, which also keeps the
    compiler's warnings off the table."""
    import torch

    from strop.bench import census as bench_census
    from strop.bench import zoo_times
    from strop.cli.models import quieten
    from strop.cli.stages import only_errors, progress_bar
    from strop.options import Options

    quieten()
    with only_errors(), progress_bar() as bar:
        task = bar.add_task("models", total=len(models) * (1 if plan is None else 2), note="")

        def step(name: str) -> None:
            bar.update(task, advance=1, note=name)

        result = bench_census.run(
            models,
            torch.device(device),
            Options.from_environment(),
            lambda verdict: step(verdict.name),
            num_shapes,
        )
        if plan is not None:
            found = zoo_times.run(models, plan, step)
            bench_census.add_times(result, plan, found)
    return result


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

"""Run ``strop bench models --speed``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strop.cli.arguments import DeviceName
from strop.cli.bench_infer import plan_of, split_peers
from strop.cli.tables import show, wrong

BatchesOption = Annotated[
    str,
    typer.Option(
        help="With --speed or --times, time these batches only; put commas between them. "
        "[dim]\\[default: 1,8,32; with --times 1,4,16][/]",
        show_default=False,
    ),
]
JobsOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="With --speed or --times, prepare so many at the same time. Each is timed alone.",
    ),
]
TimesOption = Annotated[
    bool,
    typer.Option(
        "--times",
        help="Time each model as well: on a CPU on one thread, beside eager; on a GPU also beside "
        "Inductor in a CUDA graph.",
    ),
]
SpeedPeersOption = Annotated[
    str, typer.Option(help="With --speed or --times, measure these peers; put commas between them.")
]


def timed(
    only: str,
    batches: str,
    peers: str,
    device: DeviceName,
    out: Path | None,
    page: Path | None,
    budget_s: float,
    *,
    again: bool,
    tiny: bool,
    jobs: int,
) -> None:
    """Time networks, show the table, and write it into ``page``."""
    from strop.bench import speed
    from strop.cli.models import quieten
    from strop.cli.stages import only_errors, progress_bar

    names = [name for name in only.split(",") if name]
    numbers = [text for text in batches.split(",") if text]
    if not all(number.isdecimal() for number in numbers):
        raise typer.BadParameter(f"{batches!r} are no numbers", param_hint="'--batches'")
    with wrong("--only"):
        rows = speed.chosen(names, [int(number) for number in numbers], tiny=tiny)
    plan = plan_of(device, tiny, "", split_peers(peers))
    quieten()
    with wrong("--out"), only_errors(), progress_bar() as bar:
        task = bar.add_task("measuring", total=len({row.model for row in rows}), note="")
        result = speed.run(
            rows,
            plan,
            out=out,
            budget_s=budget_s,
            is_apart=not tiny,
            again=again,
            jobs=jobs,
            step=lambda note, done: bar.update(task, note=note, completed=done),
        )
    header, *lines = speed.rows_of(result)
    show(header, lines, {})
    print(speed.verdict(result))
    if page is not None:
        page.write_text(speed.markdown(result) + "\n", encoding="utf-8")
    if out is not None:
        print(f"written: {out}")

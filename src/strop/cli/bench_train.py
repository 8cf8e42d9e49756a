"""Time training steps beside their peers, and the published ladder (``strop bench train``)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from strop.cli import arguments
from strop.cli.arguments import ArchOption, DeviceName, DeviceOption
from strop.cli.mistakes import CommandError, errors, plain, reported, require_diffusion
from strop.cli.tables import OutOption, show, wrong

EXAMPLES = """[bold]Rows[/]
- P8: SD1.5 at 512x512, full fine-tune, batch 8, VAE and text encoder in the loop
- P9: the same at batch 32, with latents and text cached
- P11: DreamBooth of SD1.5's full UNet, batch 1
- P11-lora: LoRA of rank 16, batch 1, cached
- P11x: SDXL at 1024x1024, full fine-tune, batch 4, cached

[bold]Examples[/]
$ strop bench train P8 --device cpu --tiny   # any machine: tries the code, not the speed
$ strop bench train --ladder --budget 1500 -o benchmarks/results
$ strop bench train --ladder --resume ladder_h100_2026-11-22.json -o .   # measures what was cut
$ strop bench train P8 P9 --only strop,diffusers --samples 50 -o benchmarks/results
"""
RowsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="Measure these rows only: P8, P9, P11 (with P11-lora) or P11x. "
        "[dim]\\[default: all, but with --ladder none][/]",
        show_default=False,
    ),
]
RowsOption = Annotated[list[str] | None, typer.Option("--rows", help="The same.", hidden=True)]
LadderOption = Annotated[
    bool,
    typer.Option(
        "--ladder",
        help="Measure the published ladder of speed-ups, each rung of which adds one change, and "
        "then Strop's own rungs.",
    ),
]
OnlyOption = Annotated[
    str, typer.Option(help="Measure these contenders or rungs only; put commas between them.")
]
ResumeOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Measure what this JSON file of an earlier run on this machine lacks. The "
        "option may be repeated.",
        show_default=False,
    ),
]
BudgetOption = Annotated[
    float,
    typer.Option(min=1.0, help="Take at most this many seconds, and name what does not fit."),
]
WarmUpOption = Annotated[
    int, typer.Option(min=1, help="Make this many steps before those that are timed.")
]
PlotsOption = Annotated[
    Path | None,
    typer.Option(
        help="Draw the plots into this folder. [dim]\\[default: that of -o][/]", show_default=False
    ),
]
TinyOption = Annotated[
    bool,
    typer.Option("--tiny", help="Run the same code with tiny widths and sizes, in seconds."),
]
CommitOption = Annotated[
    str, typer.Option(help="Noted in the JSON instead of the checkout's.", hidden=True)
]


@reported
def train(
    rows: RowsArgument = None,
    more_rows: RowsOption = None,
    ladder: LadderOption = False,
    only: OnlyOption = "",
    out: OutOption = None,
    resume: ResumeOption = None,
    plots: PlotsOption = None,
    budget: BudgetOption = 3600.0,
    samples: Annotated[
        int, typer.Option(min=3, help="Time this many steps of each contender.")
    ] = 20,
    warm_up: WarmUpOption = 5,
    device: DeviceOption = DeviceName.auto,
    arch: ArchOption = 0,
    tiny: TinyOption = False,
    commit: CommitOption = "",
) -> None:
    """Time training steps of Strop, of diffusers' script and of compiled torch.

    Models have random weights at full size; nothing is downloaded. Every contender has a process
    of its own. Each row becomes a JSON file and a plot; the file grows with every contender.
    """
    require_diffusion()
    from strop.bench.train_measure import Plan
    from strop.bench.train_rows import chosen_rows

    for folder in (out, plots):
        arguments.check_folder(folder)
    names = [*(rows or ()), *(more_rows or ())]
    with wrong("ROWS, --only"):
        chosen = chosen_rows(
            names, ladder=ladder, tiny=tiny, only=[n for n in only.split(",") if n]
        )
    plan = Plan(_device(device, tiny), samples, warm_up, commit=commit)
    results = _measured(
        chosen, plan, budget_s=budget, out=out, is_apart=not tiny, earlier=resume or ()
    )
    _show(results, plots or out)


def _device(device: DeviceName, tiny: bool) -> str:
    where = arguments.chosen_device(device)
    if where == "cpu" and not tiny:
        raise CommandError(
            "full-size rows need a GPU, and there is none here (or --device cpu was asked for);"
            " --device cpu --tiny runs the same code with tiny models"
        )
    return where


def _measured(rows: Any, plan: Any, **how: Any) -> list[dict[str, Any]]:
    """Measure with a line for each contender on standard error: a full run takes half an hour."""
    from strop.bench import train as bench_train
    from strop.cli.models import quieten
    from strop.cli.stages import only_errors

    quieten()
    total, screen = bench_train.num_contenders(rows), errors()

    def step(text: str, done: int) -> None:
        screen.print(plain(f"[{done + 1}/{total}] {text}"))

    with only_errors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Dynamo says of diffusers' code
        return bench_train.run(rows, plan, step=step, **how)


def _show(results: list[dict[str, Any]], plots: Path | None) -> None:
    from strop.bench import train_plots, train_report

    for table in (
        train_report.rows_of(results),
        train_report.split_rows_of(results),
        train_report.loader_rows_of(results),
    ):
        header, *lines = table
        if lines:
            show(header, lines, {})
            print()
    files = [result["file"] for result in results if "file" in result]
    drawn = [train_plots.draw(result, plots) for result in results if plots]
    for file in (*files, *(str(path) for path in drawn if path)):
        print(f"written: {file}")

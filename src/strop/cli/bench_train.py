"""``strop bench train``: training steps beside their peers, and the published ladder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from strop.cli import arguments
from strop.cli.arguments import Device, DeviceOption
from strop.cli.mistakes import CommandError, errors, plain, reported, require_diffusion
from strop.cli.tables import OutOption, show, wrong

EXAMPLES = (
    "[bold]Rows[/]\n\n"
    "P8 SD1.5 512², full fine-tune, batch 8, VAE and text in the loop; P9 batch 32, cached\n\n"
    "P11 DreamBooth of the full UNet, batch 1; P11-lora LoRA of rank 16, batch 1, cached\n\n"
    "P11x SDXL 1024², full fine-tune, batch 4, cached\n\n"
    "[bold]Examples[/]\n\n"
    "strop bench train P8 --device cpu --tiny   # any machine: the code, not the speed\n\n"
    "strop bench train --ladder --budget 1500 -o benchmarks/results\n\n"
    "strop bench train --ladder --resume ladder_h100_2026-11-22.json -o .   # what was cut\n\n"
    "strop bench train P8 P9 --only strop,diffusers --samples 50 -o benchmarks/results"
)
RowsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="P8, P9, P11 (and P11-lora), P11x [dim]\\[default: all, but with --ladder none][/]",
        show_default=False,
    ),
]
RowsOption = Annotated[list[str] | None, typer.Option("--rows", help="The same.", hidden=True)]
LadderOption = Annotated[
    bool, typer.Option("--ladder", help="The published ladder again, then Strop's rungs.")
]
OnlyOption = Annotated[
    str, typer.Option(help="These contenders or rungs alone, with commas between.")
]
ResumeOption = Annotated[
    list[Path] | None,
    typer.Option(help="A JSON of an earlier run on this machine; what it lacks is measured.",
                 show_default=False),
]  # fmt: skip
BudgetOption = Annotated[
    float, typer.Option(min=1.0, help="Seconds for everything; what does not fit is named.")
]
WarmUpOption = Annotated[int, typer.Option(min=1, help="Steps before, that do not count.")]
PlotsOption = Annotated[
    Path | None,
    typer.Option(help="Folder for the pictures. [dim]\\[default: that of -o][/]",
                 show_default=False),
]  # fmt: skip
TinyOption = Annotated[
    bool, typer.Option("--tiny", help="Tiny widths and sizes: the same code in seconds.")
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
    samples: Annotated[int, typer.Option(min=3, help="Steps of each contender.")] = 20,
    warm_up: WarmUpOption = 5,
    device: DeviceOption = Device.auto,
    tiny: TinyOption = False,
    commit: CommitOption = "",
) -> None:
    """Time training steps: Strop beside diffusers' script and compiled torch; or the ladder.

    Models have random weights at full size; nothing is downloaded. Every contender has a process
    of its own. Each row is a JSON file and a picture; the file grows with every contender.
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
    results = _measured(chosen, plan, budget_s=budget, out=out, is_apart=not tiny,
                        earlier=resume or ())  # fmt: skip
    _show(results, plots or out)


def _device(device: Device, tiny: bool) -> str:
    where = arguments.chosen_device(device)
    if where == "cpu" and not tiny:
        raise CommandError(
            "full-size rows need a GPU, and there is none here (or --device cpu was asked for);"
            " --device cpu --tiny runs the same code with tiny models"
        )
    return where


def _measured(rows: Any, plan: Any, **how: Any) -> list[dict[str, Any]]:
    """A line for each contender on standard error: a full run takes half an hour."""
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

    for table in (train_report.rows_of(results), train_report.split_rows_of(results),
                  train_report.loader_rows_of(results)):  # fmt: skip
        header, *lines = table
        if lines:
            show(header, lines, {})
            print()
    files = [result["file"] for result in results if "file" in result]
    drawn = [train_plots.draw(result, plots) for result in results if plots]
    for file in (*files, *(str(path) for path in drawn if path)):
        print(f"written: {file}")

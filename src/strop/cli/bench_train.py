"""Time training steps beside their peers, and the published ladder (``strop bench train``)."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from strop.cli import arguments
from strop.cli.arguments import ArchOption, DeviceName, DeviceOption
from strop.cli.mistakes import CommandError, errors, plain, reported, require_diffusion
from strop.cli.tables import OutOption, show, wrong
from strop.train.places import GroupPlace, place_of_this_process
from strop.wording import counted

_MOST_PROCESSES = 64
EXAMPLES = """[bold]Rows[/]
- P8: SD1.5 at 512x512, full fine-tune, batch 8, VAE and text encoder in the loop
- P9: the same at batch 32, with latents and text cached
- P11: DreamBooth of SD1.5's full UNet, batch 1
- P11-lora: LoRA of rank 16, batch 1, cached
- P11x: SDXL at 1024x1024, full fine-tune, batch 4, cached
- P12, P12s: SD1.5 cached, batch 32 and 4 a GPU, 2 GPUs against 1
- P12b: SDXL at batch 4 a GPU with ZeRO-1, 2 GPUs against 1
- P12c, P12d: P8's work on 1 and 2 GPUs beside the plain recipe; on 2 beside DDP with Inductor
- P12e: LoRA of rank 16 for Flux.1, batch 1
- SD2: SD2's UNet, cached, at the largest batch

[bold]Examples[/]
$ strop bench train P8 --device cpu --tiny   # any machine: tries the code, not the speed
$ strop bench train --ladder --budget 1500 -o benchmarks/results
$ strop bench train --ladder --resume ladder_h100_2026-11-22.json -o .   # measures what was cut
$ strop bench train P8 P9 --only strop,diffusers --samples 50 -o benchmarks/results
$ strop bench train P12 --nproc-per-node 1,2 --log-freq 5 -o runs
$ strop bench train P12 --nproc-per-node 2 --batch-size 16 --compiler inductor -o runs
$ torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
-m strop bench train P12 -o runs   # all nodes together; rank 0 writes
$ strop bench train P12 --nproc-per-node 2 --device cpu --tiny   # any machine, over gloo
"""
RowsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="Measure these rows only: P8, P9, P11 (with P11-lora), P11x, P12, P12s, P12b to P12e "
        "or SD2. [dim]\\[default: P8 to P11x, but with --ladder none][/]",
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
ProcessesOption = Annotated[
    str,
    typer.Option(
        "--nproc-per-node",
        help="Train with so many processes, each on a GPU of its own (on a CPU they share it); "
        "1,2 measures both numbers. torchrun's own number counts under torchrun. "
        "[dim]\\[default: those of the row][/]",
        show_default=False,
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        min=1,
        help="Give each process so many pictures a step. [dim]\\[default: that of the row][/]",
        show_default=False,
    ),
]
CompilerOption = Annotated[
    str,
    typer.Option(
        "--compiler",
        help="Measure the contenders of these compilers only: strop, inductor (torch.compile), "
        "eager (nothing compiled) or diffusers (its script); put commas between them.",
    ),
]
LogOption = Annotated[
    int,
    typer.Option(
        "--log-freq",
        min=0,
        help="Write a line of JSON for each so many steps, beside the results of -o; 0 for none.",
    ),
]
SeriesOption = Annotated[
    int, typer.Option(min=1, help="Time so many series of steps; their median counts.")
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
    series: SeriesOption = 3,
    nproc_per_node: ProcessesOption = "",
    batch_size: BatchOption = None,
    compiler: CompilerOption = "",
    log_freq: LogOption = 10,
    device: DeviceOption = DeviceName.auto,
    arch: ArchOption = 0,
    tiny: TinyOption = False,
    commit: CommitOption = "",
) -> None:
    """Time training steps of Strop, of diffusers' script and of compiled torch, on one GPU or many.

    Models have random weights at full size; nothing is downloaded. Every contender has a process
    of its own, or one for each GPU. Each row becomes a JSON file and a plot; the file grows with
    every contender. strop bench report draws all files of a folder, strop bench compare compares
    two.
    """
    require_diffusion()
    from strop.bench.train_measure import Plan
    from strop.bench.train_rows import chosen_rows

    names = [*(rows or ()), *(more_rows or ())]
    with wrong("ROWS, --only, --compiler"):
        chosen = chosen_rows(
            names,
            ladder=ladder,
            tiny=tiny,
            only=_listed(only),
            compilers=_listed(compiler),
            batch=batch_size,
        )
    place = place_of_this_process()
    counts = _counts(nproc_per_node)
    plan = Plan(
        _device(device, tiny),
        samples,
        warm_up,
        commit=commit,
        series=series,
        log_freq=log_freq,
        is_spread=place.count > 1,
    )
    for folder in (out, plots):
        arguments.make_folder(folder)
    how = {"budget_s": budget, "out": out, "is_apart": not tiny, "earlier": resume or ()}
    _measure_each(chosen, plan, counts, place, plots or out, how)


def _measure_each(
    chosen: Any,
    plan: Any,
    counts: list[int],
    place: GroupPlace,
    plots: Path | None,
    how: dict[str, Any],
) -> None:
    """Measure the rows with each number of processes, or as one place of a launcher's group."""
    if place.count > 1:
        if counts:
            raise CommandError(
                f"a launcher has started {counted(place.count, 'process')}: leave --nproc-per-node"
                " to it"
            )
        _spread(chosen, plan, place, plots, how)
        return
    results: list[dict[str, Any]] = []
    for count in counts or sorted({n for row in chosen for n in row.processes}):
        rows_now = [row for row in chosen if counts or count in row.processes]
        results += _measured(rows_now, replace(plan, processes=count), **how)
    _show(results, plots)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _counts(text: str) -> list[int]:
    found = []
    for part in _listed(text):
        if not part.isdigit() or not 1 <= int(part) <= _MOST_PROCESSES:
            raise typer.BadParameter(
                f"{part} is no number of processes from 1 to {_MOST_PROCESSES}",
                param_hint="'--nproc-per-node'",
            )
        found.append(int(part))
    return found


def _spread(
    rows: Any, plan: Any, place: GroupPlace, plots: Path | None, how: dict[str, Any]
) -> None:
    """Measure as one place of a group: rank 0 leads, writes and shows, the others follow."""
    from strop.bench.train_group import Places

    places = Places(place)
    if place.rank:
        places.follow()
        return
    try:
        results = _measured(rows, replace(plan, processes=place.count), places=places, **how)
    finally:
        places.close()
    _show(results, plots)


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
    from strop.bench import train_plots, train_report, train_runs

    for table in (
        train_report.rows_of(results),
        train_report.split_rows_of(results),
        train_report.loader_rows_of(results),
    ):
        header, *lines = table
        if lines:
            show(header, lines, {})
            print()
    if any(result["unit"] == "x 1 GPU" or result["processes"] > 1 for result in results):
        runs = train_runs.of_results(results)
        for (row, _), group in runs.groups().items():
            for text in train_runs.verdicts(group, runs):
                print(f"{row}: {text}")
    files = [result["file"] for result in results if "file" in result]
    drawn = [train_plots.draw(result, plots) for result in results if plots]
    for file in (*files, *(str(path) for path in drawn if path)):
        print(f"written: {file}")

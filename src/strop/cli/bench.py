"""``strop bench``: measurements beside eager torch and other peers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from strop.cli import arguments
from strop.cli.arguments import Device, DeviceOption
from strop.cli.mistakes import CommandError, reported, require_diffusion

if TYPE_CHECKING:
    from strop.bench.cases import BenchCase
    from strop.bench.zoo import ZooModel

INFER_EXAMPLES = (
    "[bold]Examples[/]\n\n"
    "strop bench infer tiny-unet --device cpu\n\n"
    "strop bench infer sd15-unet-512 --peer eager --peer eager-graph -o benchmarks/results"
)
COMPILE_EXAMPLES = (
    "[bold]Examples[/]\n\n"
    "strop bench compile tiny-unet --device cpu\n\n"
    "strop bench compile sd15-pipe --shapes 3 -o benchmarks/results"
)

MODELS_EXAMPLES = (
    "[bold]Examples[/]\n\n"
    "strop bench models --only bert,gpt2-decode --device cpu\n\n"
    "strop bench models -o zoo.json --page zoo.md"
)

app = typer.Typer(
    help="Measure Strop beside eager torch and others, on models with random weights at full size.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
CaseArgument = Annotated[
    str,
    typer.Argument(
        help="What to measure: sd15-unet-512, sd15-unet-1024, sd15-unet-512-b8, sdxl-unet-1024, "
        "vae-512, sd15-pipe; tiny-unet, tiny-vae and tiny-pipe run on any CPU.",
        show_default=False,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option("-o", "--out", help="Folder for the JSON; nothing is written without it."),
]


@app.command("infer", epilog=INFER_EXAMPLES)
@reported
def infer(
    case: CaseArgument,
    out: OutOption = None,
    device: DeviceOption = Device.auto,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Whom to run beside; repeat for more. [dim]\\[default: eager, eager-graph][/]",
            show_default=False,
        ),
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Samples of each contender.")] = 20,
) -> None:
    """Time one call, in turns with the peers: percentiles in ms, memory, and the error."""
    chosen, where = _prepared(case, out, device)

    from strop.bench import infer as bench_infer
    from strop.bench import report
    from strop.bench.peers import peer_named
    from strop.cli.stages import spinner

    peers = tuple(peer or bench_infer.DEFAULT_PEERS)
    for name in peers:
        peer_named(name)
    with spinner(f"measuring {chosen.name} beside {', '.join(peers)}"):
        result = bench_infer.run(chosen, out, where, peers, iterations)
    header, *rows = report.rows_of(result)
    _show(header, rows, result)


@app.command("compile", epilog=COMPILE_EXAMPLES)
@reported
def compile_(
    case: CaseArgument,
    out: OutOption = None,
    device: DeviceOption = Device.auto,
    limit: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which a run is given up.")
    ] = 600.0,
    shapes: Annotated[
        int, typer.Option(min=0, help="How many of the case's sizes to run; 0: all.")
    ] = 0,
) -> None:
    """Time the first call of a fresh process, with an empty cache and with a full one (s)."""
    chosen, where = _prepared(case, out, device)

    from strop.bench import compile as bench_compile
    from strop.cli.stages import spinner

    with spinner(f"compiling {chosen.name}, cold and cached"):
        result = bench_compile.run(chosen, out, where, limit_s=limit, num_shapes=shapes)
    for name in ("cold", "cached"):
        if "failed" in result.get(name, {}):
            raise CommandError(f"the {name} run failed: {result[name]['failed']}")
    _show(("cache", "shape", "first call s", "second call s"), _compile_rows(result), result)


def _compile_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (name, "{1}x{0}".format(*row["size"]) + f" b{row['batch']}", f"{row['first_s']:.3f}",
         f"{row['second_s']:.3f}")
        for name in ("cold", "cached")
        for row in result[name]["shapes"]
    ]  # fmt: skip


def _prepared(case: str, out: Path | None, device: Device) -> tuple[BenchCase, str]:
    """Everything that can be wrong is found here, before any work."""
    require_diffusion()
    if out is not None and not out.is_dir():
        raise CommandError(f"there is no folder {out}; create it: mkdir -p {out}")
    from strop.bench.cases import CASES

    named = {c.name: c for c in CASES}
    if case not in named:
        raise typer.BadParameter(
            f"no case {case!r}; there are {', '.join(named)}", param_hint="'CASE'"
        )
    where = arguments.chosen_device(device)

    from strop.cli.models import quieten

    quieten()
    return named[case], where


def _show(header: tuple[str, ...], rows: list[tuple[str, ...]], result: dict[str, Any]) -> None:
    screen = Console(highlight=False, soft_wrap=True)
    table = Table(*header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    screen.print(table)
    if "file" in result:
        screen.print(f"written: {result['file']}", markup=False)


@app.command("models", epilog=MODELS_EXAMPLES)
@reported
def models(
    only: Annotated[
        str, typer.Option(help="Names of models with commas between.", show_default="all")
    ] = "",
    device: DeviceOption = Device.auto,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="File for the JSON.", show_default=False)
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="File for a Markdown table.", show_default=False)
    ] = None,
    shapes: Annotated[int, typer.Option(min=1, help="How many shapes each model runs at.")] = 20,
) -> None:
    """Compile each architecture of the zoo at tiny widths and judge what became of it."""
    require_diffusion()
    for file in (out, page):
        if file is not None and not file.parent.is_dir():
            raise CommandError(f"there is no folder {file.parent}; create it: mkdir -p")
    from strop.bench.zoo import ZOO

    wanted = [name for name in only.split(",") if name]
    unknown = sorted(set(wanted) - {m.name for m in ZOO})
    if unknown:
        raise typer.BadParameter(f"no model {', '.join(unknown)}; there are "
                                 f"{', '.join(m.name for m in ZOO)}", param_hint="'--only'"
                                 )  # fmt: skip
    chosen = [m for m in ZOO if not wanted or m.name in wanted]
    result = _census(chosen, arguments.chosen_device(device), shapes)
    _write_census(result, out, page)


def _census(chosen: Sequence[ZooModel], device: str, num_shapes: int) -> dict[str, Any]:
    """Under a progress bar, which also keeps the compiler's warnings off the table."""
    import torch

    from strop.bench import census
    from strop.cli.models import quieten
    from strop.cli.stages import progress_bar
    from strop.options import Options

    quieten()
    logging.getLogger("strop").setLevel(logging.ERROR)
    with progress_bar() as bar:
        task = bar.add_task("models", total=len(chosen), note="")

        def step(verdict: census.Verdict) -> None:
            bar.update(task, advance=1, note=verdict.name)

        return census.run(chosen, torch.device(device), Options.from_environment(), step,
                          num_shapes)  # fmt: skip


def _write_census(result: dict[str, Any], out: Path | None, page: Path | None) -> None:
    from strop.bench import census, report

    if out is not None:
        result["file"] = str(report.write_json(result, out))
    if page is not None:
        page.write_text(census.markdown(result), encoding="utf-8")
    header, *rows = census.rows_of(result)
    _show(header, rows, result)
    print(f"{result['num_good']} of {result['num_models']} models pass")

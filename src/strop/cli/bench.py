"""``strop bench``: measurements beside eager torch and other peers."""

from __future__ import annotations

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

"""Run ``strop bench worst``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strop.cli import arguments
from strop.cli.arguments import ArchOption, DeviceName, DeviceOption
from strop.cli.mistakes import reported, require_diffusion
from strop.cli.tables import known, show
from strop.wording import counted

EXAMPLES = """[bold]Examples[/]
$ strop bench worst t5-encoder --device cpu
$ strop bench worst t5-large -o benchmarks/results/worst-t5.json
"""


@reported
def worst(
    model: Annotated[
        str,
        typer.Argument(
            help="Time this model: sd15-unet, sdxl-unet, sd-vae, flux, wan or t5-large at full "
            "size with random weights, or a tiny one of `strop bench models`.",
            show_default=False,
        ),
    ],
    top: Annotated[
        int, typer.Option(min=1, help="Show this many kernels, and all that are too slow.")
    ] = 20,
    device: DeviceOption = DeviceName.auto,
    arch: ArchOption = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Profile the call so many times.")] = 3,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the results as JSON to this file.")
    ] = None,
) -> None:
    """List the kernels of a model that take longest beside what the device could do.

    The table sets the mean, least and longest time of a launch beside its bound, which is the time
    of its bytes or FLOPs at the ceilings of this machine, and beside the estimate for the programs
    that it has. A kernel is marked if it takes more than three times its bound, or three times
    the 2 us that a kernel takes which has next to nothing to do.
    """
    require_diffusion()
    arguments.check_file(out)
    from strop.bench import report
    from strop.bench import worst as bench_worst

    known("MODEL", [model], bench_worst.names())
    where = arguments.chosen_device(device)

    import torch

    from strop.cli.models import quieten
    from strop.cli.stages import spinner

    quieten()
    with spinner(f"compiling and timing {model}"):
        result = bench_worst.run(model, torch.device(where), rounds)
    if out is not None:
        result["file"] = str(report.write_json(result, out))
    header, *rows = bench_worst.rows_of(result, top)
    show(header, rows, result)
    print(
        f"one call {result['call_us']:.1f} us ({min(result['calls_us']):.1f} to "
        f"{max(result['calls_us']):.1f}), bound {result['bound_us']:.1f};"
        f" {counted(result['num_too_slow'], 'launch')} too slow, by the {result['method']}"
    )

"""Run ``strop bench serve``."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from strop.cli import arguments
from strop.cli.arguments import DeviceName, DeviceOption
from strop.cli.mistakes import reported, require_diffusion
from strop.cli.serve import require_serve
from strop.cli.tables import OutOption, show

EXAMPLES = """[bold]Examples[/]
$ strop bench serve --device cpu
$ strop bench serve --clients 8 --pictures 16 --steps 2 --rounds 1   # tries it
$ strop bench serve -o benchmarks/results
$ strop bench serve --soak 5000 --steps 4   # is its memory flat?
"""


@reported
def serve(
    clients: Annotated[int, typer.Option(min=1, help="Ask from this many clients at once.")] = 64,
    pictures: Annotated[
        int, typer.Option(min=4, help="Ask for this many pictures in each round.")
    ] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Draw in this many steps.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Measure all of it this many times.")] = 3,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Draw up to this many pictures together.")
    ] = 4,
    soak: Annotated[
        int,
        typer.Option(
            min=0,
            help="Ask 'strop serve' itself for this many pictures instead, in ten rounds, while"
            " some clients hang up and, from the middle on, no file can be written; 0 does not.",
        ),
    ] = 0,
    out: OutOption = None,
    device: DeviceOption = DeviceName.auto,
) -> None:
    """Ask a server of sprites for pictures in mixed sizes, and check each of them.

    In each round the same pictures are drawn offline, in full batches without a server; then they
    are asked for over HTTP, by clients in a process of their own; then again from a server whose
    line has room for 16 pictures, whose clients ask again when they are refused. The table has
    pictures a second, and the seconds that a client waits for its picture.

    Below it stand the musts, each with "holds" or "misses": the server's throughput beside the
    offline one, requests that got no picture, and pictures that are not those of their seeds.
    With --soak they are requests that got no picture, pictures that change from round to round, the
    growth of the server's memory, and how the server ends.
    """
    require_diffusion()
    require_serve()
    where = arguments.chosen_device(device)
    arguments.make_folder(out)

    from strop.bench import serve as bench_serve
    from strop.bench import serve_soak

    if soak:
        soaked = serve_soak.SoakPlan(soak, clients, steps, max_batch=max_batch)
        _measure(serve_soak, soaked, where, out)
    else:
        plan = bench_serve.ServePlan(clients, pictures, steps, rounds, max_batch)
        _measure(bench_serve, plan, where, out)


def _measure(kind: ModuleType, plan: Any, where: str, out: Path | None) -> None:
    """Run a plan by the module of its kind, and show the result."""
    import torch

    from strop.bench.load_report import verdicts
    from strop.cli.models import quieten
    from strop.cli.stages import only_errors, progress_bar

    device = torch.device(where)
    quieten()
    with only_errors(), progress_bar() as bar:
        task = bar.add_task("measuring", total=None, note="")
        result = kind.run(plan, device, step=lambda note: bar.update(task, note=note))
    if out is not None:
        result["file"] = str(kind.written(result, out, device))
    header, *rows = kind.rows_of(result)
    show(header, rows, result)
    print("\n".join(verdicts(result)))

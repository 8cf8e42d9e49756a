"""Draw pictures with the sprites models and judge them (``strop bench pictures``)."""

from __future__ import annotations

from typing import Annotated

import typer

from strop.cli import arguments, bench_numerics
from strop.cli.arguments import ArchOption, DeviceName, DeviceOption
from strop.cli.mistakes import CommandError, reported, require_diffusion
from strop.cli.tables import OutOption, show

EXAMPLES = """[bold]Examples[/]
$ strop bench pictures --device cpu --sizes 1
$ strop bench pictures --ablate -o benchmarks/results
$ strop bench pictures --numerics int8 --device cpu --prompts 40
$ strop bench pictures --numerics step_cache --prompts 200 -o benchmarks/results
"""


NumericsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Judge these numerics instead, with both sprites models at all four sizes: int8 or"
        " fp8, and step_cache, which draws with each of its three words. May be given again.",
        show_default=False,
    ),
]
BudgetOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="With int8 or fp8, leave a layer exact if 8 bits change its results by more than this"
        " share of their size.",
    ),
]
PromptsOption = Annotated[
    int, typer.Option(min=4, max=1000, help="With --numerics, draw this many prompts.")
]


@reported
def pictures(
    device: DeviceOption = DeviceName.auto,
    arch: ArchOption = 0,
    sizes: Annotated[
        int, typer.Option(min=1, max=4, help="Draw at this many sizes, 20 prompts at each.")
    ] = 4,
    ablate: Annotated[
        bool,
        typer.Option(
            "--ablate", help="Also draw with each switch of Options off alone, and with all off."
        ),
    ] = False,
    numerics: NumericsOption = None,
    budget: BudgetOption = 0.1,
    prompts: PromptsOption = 200,
    out: OutOption = None,
) -> None:
    """Draw with the sprites model in eager and optimised, and judge how far pictures drift apart.

    On a CPU both draw in fp32, and the PSNR to eager must be 60 dB or more for each picture. On a
    GPU both draw in fp16 and are compared with eager in fp32: then Strop's PSNR may be at most 1 dB
    below eager's in the median, and at most 6 dB below it for a single picture.

    With --numerics, pictures of held-out prompts are compared with those that Strop draws exactly:
    how many have all that their prompt asks for, which may be 1 % of all fewer, the structural
    distance (1 - SSIM) and the speed. The errors of all layers in 8 bits are printed. --out adds a
    PNG file with the worst pictures.
    """
    require_diffusion()
    where = arguments.chosen_device(device)
    if numerics and ablate:
        raise typer.BadParameter("--ablate is for exact pictures; leave out --numerics")
    arguments.make_folder(out)
    if numerics:
        bench_numerics.judge(numerics, where, prompts, budget, out)
        return
    from strop.bench import quality
    from strop.cli.models import quieten
    from strop.cli.stages import progress_bar

    quieten()
    with progress_bar() as bar:
        task = bar.add_task("drawing", total=None, note="eager and default options")
        result = quality.run(
            out,
            where,
            num_sizes=sizes,
            ablate=ablate,
            step=lambda name: bar.update(task, note=name),
        )
    header, *rows = quality.rows_of(result)
    show(header, rows, result)
    judged = (result, *result.get("switches", {}).values())
    if not all(found["is_good"] for found in judged):
        raise CommandError("pictures drift too far from eager's: see the lines marked BROKEN")

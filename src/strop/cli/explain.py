"""Show what the compiler made of a model (``strop explain``)."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli import arguments, models
from strop.cli.arguments import ArchOption, DeviceName, DeviceOption, SizeOption
from strop.cli.mistakes import reported, require_diffusion
from strop.drawing.request import PictureRequest, PictureSize

if TYPE_CHECKING:
    from strop.debug.report import Report

EXAMPLES = """[bold]Examples[/]
$ strop explain
$ strop explain --html report.html   # passes, plan as a drawing, kernels, costs
$ strop explain --size 64x96 --html report.html
$ strop explain --profile --html report.html   # a roofline of measured times
$ strop explain --model sd15-unet --device cuda --json report.json
"""
# Single calls of a model with random weights at full size: pixels a side, and batch.
CALLS = {"sd15-unet": (512, 2), "sdxl-unet": (1024, 2), "sd-vae": (512, 1)}
_PROMPT = "a red circle above a blue square on a white background"


@reported
def command(
    model: Annotated[
        str,
        typer.Option(
            help="Explain this model: 'sprites'; 'sd15-unet', 'sdxl-unet' or 'sd-vae', which have "
            "random weights at full size (3.4, 10.3 and 0.2 GB in fp32); or a diffusers folder."
        ),
    ] = models.SPRITES,
    size: SizeOption = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the report as a page, with every kernel's source.")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to this file, as JSON.")
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Time each step, and show the share of its bound, its GB/s and FLOP/s, and the "
            "gaps between steps.",
        ),
    ] = False,
    device: DeviceOption = DeviceName.auto,
    arch: ArchOption = 0,
) -> None:
    """Compile a model, run it once, and show its graphs, kernels, launches and fallbacks.

    The page of --html shows the time of each stage, the graph before and after each pass, the
    fusion plan as a drawing, each edge that was not fused with the reason, and each kernel's
    source. Times beside kernels and steps are microseconds that are estimated from bytes and FLOPs,
    not measured. The plan is compiled anew, because a stored one has no passes to show.

    With --profile each step is timed as well, and set beside its bytes, its FLOPs and the ceilings
    of this machine, which are those of a large copy and of a large matrix product. The page then
    shows a roofline, too.
    """
    if html is not None:
        arguments.check_output(html, (".html", ".htm"))
    if as_json is not None:
        arguments.check_output(as_json, (".json",))
    require_diffusion()
    where = arguments.chosen_device(device)
    report_of = _call_report if model in CALLS else _pipe_report
    report = report_of(model, size, where, profile)
    typer.echo(str(report))
    if html is not None:
        _write(html, report.html)
    if as_json is not None:
        _write(as_json, json.dumps(report.to_dict(), indent=1) + "\n")


def _pipe_report(name: str, size: PictureSize | None, device: str, profile: bool) -> Report:
    """Explain a whole pipeline after two denoising steps."""
    found = models.find_model(name, CALLS)
    size = size or found.default_size
    arguments.check_size(size, found.factor)

    import strop
    from strop.cli.arguments import Dtype, chosen_dtype
    from strop.cli.sampling import warm_up
    from strop.cli.stages import compiling, spinner
    from strop.debug.explain import explain
    from strop.debug.profile import measured, watched

    with spinner(f"loading {name}"):
        pipe = models.load(found, chosen_dtype(Dtype.auto, device), device)
    strop.optimize(pipe, options=strop.Options.from_environment(record=True))
    with compiling(pipe), ExitStack() as stack:
        calls = stack.enter_context(watched(pipe)) if profile else {}
        warm_up(pipe, PictureRequest(_PROMPT, size, 2, found.guidance))
    report = explain(pipe)
    if not profile:
        return report
    with spinner("measuring"):
        return measured(report, pipe, calls)


def _call_report(name: str, size: PictureSize | None, device: str, profile: bool) -> Report:
    """Explain one call: a UNet's with guidance (batch 2), or the decoder's of one picture."""
    side, batch = CALLS[name]
    size = size or PictureSize(side, side)
    arguments.check_size(size, models.MULTIPLE)

    import torch

    from strop.bench import models as sizes
    from strop.cli.arguments import Dtype, chosen_dtype
    from strop.cli.stages import spinner
    from strop.debug.explain import explain
    from strop.debug.profile import profiled

    builds = {
        "sd15-unet": sizes.unet_workload(sizes.SD15_UNET),
        "sdxl-unet": sizes.unet_workload(sizes.SDXL_UNET),
        "sd-vae": sizes.vae_workload(sizes.SD_VAE),
    }
    with spinner(f"making and compiling {name}"):
        models.quieten()
        build = builds[name]
        work = build(torch.device(device), chosen_dtype(Dtype.auto, device))
        report_of = profiled if profile else explain
        return report_of(work.target, **work.inputs((size.height, size.width), batch))


def _write(path: Path, text: str) -> None:
    """Write the file whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    typer.echo(f"written: {path}", err=True)

"""Draw a picture from a text (``strop generate``)."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from strop.cli import adapters, arguments, models, samplers
from strop.cli.adapters import (
    Additions,
    ControlImageOption,
    ControlNetOption,
    IpAdapterOption,
    IpImageOption,
    LoraOption,
)
from strop.cli.arguments import ArchOption, DeviceName, DeviceOption, Dtype, SizeOption
from strop.cli.cores import CoreUse, use_free_cores
from strop.cli.mistakes import CommandError, reported, require_diffusion, warn
from strop.cli.tables import known, wrong
from strop.drawing.request import PictureRequest, PictureSize
from strop.wording import counted

if TYPE_CHECKING:
    from strop.cli.sampling import Drawn

EXAMPLES = """[bold]Examples[/]
$ strop generate "a red circle above a blue square on a white background" -o out.png
$ strop generate "a small green star at the top left" --size 64x96 --seed 3 --compare
$ strop generate "a green ring" --model sprites-dit
$ strop generate "an astronaut" --model ./stable-diffusion-v1-5 --size 512x768 --steps 30

[bold]As in A1111[/]
$ strop generate --list-samplers --model ./sdxl
$ strop generate "a castle" --model ./sdxl --sampler "DPM++ 2M Karras" --steps 25
$ strop generate "a (tall:1.3) castle, [fog]" --model ./sdxl --prompt-weights

[bold]Less exact, by name[/]
$ strop generate "an astronaut" --model ./sdxl --numerics fp8 --numerics step_cache

[bold]On two GPUs[/]
$ strop generate "an astronaut" --model ./sdxl --parallel cfg

[bold]With adapters[/]
$ strop generate "a castle" --model ./sd --lora style.safetensors:0.8 --lora ink.safetensors:0.4
$ strop generate "a room" --model ./sd --controlnet ./depth --control-image depth.png:0.7
$ strop generate "a cat" --model ./sd --ip-adapter ip-adapter_sd15.safetensors --ip-image cat.png
"""

PromptArgument = Annotated[
    str | None, typer.Argument(help="Describe the picture to draw.", show_default=False)
]
OutputOption = Annotated[
    Path,
    typer.Option("-o", "--output", help="Write the picture to this file: .png, .jpg or .webp."),
]
StepsOption = Annotated[
    int, typer.Option(min=1, max=1000, help="Draw in this many denoising steps.")
]
SeedOption = Annotated[
    int,
    typer.Option(
        min=0, help="Draw the noise from this seed, which gives the same on every device."
    ),
]
GuidanceOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=50.0,
        help="Follow the prompt this closely. At 1 or less there is no guidance, and drawing "
        "takes half the time. "
        r"[dim]\[default: 4 for sprites, 1 for Flux, else 7.5][/]",
    ),
]
NegativeOption = Annotated[str, typer.Option(help="Describe what the picture should not show.")]
WeightsOption = Annotated[
    bool,
    typer.Option(
        "--prompt-weights",
        help="Read (words:1.3), (words) and [words] in both prompts as weights, as A1111 does, and"
        " prompts of any length in chunks. Without it brackets are text, as in diffusers, and the"
        " end of a long prompt is not read.",
    ),
]
ModelOption = Annotated[
    str,
    typer.Option(
        help="Draw with this model: 'sprites' or 'sprites-dit', a UNet and a transformer of Flux's"
        " kind that ship with Strop, or a diffusers folder."
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        help="Compute in this number format; auto takes fp16 on a GPU and fp32 on a CPU, where bf16"
        " is faster if the processor has it."
    ),
]
ThreadsOption = Annotated[
    int,
    typer.Option(
        min=0, max=1024, help="Use this many CPU threads; 0 takes as many as cores are free."
    ),
]
OptimizeOption = Annotated[
    bool,
    typer.Option(
        "--optimize/--no-optimize", help="Run the model through Strop, or in plain torch."
    ),
]


class Spread(StrEnum):
    """This says what several GPUs share."""

    cfg = "cfg"
    batch = "batch"


ParallelOption = Annotated[
    Spread | None,
    typer.Option(
        help="Spread the model's calls over GPUs: cfg runs the two halves of guidance on two, batch"
        " cuts calls evenly for all. [dim]\\[default: one GPU][/]",
        show_default=False,
    ),
]
NumericsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Allow what is less exact, by name: int8 or fp8 computes linears of the denoiser in 8"
        " bits, fp8 on GPUs from compute capability 8.9 on; step_cache, step_cache:cautious or"
        " step_cache:fast takes parts of steps from earlier ones. May be given again."
        " [dim]\\[default: exact][/]",
        show_default=False,
    ),
]
CompareOption = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Also draw in plain torch, time three runs of each, and write both pictures into one "
        "file, <output>_compare.",
    ),
]

RUNS = 3  # a comparison shows the fastest of so many


@reported
def command(
    prompt: PromptArgument = None,
    output: OutputOption = Path("out.png"),
    size: SizeOption = None,
    steps: StepsOption = 20,
    seed: SeedOption = 0,
    guidance: GuidanceOption = None,
    negative: NegativeOption = "",
    prompt_weights: WeightsOption = False,
    sampler: samplers.SamplerOption = "",
    schedule: samplers.ScheduleOption = "",
    list_samplers: samplers.ListOption = False,
    model: ModelOption = models.SPRITES,
    device: DeviceOption = DeviceName.auto,
    arch: ArchOption = 0,
    dtype: DtypeOption = Dtype.auto,
    threads: ThreadsOption = 0,
    parallel: ParallelOption = None,
    numerics: NumericsOption = None,
    optimize: OptimizeOption = True,
    compare: CompareOption = False,
    lora: LoraOption = None,
    controlnet: ControlNetOption = None,
    control_image: ControlImageOption = None,
    ip_adapter: IpAdapterOption = None,
    ip_image: IpImageOption = None,
) -> None:
    """Draw a picture from a text, and tell how many seconds each stage took.

    The first run compiles the model, which takes less than a minute. Later runs find it in the
    cache, at any size.
    """
    if list_samplers:
        samplers.show(models.find_model(model))
        return
    for name, given in (("compare", compare), ("parallel", parallel), ("numerics", numerics)):
        if given and not optimize:
            raise typer.BadParameter(f"--{name} needs Strop; leave out --no-optimize")
    how = _how(parallel, numerics)
    outputs = _outputs(output, compare)
    require_diffusion()
    found = models.find_model(model)
    size = size or found.default_size
    arguments.check_size(size, found.factor)
    if optimize:
        _check_grid(size, found.grid)
    prompt, negative = _texts(found, prompt, negative, prompt_weights)
    sampler, schedule = samplers.find(sampler, schedule, found)
    additions = adapters.find_additions(
        lora, (controlnet, control_image), (ip_adapter, ip_image), found
    )
    more = adapters.call_arguments(additions, size)
    where = arguments.chosen_device(device)
    kind = arguments.chosen_dtype(dtype, where)

    guidance = found.guidance if guidance is None else guidance
    request = PictureRequest(prompt, size, steps, guidance, seed, negative, more=more)
    request = replace(request, sampler=sampler, schedule=schedule, is_weighted=prompt_weights)
    _generate(found, additions, kind, where, request, outputs, optimize, threads, how)


def _check_grid(size: PictureSize, grid: int) -> None:
    if size.width % grid or size.height % grid:
        pixels = counted(grid, "pixel")
        warn(f"{size} is off this model's grid of {pixels}: it needs a graph of its own")


def _texts(
    model: models.ModelFolder, prompt: str | None, negative: str, is_weighted: bool
) -> tuple[str, str]:
    """Return both prompts as the model wants them. Raises for what it does not read, and where
    there is no prompt."""
    if prompt is None:
        raise typer.BadParameter("describe the picture to draw", param_hint="'PROMPT'")
    if is_weighted and model.is_flux:
        raise typer.BadParameter("--prompt-weights is built for models with a UNet; leave it out")

    def checked(text: str, hint: str) -> str:
        if is_weighted:
            return arguments.check_weights(text, model.is_sprites, hint)
        return arguments.check_prompt(text, hint) if model.is_sprites else text

    return checked(prompt, "'PROMPT'"), checked(negative, "'--negative'") if negative else ""


def _how(parallel: Spread | None, numerics: list[str] | None) -> dict[str, Any]:
    """Return what ``strop.optimize`` is given beside the pipeline."""
    from strop.options import NAMED_NUMERICS, Options

    how: dict[str, Any] = {} if parallel is None else {"parallel": parallel.value}
    if numerics:
        known("--numerics", numerics, NAMED_NUMERICS)
        with wrong("--numerics"):
            how["options"] = Options.from_environment(numerics=tuple(numerics))
    return how


def _outputs(output: Path, compare: bool) -> list[Path]:
    """Return the files to write. Raises for one that cannot be written."""
    beside = output.with_name(f"{output.stem}_compare{output.suffix}")
    outputs = [output, beside] if compare else [output]
    for path in outputs:
        arguments.check_output(path)
    return outputs


def _generate(
    model: models.ModelFolder,
    additions: Additions,
    dtype: Any,
    device: str,
    request: PictureRequest,
    outputs: list[Path],
    optimize: bool,
    threads: int,
    how: dict[str, Any],
) -> None:
    import torch

    from strop.cli import pictures, sampling
    from strop.cli.stages import StageSeconds, spinner

    clock, before = StageSeconds(), CoreUse.now()
    with clock.stage("load"), spinner(f"loading {model.name}"):
        pipe = adapters.add_to(models.load(model, dtype, device), additions, dtype)
    if not request.is_weighted:
        arguments.check_length(pipe, request.prompt)
        arguments.check_length(pipe, request.negative, "negative prompt")
    set_threads(threads, before)
    runs = RUNS if len(outputs) > 1 else 1
    try:
        eager = None
        if runs > 1 or not optimize:
            eager = sampling.draw_eager(pipe, request, runs)
        ours = sampling.draw_optimized(pipe, request, runs, **how) if optimize else None
    except torch.OutOfMemoryError as error:
        raise CommandError(
            f"the GPU has too little memory for {request.size}; choose a smaller"
            " --size, or --device cpu"
        ) from error
    drawn = ours or eager
    assert drawn is not None
    pictures.save(pictures.to_picture(drawn.pixels), outputs[0])
    screen = Console(highlight=False, soft_wrap=True)
    stages = {**clock.seconds, **drawn.seconds}
    screen.print("  ".join(f"{name} {value:.2f} s" for name, value in stages.items()))
    if ours is not None:
        screen.print(sampling.compiled_text(pipe))
        for line in sampling.step_cache_texts(pipe):
            screen.print(line)
        for line in sampling.fallbacks(pipe):
            warn(line)
    if ours is not None and eager is not None:
        _compare(screen, eager, ours, request.steps, outputs[1])
    screen.print(f"{request.size} picture in {outputs[0]}", markup=False)


def set_threads(threads: int, before: CoreUse | None) -> None:
    """Set as many threads as asked for, or as cores were free since ``before``."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    elif use_free_cores(before):
        count = counted(torch.get_num_threads(), "CPU thread")
        warn(f"other programs keep cores busy: {count} (--threads)")


def _compare(screen: Console, eager: Drawn, ours: Drawn, steps: int, output: Path) -> None:
    """Write both pictures side by side into ``output``, and print their numbers as a table."""
    from strop.cli import pictures

    times = [drawn.fastest for drawn in (eager, ours)]
    psnr = pictures.psnr_text(pictures.psnr_db(eager.pixels, ours.pixels))
    shown = [pictures.enlarged(pictures.to_picture(d.pixels), 256) for d in (eager, ours)]
    ratio = f"{times[0] / times[1]:.1f}x as fast"
    page = pictures.sheet(
        [
            pictures.Panel(shown[0], f"torch eager: {times[0]:.2f} s"),
            pictures.Panel(shown[1], f"Strop: {times[1]:.2f} s", (ratio, f"{psnr} to eager")),
        ],
        columns=2,
    )
    pictures.save(page, output)
    table = Table(
        "", "first call", f"sampling (best of {RUNS})", "a step", "", box=None, pad_edge=False
    )
    first = (eager.seconds["warm-up"], ours.seconds["compile"])
    notes = ("", f"{ratio}, {psnr}")
    for name, once, seconds, note in zip(("eager", "Strop"), first, times, notes, strict=True):
        table.add_row(
            name, f"{once:.2f} s", f"{seconds:.2f} s", f"{seconds / steps * 1e3:.1f} ms", note
        )
    screen.print(table)
    screen.print(f"both pictures in {output}", markup=False)

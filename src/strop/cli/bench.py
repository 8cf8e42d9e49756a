"""Measure beside eager torch and other peers (``strop bench``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strop.cli import (
    arguments,
    bench_cpu,
    bench_infer,
    bench_load,
    bench_pictures,
    bench_report,
    bench_serve,
    bench_speed,
    bench_train,
    bench_worst,
    bench_zoo,
)
from strop.cli.arguments import ArchOption, DeviceName, DeviceOption
from strop.cli.bench_infer import BudgetOption, TinyOption
from strop.cli.bench_speed import BatchesOption, JobsOption, SpeedPeersOption, TimesOption
from strop.cli.help_screen import App
from strop.cli.mistakes import CommandError, reported, require_diffusion
from strop.cli.tables import OutOption, SamplesOption, known, show
from strop.wording import counted

if TYPE_CHECKING:
    from strop.bench.cases import BenchCase

COMPILE_EXAMPLES = """[bold]Examples[/]
$ strop bench compile tiny-unet --device cpu
$ strop bench compile sd15-pipe --shapes 3 -o benchmarks/results
"""

MODELS_EXAMPLES = """[bold]Examples[/]
$ strop bench models --only bert,gpt2-decode --device cpu
$ strop bench models -o zoo.json --page zoo.md
$ strop bench models --times --device cpu -o zoo.json --page zoo.md
$ strop bench models --speed --only bert-base,vit-l --batches 8 -o speed.json
$ strop bench models --speed --tiny --only bert-base --device cpu   # tries the code, not the speed
"""

KERNEL_EXAMPLES = """[bold]Examples[/]
$ strop bench kernel layer_norm softmax --device cpu
$ strop bench kernel --random 12 --seed 1 -o benchmarks/results/kernels.json
$ strop bench kernel group_norm_silu --shape 2x1920x64x64 --shape 1x512x512x512
"""

BATCHES_EXAMPLES = """[bold]Examples[/]
$ strop bench batches bert-tiny --device cpu --batches 1,3
$ strop bench batches resnet50 -o benchmarks/results/resnet50.json
"""

SELECT_EXAMPLES = """[bold]Examples[/]
$ strop bench select benchmarks/results/conv_wgmma_h100_2026-11-24.json
$ strop bench select benchmarks/results/*_wgmma*.json
"""

app = App(
    help="Measure Strop beside eager torch and others, on models with random weights at full size.",
    no_args_is_help=True,
)
app.command("infer", epilog=bench_infer.EXAMPLES)(bench_infer.infer)
app.command("train", epilog=bench_train.EXAMPLES)(bench_train.train)
app.command("report", epilog=bench_report.REPORT_EXAMPLES)(bench_report.report)
app.command("compare", epilog=bench_report.COMPARE_EXAMPLES)(bench_report.compare)
app.command("mock-set", epilog=bench_report.MOCK_EXAMPLES)(bench_report.mock_set)
app.command("pictures", epilog=bench_pictures.EXAMPLES)(bench_pictures.pictures)
app.command("cpu", epilog=bench_cpu.EXAMPLES)(bench_cpu.cpu)
app.command("load", epilog=bench_load.EXAMPLES)(bench_load.load)
app.command("serve", epilog=bench_serve.EXAMPLES)(bench_serve.serve)
app.command("table")(bench_infer.table)
app.command("worst", epilog=bench_worst.EXAMPLES)(bench_worst.worst)
CaseArgument = Annotated[
    str,
    typer.Argument(
        help="Measure this case: sd15-unet-512, sd15-unet-1024, sd15-unet-512-b8, sdxl-unet-1024, "
        "vae-512, sd15-pipe; tiny-unet, tiny-vae and tiny-pipe run on any CPU.",
        show_default=False,
    ),
]

ApartOption = Annotated[
    bool,
    typer.Option(
        "--apart",
        help="Compile everything first, in several processes at once, and then time one contender "
        "after another.",
    ),
]

FileOption = Annotated[
    Path | None, typer.Option("-o", "--out", help="Write the results as JSON to this file.")
]


@app.command("compile", epilog=COMPILE_EXAMPLES)
@reported
def compile_(
    case: CaseArgument,
    out: OutOption = None,
    device: DeviceOption = DeviceName.auto,
    arch: ArchOption = 0,
    limit: Annotated[
        float, typer.Option(min=1.0, help="Give up a run after this many seconds.")
    ] = 600.0,
    shapes: Annotated[
        int, typer.Option(min=0, help="Run this many of the case's sizes; 0 runs all.")
    ] = 0,
) -> None:
    """Time the first call of a fresh process, with an empty cache and with a full one."""
    chosen, where = _prepared(case, out, device)

    from strop.bench import compile as bench_compile
    from strop.cli.stages import spinner

    with spinner(f"compiling {chosen.name}, cold and cached"):
        result = bench_compile.run(chosen, out, where, limit_s=limit, num_shapes=shapes)
    for name in ("cold", "cached"):
        if "failed" in result.get(name, {}):
            raise CommandError(f"the {name} run failed: {result[name]['failed']}")
    show(("cache", "shape", "first call s", "second call s"), _compile_rows(result), result)


def _compile_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            "{1}x{0}".format(*row["size"]) + f" b{row['batch']}",
            f"{row['first_s']:.3f}",
            f"{row['second_s']:.3f}",
        )
        for name in ("cold", "cached")
        for row in result[name]["shapes"]
    ]


def _prepared(case: str, out: Path | None, device: DeviceName) -> tuple[BenchCase, str]:
    """Find everything that can be wrong before any work."""
    require_diffusion()
    from strop.bench.cases import CASES

    named = {c.name: c for c in CASES}
    if case not in named:
        raise typer.BadParameter(
            f"no case {case!r}; there are {', '.join(named)}", param_hint="'CASE'"
        )
    where = arguments.chosen_device(device)
    arguments.make_folder(out)

    from strop.cli.models import quieten

    quieten()
    return named[case], where


@app.command("models", epilog=MODELS_EXAMPLES)
@reported
def models(
    only: Annotated[
        str,
        typer.Option(
            help="Compile these models only; put commas between their names. "
            "[dim]\\[default: all][/]",
            show_default=False,
        ),
    ] = "",
    device: DeviceOption = DeviceName.auto,
    arch: ArchOption = 0,
    out: FileOption = None,
    page: Annotated[Path | None, typer.Option(help="Write a Markdown table to this file.")] = None,
    shapes: Annotated[int, typer.Option(min=1, help="Run each model at this many shapes.")] = 20,
    speed: Annotated[
        bool,
        typer.Option(
            "--speed", help="Time networks at full size instead, beside Inductor in a CUDA graph."
        ),
    ] = False,
    times: TimesOption = False,
    batches: BatchesOption = "",
    peers: SpeedPeersOption = "eager,eager-graph,inductor-graph",
    budget: BudgetOption = 3600.0,
    again: Annotated[
        bool,
        typer.Option("--again", help="With --speed and --times, measure what the file has, too."),
    ] = False,
    jobs: JobsOption = 1,
    tiny: TinyOption = False,
) -> None:
    """Compile each architecture of the zoo at tiny widths, and judge the result.

    A model passes if one graph serves all its shapes without a fallback, if nearly all of it runs
    in generated kernels, and if its results are as accurate as eager's. With --times, each is timed
    as well. With --speed, encoders of texts and pictures and GPT-2 are timed at full size. Rows
    that --out has are not measured again by either, so a run that was cut off goes on where it was.
    Compilers take most of its time, one core each: --jobs has several prepared at a time.
    """
    require_diffusion()
    for file in (out, page):
        arguments.check_file(file)
    if speed:
        bench_speed.timed(
            only, batches, peers, device, out, page, budget, again=again, tiny=tiny, jobs=jobs
        )
        return
    chosen, where = bench_zoo.chosen(only), arguments.chosen_device(device)
    if times:
        plan = bench_zoo.times_plan(where, batches, peers, budget, jobs, shapes)
        bench_zoo.write(bench_zoo.timed(chosen, plan, out, again=again), out, page)
        return
    bench_zoo.write(bench_zoo.census(chosen, where, shapes), out, page)


@app.command("kernel", epilog=KERNEL_EXAMPLES)
@reported
def kernel(
    families: Annotated[
        list[str] | None,
        typer.Argument(
            help="Time these families only: layer_norm, softmax, group_norm_silu, ... "
            "[dim]\\[default: all][/]",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = DeviceName.auto,
    arch: ArchOption = 0,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Time this peer beside Strop: eager, inductor or inductor-dynamic. The option may "
            "be repeated. [dim]\\[default: all three][/]",
            show_default=False,
        ),
    ] = None,
    random: Annotated[
        int,
        typer.Option(
            min=0, help="Draw this many sizes for each family, instead of taking the usual grid."
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Draw the sizes of --random from this seed.")] = 0,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Time this size instead of the usual grid, such as 4096x768 or 2x320x64x64. The "
            "option may be repeated.",
            show_default=False,
        ),
    ] = None,
    samples: SamplesOption = 10,
    limit: Annotated[
        float, typer.Option(min=1.0, help="Begin no further case after this many seconds.")
    ] = 3600.0,
    apart: ApartOption = False,
    out: FileOption = None,
) -> None:
    """Time single kernels beside eager and Inductor.

    The table shows microseconds, and the share of the bandwidth of a copy. Kernels run in fp16 on a
    GPU and in fp32 on a CPU.
    """
    import torch

    from strop.bench import kernel as bench_kernel
    from strop.bench.kernel_cases import GROUP_NORM, ROW_FAMILIES

    arguments.check_file(out)
    where = torch.device(arguments.chosen_device(device))
    dtype = torch.float16 if where.type == "cuda" else torch.float32
    known("FAMILIES", families or (), [f.name for f in (*ROW_FAMILIES, GROUP_NORM)])
    known("--peer", peer or (), bench_kernel.PEERS)
    chosen = _kernels(families, shape, random, seed, where, dtype)
    peers = tuple(peer or bench_kernel.PEERS)
    result = _measured_kernels(chosen, where, dtype, peers, samples, limit, apart, out)
    _show_kernels(result | ({"file": str(out)} if out is not None else {}))


@app.command("batches", epilog=BATCHES_EXAMPLES)
@reported
def batches(
    network: Annotated[
        str, typer.Argument(help="Time this network: bert-base, resnet50 or bert-tiny.")
    ],
    sizes: Annotated[
        str,
        typer.Option("--batches", help="Time these batch sizes; put commas between them."),
    ] = "1,2,4,8,16,33",
    device: DeviceOption = DeviceName.auto,
    arch: ArchOption = 0,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Time this peer beside Strop: eager or inductor. The option may be repeated. "
            "[dim]\\[default: both][/]",
            show_default=False,
        ),
    ] = None,
    samples: SamplesOption = 20,
    apart: ApartOption = False,
    out: FileOption = None,
) -> None:
    """Time a whole network at many batch sizes.

    Strop compiles it once, Inductor once for each batch size. On a GPU every contender runs in fp16
    and in a CUDA graph, on a CPU in fp32.
    """
    require_diffusion()
    import torch

    from strop.bench import batches as bench_batches
    from strop.bench import report
    from strop.cli.stages import spinner

    arguments.check_file(out)
    named = {each.name: each for each in bench_batches.NETWORKS}
    known("NETWORK", [network], list(named))
    known("--peer", peer or (), bench_batches.PEERS)
    if not all(size.isdigit() and int(size) for size in sizes.split(",")):
        raise typer.BadParameter(f"{sizes!r} is not like 1,8,33", param_hint="'--batches'")
    where = torch.device(arguments.chosen_device(device))
    dtype = torch.float16 if where.type == "cuda" else torch.float32
    with spinner(f"measuring {network} at batches {sizes}"):
        result = bench_batches.run(
            named[network],
            where,
            dtype,
            [int(s) for s in sizes.split(",")],
            tuple(peer or bench_batches.PEERS),
            samples,
            apart,
        )
    if out is not None:
        result["file"] = str(report.write_json(result, out))
    header, *rows = bench_batches.rows_of(result)
    show(header, rows, result)
    graphs, again = (result["counts"][name] for name in ("num_graphs", "num_recompiles"))
    print(f"strop: {counted(graphs, 'graph')}, {counted(again, 'recompile')}")


def _kernels(
    families: list[str] | None,
    shapes: list[str] | None,
    random: int,
    seed: int,
    where: Any,
    dtype: Any,
) -> list[Any]:
    from strop.bench import kernel as bench_kernel
    from strop.bench.kernel_cases import cases_at, kernel_cases

    cases: Sequence[Any] = cases_at([_shape(text) for text in shapes or ()])
    if not shapes:
        cases = (
            bench_kernel.random_cases(random, seed, where.type, dtype)
            if random
            else kernel_cases(where.type, dtype)
        )
    chosen = [case for case in cases if not families or case.family in families]
    if not chosen:
        raise typer.BadParameter("none of the families has such sizes", param_hint="'--shape'")
    return chosen


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if not all(size.isdigit() and int(size) for size in sizes) or len(sizes) not in (2, 4):
        raise typer.BadParameter(
            f"{text!r} is not like 4096x768 or 2x320x64x64", param_hint="'--shape'"
        )
    return tuple(map(int, sizes))


def _measured_kernels(
    chosen: Sequence[Any],
    where: Any,
    dtype: Any,
    peers: Sequence[str],
    samples: int,
    limit: float,
    apart: bool,
    out: Path | None,
) -> dict[str, Any]:
    from strop.bench import kernel as bench_kernel
    from strop.bench import report
    from strop.cli.stages import only_errors, progress_bar

    def save(result: dict[str, Any]) -> None:
        if out is not None:  # whoever ends this early keeps what is done
            report.write_json(result, out)

    with only_errors(), progress_bar() as bar:
        task = bar.add_task("kernels", total=len(chosen), note="")
        return bench_kernel.run(
            chosen,
            where,
            dtype,
            peers,
            samples,
            limit,
            lambda row: bar.update(task, advance=1, note=row["case"]),
            apart,
            save,
        )


def _show_kernels(result: dict[str, Any]) -> None:
    from strop.bench import kernel as bench_kernel

    header, *rows = bench_kernel.rows_of(result)
    show(header, rows, {})
    found = [
        (
            s["family"],
            s["peer"],
            str(s["cases"]),
            f"{s['worst']:.2f}",
            f"{s['median']:.2f}",
            f"{s['geomean']:.2f}",
            s["worst_case"],
        )
        for s in result["summary"]
    ]
    header = ("family", "peer", "cases", "worst", "median", "geomean", "worst case")
    print("\ntimes as long as strop takes:")
    show(header, found, result)
    if result["skipped"]:
        print(f"not measured, --limit is over: {counted(len(result['skipped']), 'case')}")


@app.command("select", epilog=SELECT_EXAMPLES)
@reported
def select(
    sweeps: Annotated[
        list[Path],
        typer.Argument(
            help="Read these files of benchmarks/fit_kernels.py.",
            show_default=False,
        ),
    ],
) -> None:
    """Judge the rules that choose between Strop's own kernels and a library's.

    The table sets the time of the kernel that a rule chooses beside the fastest time that a sweep
    has found at the same shape. This runs on any machine, because all times come from the sweeps.
    """
    from strop.bench import select as bench_select

    found = [choice for sweep in sweeps for choice in bench_select.choices(sweep)]
    rows = [
        (
            choice.kind,
            "x".join(map(str, choice.shape)),
            str(choice.chosen),
            f"{choice.us:.1f}",
            str(choice.fastest),
            f"{choice.fastest_us:.1f}",
            f"{choice.share:.3f}",
            "fitted" if choice.was_fitted else "",
        )
        for choice in found
    ]
    show(("sweep", "shape", "chosen", "us", "fastest", "us", "share", ""), rows, {})
    is_any_new = not all(choice.was_fitted for choice in found)
    for what, held_out in (("all shapes", False), ("held out", True))[: 1 + is_any_new]:
        verdict = bench_select.judged(found, held_out=held_out)
        typer.echo(
            f"{what}: {verdict.count}, geometric mean {verdict.mean:.4f} of the fastest, "
            f"worst {verdict.worst.share:.3f}; {_must(verdict.holds)}"
        )
    first, again = bench_select.decision_us((2, side, 320, 640, 3, 1) for side in range(8, 136))
    typer.echo(f"a decision: {again:.2f} us, {first:.0f} us at a size for the first time")


def _must(holds: bool) -> str:
    return "the must of 0.97 and 0.90 is " + ("reached" if holds else "missed")

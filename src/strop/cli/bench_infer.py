"""Run ``strop bench infer``, and make the table of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from strop.cli import arguments
from strop.cli.arguments import ArchOption, DeviceName, DeviceOption
from strop.cli.mistakes import CommandError, reported, require_diffusion
from strop.cli.tables import OutOption, SamplesOption, known, show, wrong

EXAMPLES = """[bold]Rows[/]
- P1, P2 and P2b: a step of SD1.5's UNet at 512x512 and batch 2, at 1024x1024, and at batch 8
- P3: a step of SDXL's UNet at 1024x1024 and batch 2
- P4-512, P4-1024: the VAE's decoder
- P5-512, P5-768, P5-1024: a picture of SD1.5 in 50 steps; with -img2img, from another picture
- P5x: a picture of SDXL at 1024x1024 in 30 steps
- P5x2-cfg, P5x2-batch: the same with guidance on two GPUs, and 4 pictures on all; by name only
- P6: a cold compile of P1, with its stages
- P7: peak memory of P5-1024, beside eager and naive attention
- D1: a step of Flux.1 at 1024x1024
- D1w, D1w-81: a step of Wan 2.1 1.3B at 480p, with 33 and 81 frames
- D1q: a step of Qwen-Image at 1024x1024
- D1s, D1s35: a step of SD3 medium and of SD3.5 medium at 1024x1024 and batch 2
- F1 to F4: P3, P5x, SD1.5 at 1024x1024 and D1 in fp8; F5: P3 in int8, for --arch 80; by name only
- F6, F7: P5x with a step cache, and with fp8 besides; by name only

[bold]Examples[/]
$ strop bench infer P1 P4 --device cpu --tiny   # any machine: tries the code, not the speed
$ strop bench infer P1 P4-512 --random 12 --variants -o benchmarks/results
$ strop bench infer P5x2 --peers strop-one-gpu   # needs two GPUs
$ strop bench infer F1 F3 --peers strop-one-gpu,eager-graph   # fp8 beside exact
$ strop bench infer P1 --peers eager,eager-graph,inductor,inductor-graph --ablate --plots plots
"""
RESULTS = Path("benchmarks/results")
FolderOption = Annotated[
    Path | None, typer.Option(help="Draw the plots of each row into this folder.")
]
RowsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="Measure these rows only: P1, P4-512, P5 (which is all of P5-...), ... "
        "[dim]\\[default: all][/]",
        show_default=False,
    ),
]
PeersOption = Annotated[
    str,
    typer.Option(help="Measure these peers beside Strop; put commas between them, or '' for none."),
]
EarlierOption = Annotated[
    Path,
    typer.Option(
        help="Take slow peers from earlier results in this folder, where device and versions are"
        " the same; the table shows their date."
    ),
]
BudgetOption = Annotated[
    float,
    typer.Option(min=1.0, help="Take at most this many seconds, and name what does not fit."),
]
RandomOption = Annotated[
    int,
    typer.Option(
        min=0, help="Also measure this many random shapes of each model, in a fresh process."
    ),
]
RandomFromOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Leave out so many of the shapes of --random, which an earlier run with the same"
        " --seed has measured.",
    ),
]
RandomPeerOption = Annotated[
    str,
    typer.Option(
        help="Measure random shapes beside this peer. [dim]\\[default: eager in a CUDA graph][/]",
        show_default=False,
    ),
]
SeedOption = Annotated[int, typer.Option(help="Draw the shapes of --random from this seed.")]
CallsOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Make at most this many calls back to back in a sample of a step; 1 times a call "
        "by itself.",
    ),
]
AblateOption = Annotated[
    bool,
    typer.Option(
        "--ablate", help="Also measure with each switch of Options off alone, and with all off."
    ),
]
VariantsOption = Annotated[
    bool,
    typer.Option(
        "--variants",
        help="With --random, also measure each shape with each option for kernels switched the "
        "other way.",
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="Compute in fp16, bf16 or fp32. "
        "[dim]\\[default: fp32 on a CPU, else bf16 for D1... and fp16 for P1...][/]",
        show_default=False,
    ),
]
TinyOption = Annotated[
    bool,
    typer.Option("--tiny", help="Run the same code with tiny widths and sizes, in seconds."),
]
CommitOption = Annotated[
    str, typer.Option(help="Noted in the JSON instead of the checkout's.", hidden=True)
]
PageOption = Annotated[
    Path | None,
    typer.Option(
        help="Write the tables into this page: between <!-- infer --> and <!-- /infer -->, and "
        "in the same way between marks of train and networks.",
        show_default=False,
    ),
]


@reported
def infer(
    rows: RowsArgument = None,
    peers: PeersOption = "eager,eager-graph",
    out: OutOption = None,
    plots: FolderOption = None,
    earlier: EarlierOption = RESULTS,
    budget: BudgetOption = 1800.0,
    random: RandomOption = 0,
    random_from: RandomFromOption = 0,
    random_peer: RandomPeerOption = "",
    seed: SeedOption = 0,
    ablate: AblateOption = False,
    variants: VariantsOption = False,
    samples: SamplesOption = 20,
    calls: CallsOption = 20,
    dtype: DtypeOption = "",
    device: DeviceOption = DeviceName.auto,
    arch: ArchOption = 0,
    tiny: TinyOption = False,
    commit: CommitOption = "",
) -> None:
    """Time a UNet step, a VAE, whole pictures and a cold compile, with Strop and with its peers.

    Models have random weights at full size; nothing is downloaded. Rows of one model share a
    process, in which all contenders are sampled in turns; random shapes get a fresh process with
    an empty cache. Each row becomes a JSON file, from which tables and plots are made.
    """
    require_diffusion()
    from strop.bench.infer_rows import chosen_rows

    _check_random(random, random_from, variants=variants)
    with wrong("ROWS"):
        chosen = chosen_rows(rows or (), tiny=tiny)
    plan = plan_of(
        device,
        tiny,
        dtype,
        split_peers(peers),
        samples=samples,
        calls=calls,
        random=random,
        random_from=random_from,
        random_peer=split_peers(random_peer)[0] if random_peer else "",
        seed=seed,
        ablate=ablate,
        variants=variants,
        commit=commit,
    )
    arguments.make_folder(out)
    results = _measured(chosen, plan, budget_s=budget, out=out, earlier=earlier, is_apart=not tiny)

    from strop.bench import infer_plots, infer_report

    header, *lines = infer_report.rows_of(results)
    show(header, lines, {})
    files = [result["file"] for result in results if "file" in result]
    files += [str(path) for r in results if plots for path in infer_plots.draw(r, plots)]
    for file in files:
        print(f"written: {file}")


def _check_random(random: int, random_from: int, *, variants: bool) -> None:
    """Raise BadParameter where options of random shapes do not go with how many there are."""
    if random_from and random_from >= random:
        raise typer.BadParameter("must be less than --random", param_hint="--random-from")
    if variants and not random:
        raise typer.BadParameter("goes with --random N", param_hint="--variants")


def split_peers(peers: str) -> tuple[str, ...]:
    from strop.bench.peers import PEERS

    names = tuple(name for name in peers.split(",") if name)
    known("--peers", names, [peer.name for peer in PEERS])
    return names


def plan_of(device: DeviceName, tiny: bool, dtype: str, peers: tuple[str, ...], **more: Any) -> Any:
    from strop.bench.infer_contenders import DTYPES, Plan

    where = arguments.chosen_device(device)
    if where == "cpu" and not tiny:
        raise CommandError(
            "full-size rows need a GPU, and there is none here (or --device cpu was asked for);"
            " --device cpu --tiny runs the same code with tiny models"
        )
    known("--dtype", [dtype] if dtype else [], list(DTYPES))
    if where == "cpu" and dtype not in ("", "fp32"):
        raise typer.BadParameter(f"{dtype}: on a CPU, rows run in fp32", param_hint="'--dtype'")
    return Plan(where, dtype, peers, **more)


def _measured(rows: Any, plan: Any, **how: Any) -> list[dict[str, Any]]:
    """Measure under a progress bar, which also keeps the compiler's warnings off the table."""
    from strop.bench import infer as bench_infer
    from strop.cli.models import quieten
    from strop.cli.stages import only_errors, progress_bar

    quieten()
    with only_errors(), progress_bar() as bar:
        task = bar.add_task("measuring", total=bench_infer.num_tasks(rows, plan), note="")
        return bench_infer.run(
            rows, plan, step=lambda note, done: bar.update(task, note=note, completed=done), **how
        )


@reported
def table(
    results: Annotated[Path, typer.Option(help="Read the JSON files of this folder.")] = RESULTS,
    page: PageOption = None,
    plots: FolderOption = None,
) -> None:
    """Make the tables of `strop bench infer` and `train` from the newest JSON file of each row, and
    that of `strop bench models --speed`."""
    from strop.bench import infer_plots, infer_report, speed, train_plots, train_report

    files = sorted((*results.glob("[PD][0-9]*.json"), *results.glob("ladder*.json")))
    found, trained = infer_report.load(files), train_report.load(files)
    networks = speed.load(results)
    if not found and not trained and not networks:
        raise CommandError(f"no rows in {results}; strop bench infer -o {results} makes them")
    for result in found if plots else ():
        infer_plots.draw(result, plots or Path())
    for result in trained if plots else ():
        train_plots.draw(result, plots or Path())
    texts = {
        "infer": infer_report.markdown(found) if found else "",
        "train": train_report.markdown(trained) if trained else "",
        "networks": speed.markdown(networks) if networks else "",
    }
    for mark, text in texts.items():
        if text and page is None:
            print(text)
        elif text and page is not None:
            infer_report.write_into(page, text, mark)

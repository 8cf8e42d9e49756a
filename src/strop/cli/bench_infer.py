"""``strop bench infer`` and the table that is made of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from strop.cli import arguments
from strop.cli.arguments import Device, DeviceOption
from strop.cli.mistakes import CommandError, reported, require_diffusion
from strop.cli.tables import OutOption, known, show, wrong

EXAMPLES = (
    "[bold]Rows[/]\n\n"
    "P1 SD1.5 UNet step 512², batch 2; P2 at 1024²; P2b batch 8; P3 SDXL UNet step 1024²\n\n"
    "P4 VAE decode (P4-512, P4-1024); P5 SD1.5 pictures of 50 steps (P5-512, P5-768, P5-1024, each"
    " also with -img2img); P5x SDXL picture of 30 steps\n\n"
    "P6 cold compile of P1, with its stages; P7 peak memory of P5-1024 beside eager and naive"
    " attention\n\n"
    "[bold]Examples[/]\n\n"
    "strop bench infer P1 P4 --device cpu --tiny   # any machine: the code, not the speed\n\n"
    "strop bench infer P1 P4-512 --random 12 --variants -o benchmarks/results\n\n"
    "strop bench infer P1 --peers eager,eager-graph,inductor,inductor-graph --ablate --plots plots"
)
RESULTS = Path("benchmarks/results")
FolderOption = Annotated[
    Path | None, typer.Option(help="Folder for the plots of each row.", show_default=False)
]
RowsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="P1, P4-512, P5 (all of P5-...), ... [dim]\\[default: all][/]", show_default=False
    ),
]
PeersOption = Annotated[
    str, typer.Option(help="Whom to run beside, with commas between; '' for nobody.")
]
EarlierOption = Annotated[
    Path,
    typer.Option(
        help="Folder of earlier results: slow peers of the same device and versions come from"
        " there, with their date."
    ),
]
BudgetOption = Annotated[
    float, typer.Option(min=1.0, help="Seconds for everything; what does not fit is named.")
]
RandomOption = Annotated[
    int, typer.Option(min=0, help="So many random shapes a model, in a fresh process.")
]
AblateOption = Annotated[
    bool, typer.Option("--ablate", help="Each switch of Options alone off, and all.")
]
VariantsOption = Annotated[
    bool,
    typer.Option("--variants", help="With --random: beside each, each choice of kernels flipped."),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="fp16, bf16 or fp32. [dim]\\[default: fp32 on a CPU, else fp16][/]",
        show_default=False,
    ),
]
TinyOption = Annotated[
    bool, typer.Option("--tiny", help="Tiny widths and sizes: the same code in seconds.")
]
CommitOption = Annotated[
    str, typer.Option(help="Noted in the JSON instead of the checkout's.", hidden=True)
]
PageOption = Annotated[
    Path | None,
    typer.Option(
        help="Page to write it into, between <!-- infer --> and <!-- /infer -->, and train.",
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
    seed: Annotated[int, typer.Option(help="Of --random.")] = 0,
    ablate: AblateOption = False,
    variants: VariantsOption = False,
    samples: Annotated[int, typer.Option(min=3, help="Of each contender, in turns.")] = 20,
    calls: Annotated[
        int,
        typer.Option(
            min=1,
            help="Back to back in a sample of a step, at most; 1: what a call by itself takes.",
        ),
    ] = 20,
    dtype: DtypeOption = "",
    device: DeviceOption = Device.auto,
    tiny: TinyOption = False,
    commit: CommitOption = "",
) -> None:
    """Time a UNet step, a VAE, whole pictures, a cold compile: Strop beside its peers.

    Models have random weights at full size; nothing is downloaded. Rows of one model share a
    process, in which all contenders are sampled in turns; random shapes get a fresh process with
    an empty cache. Each row is a JSON file, from which tables and plots are made.
    """
    require_diffusion()
    from strop.bench.infer_rows import chosen_rows

    arguments.check_folder(out)
    if variants and not random:
        raise typer.BadParameter("goes with --random N", param_hint="--variants")
    with wrong("ROWS"):
        chosen = chosen_rows(rows or (), tiny=tiny)
    plan = _plan(device, tiny, dtype, _names(peers), samples=samples, calls=calls, random=random,
                 seed=seed, ablate=ablate, variants=variants, commit=commit)  # fmt: skip
    results = _measured(chosen, plan, budget_s=budget, out=out, earlier=earlier, is_apart=not tiny)

    from strop.bench import infer_plots, infer_report

    header, *lines = infer_report.rows_of(results)
    show(header, lines, {})
    files = [result["file"] for result in results if "file" in result]
    files += [str(path) for r in results if plots for path in infer_plots.draw(r, plots)]
    for file in files:
        print(f"written: {file}")


def _names(peers: str) -> tuple[str, ...]:
    from strop.bench.peers import PEERS

    names = tuple(name for name in peers.split(",") if name)
    known("--peers", names, [peer.name for peer in PEERS])
    return names


def _plan(device: Device, tiny: bool, dtype: str, peers: tuple[str, ...], **more: Any) -> Any:
    from strop.bench.infer_contenders import DTYPES, Plan

    where = arguments.chosen_device(device)
    if where == "cpu" and not tiny:
        raise CommandError(
            "full-size rows need a GPU, and there is none here (or --device cpu was asked for);"
            " --device cpu --tiny runs the same code with tiny models"
        )
    dtype = dtype or ("fp16" if where == "cuda" else "fp32")
    known("--dtype", [dtype], list(DTYPES))
    if where == "cpu" and dtype != "fp32":
        raise typer.BadParameter(f"{dtype}: on a CPU, rows run in fp32", param_hint="'--dtype'")
    return Plan(where, dtype, peers, **more)


def _measured(rows: Any, plan: Any, **how: Any) -> list[dict[str, Any]]:
    """Under a progress bar, which also keeps the compiler's warnings off the table."""
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
    results: Annotated[Path, typer.Option(help="Folder of the JSON files.")] = RESULTS,
    page: PageOption = None,
    plots: FolderOption = None,
) -> None:
    """Make the tables of `strop bench infer` and `train` from their JSON files: the newest of each
    row."""
    from strop.bench import infer_plots, infer_report, train_plots, train_report

    files = sorted((*results.glob("P*.json"), *results.glob("ladder*.json")))
    found, trained = infer_report.load(files), train_report.load(files)
    if not found and not trained:
        raise CommandError(f"no rows in {results}; strop bench infer -o {results} makes them")
    for result in found if plots else ():
        infer_plots.draw(result, plots or Path())
    for result in trained if plots else ():
        train_plots.draw(result, plots or Path())
    texts = {"infer": infer_report.markdown(found) if found else "",
             "train": train_report.markdown(trained) if trained else ""}  # fmt: skip
    for mark, text in texts.items():
        if text and page is None:
            print(text)
        elif text and page is not None:
            infer_report.write_into(page, text, mark)

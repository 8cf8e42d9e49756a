"""Run ``strop bench cpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strop.cli import arguments
from strop.cli.mistakes import reported, require_diffusion
from strop.cli.tables import OutOption, SamplesOption, known, show, wrong

EXAMPLES = """[bold]Examples[/]
$ strop bench cpu unet bert -o benchmarks/results
$ strop bench cpu bert-8x64 --peers openvino
$ strop bench cpu dlrm-256 lookups --peers inductor --samples 31
$ strop bench cpu -o benchmarks/results --page docs/benchmarks.md   # all rows, in half an hour
"""

RowsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="Measure these rows: unet (unet-16x24, unet-64x64), bert (bert-8x64, bert-1x32, "
        "bert-32x128), and dlrm, wide, deepfm and lookups (such as dlrm-256; batches 1, 256 and "
        "2048). The name of a model stands for all its rows; none, for everything.",
        show_default=False,
    ),
]
PeersOption = Annotated[
    str,
    typer.Option(
        help="Measure these beside eager and Strop: inductor, openvino, onnxruntime; put commas "
        "between them, or nothing for none."
    ),
]
CoreOption = Annotated[
    int | None,
    typer.Option(
        min=0, help="Run on this core. [dim]\\[default: the last one][/]", show_default=False
    ),
]
PageOption = Annotated[
    Path | None,
    typer.Option(
        help="Write the table of all files in --out into this page, between <!-- cpu --> and "
        "<!-- /cpu -->.",
        show_default=False,
    ),
]


@reported
def cpu(
    rows: RowsArgument = None,
    peers: PeersOption = "inductor,openvino,onnxruntime",
    samples: SamplesOption = 15,
    core: CoreOption = None,
    out: OutOption = None,
    page: PageOption = None,
) -> None:
    """Measure inference on one core of a CPU beside Inductor, OpenVINO and ONNX Runtime.

    The rows are a step of the sprites UNet in fp32 and bf16, BERT-mini in int8, and recommendation
    models with ragged features, each at several sizes. All contenders of a model live in one
    process on one core, have one thread, and are called in turns with the same arguments. Times
    are those of the processor, as other work may run beside them: quote "x eager", the median over
    the turns. "error" is the distance of results from those in fp64, relative by the norm.

    OpenVINO and ONNX Runtime come with pip install 'strop\\[peers]'. A contender that is not
    installed, or that cannot run a model, has a line that says why. Below the table stand the
    musts, each with what was found. With -o each row becomes a JSON file, which also says how each
    contender was made, and each model a plot.
    """
    require_diffusion()
    if page is not None and out is None:
        raise typer.BadParameter("goes with --out", param_hint="'--page'")
    from strop.bench import cpu as bench_cpu
    from strop.bench import cpu_plots, cpu_report
    from strop.bench.cpu_rows import PEERS, chosen_rows
    from strop.bench.infer_report import write_into
    from strop.cli.models import quieten
    from strop.cli.stages import only_errors, progress_bar

    with wrong("ROWS"):
        chosen = chosen_rows(rows or ())
    names = tuple(name for name in peers.split(",") if name)
    known("--peers", list(names), PEERS)
    arguments.make_folder(out)
    quieten()
    with wrong("--core"), only_errors(), progress_bar() as bar:
        task = bar.add_task("measuring", total=None, note="")
        results = bench_cpu.run(
            chosen,
            bench_cpu.CpuPlan(names, samples, core),
            out=out,
            step=lambda note: bar.update(task, note=note),
        )
    header, *lines = cpu_report.rows_of(results)
    show(header, lines, {})
    print("\n".join(cpu_report.verdicts(results)))
    if out is None:
        return
    files = [result["file"] for result in results]
    files += [str(path) for path in cpu_plots.draw(cpu_report.load(out), out)]
    if page is not None:
        write_into(page, cpu_report.markdown(cpu_report.load(out)), cpu_report.MARK)
        files.append(str(page))
    for file in files:
        print(f"written: {file}")

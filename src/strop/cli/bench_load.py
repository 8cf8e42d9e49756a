"""Run ``strop bench load``."""

from __future__ import annotations

from typing import Annotated

import typer

from strop.cli import arguments
from strop.cli.arguments import DeviceName, DeviceOption
from strop.cli.mistakes import reported, require_diffusion
from strop.cli.tables import OutOption, known, show, wrong

EXAMPLES = """[bold]Examples[/]
$ strop bench load sprites --device cpu
$ strop bench load sd15 -o benchmarks/results
$ strop bench load whisper --threads 32 --calls 640 --rounds 2 --sizes 1,4
$ strop bench load sprites --contenders strop   # without eager, which takes longer
"""


WorkloadArgument = Annotated[
    str,
    typer.Argument(
        help="Call this model: sprites, the UNet that comes with Strop; sd15, the UNet of Stable "
        "Diffusion 1.5 at full size with random weights, for a GPU; whisper, an encoder of speech, "
        "Whisper-small's on a GPU and Whisper-tiny's for two seconds on a CPU.",
    ),
]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Call from this many threads.")]
CallsOption = Annotated[
    int, typer.Option(min=1, help="Make this many calls from all threads together.")
]
BaselineOption = Annotated[int, typer.Option(min=1, help="Compare with this many threads.")]
RoundsOption = Annotated[
    int,
    typer.Option(
        min=2,
        help="Share the calls out among this many rounds, in each of which all contenders take "
        "turns. Memory grows in the first, and is to stay in the others.",
    ),
]
SizesOption = Annotated[
    str,
    typer.Option(
        help="Call with these sizes in turns, such as 32x32,48x32x2 (two pictures); of whisper, "
        "how many sounds.",
        show_default=False,
    ),
]
ContendersOption = Annotated[str, typer.Option(help="Measure these; put commas between them.")]
AdapterOption = Annotated[
    bool,
    typer.Option(
        "--adapter",
        help="Load a LoRA, of which each call has its own scale. Strop serves it unmerged.",
    ),
]


@reported
def load(
    workload: WorkloadArgument = "sprites",
    threads: ThreadsOption = 200,
    calls: CallsOption = 10_000,
    baseline_threads: BaselineOption = 8,
    rounds: RoundsOption = 5,
    sizes: SizesOption = "",
    contenders: ContendersOption = "strop,eager",
    adapter: AdapterOption = False,
    out: OutOption = None,
    device: DeviceOption = DeviceName.auto,
) -> None:
    """Call one model from hundreds of threads, and check and time each call.

    A call is one step of a UNet, or one batch of sounds, in one of several sizes and with one of
    several prompts. Each result is compared with what the same call gave alone, bit by bit. The
    table has calls a second and the time from a call to its result, for one thread, for a few, and
    for all; "wrong" counts results with other bits, "MB more" what the process grew by from the end
    of the first round to the end of the last, and "MB held more" what it had allocated and not
    freed. In eager a scale of an adapter is wrong where threads call at once: diffusers sets it in
    the layers, which all of them share.

    Below the table stand the musts, each with "holds" or "misses". Each contender has a process of
    its own, whose memory is measured. On a CPU a lone call of Strop has all threads that torch
    gives it, and calls at the same time have their shares of the cores.
    """
    require_diffusion()
    from strop.bench import load as bench_load
    from strop.bench.load_report import rows_of, verdicts
    from strop.bench.load_workloads import LOAD_WORKLOADS, sized

    known("WORKLOAD", [workload], tuple(LOAD_WORKLOADS))
    names = tuple(name for name in contenders.split(",") if name)
    known("--contenders", list(names), bench_load.CONTENDERS)
    where = arguments.chosen_device(device)
    arguments.make_folder(out)

    import torch

    from strop.cli.models import quieten
    from strop.cli.stages import only_errors, progress_bar

    with wrong("--sizes"):
        chosen = sized(LOAD_WORKLOADS[workload], sizes)
    plan = bench_load.LoadPlan(
        workload, threads, calls, baseline_threads, rounds, chosen, names, adapter
    )
    plan.check()
    quieten()
    with only_errors(), progress_bar() as bar:
        task = bar.add_task("measuring", total=None, note="")
        result = bench_load.run(
            plan, torch.device(where), step=lambda note: bar.update(task, note=note)
        )
    if out is not None:
        result["file"] = str(bench_load.written(result, out, torch.device(where)))
    header, *rows = rows_of(result)
    show(header, rows, result)
    print("\n".join(verdicts(result)))

"""Lead from a dump of a graph that fails to its cause (``strop repro``, ``minify`` and
``bisect``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.arguments import DeviceName
from strop.cli.mistakes import CommandError, errors, reported
from strop.wording import counted

if TYPE_CHECKING:
    from torch import Tensor

    from strop.debug.case import Case
    from strop.debug.failure import Failure

_DUMP = """[bold]Examples[/]
$ STROP_DUMP=dumps python my_model.py   # writes one folder for each compiled graph
"""
REPRO_EXAMPLES = f"""{_DUMP}\
$ strop repro dumps/000_UNet2DConditionModel -o repro
$ python repro/repro.py   # ends with 1 while the graph fails
"""
MINIFY_EXAMPLES = f"""{_DUMP}\
$ strop minify dumps/000_UNet2DConditionModel -o smallest
$ python smallest/repro.py
"""
BISECT_EXAMPLES = f"""{_DUMP}\
$ strop bisect dumps/000_UNet2DConditionModel
$ STROP_DISABLE=dot_merge python my_model.py   # goes on without the pass that it names
"""
Dump = Annotated[
    Path,
    typer.Argument(help="Read this graph: the folder that a dump has for it, or its graph.json."),
]
Seed = Annotated[int, typer.Option(min=0, help="Draw random inputs and weights from this seed.")]
Inputs = Annotated[
    Path | None,
    typer.Option(
        help="Use real inputs instead of random ones: the inputs.safetensors that STROP_DUMP and "
        "STROP_CHECK=1 leave beside a graph. This file holds your weights."
    ),
]
Output = Annotated[
    Path, typer.Option("-o", "--output", help="Write into this folder, which is new or empty.")
]
Where = Annotated[
    DeviceName, typer.Option(help="Compile for this device; auto takes the one in the dump.")
]


@reported
def repro(
    dump: Dump,
    output: Output = Path("repro"),
    seed: Seed = 0,
    inputs: Inputs = None,
    device: Where = DeviceName.auto,
) -> None:
    """Write a script and inputs that show how a dumped graph fails, to attach to a bug report.

    Without --inputs all inputs are random, the weights too: then the folder holds nothing of your
    model but its graph.
    """
    case, arguments = _open(dump, seed, device, output, inputs)
    failure = _failure(case, arguments)
    _write(case, arguments, failure, output)


@reported
def minify(
    dump: Dump, output: Output = Path("minified"), seed: Seed = 0, device: Where = DeviceName.auto
) -> None:
    """Find the smallest part of a dumped graph that still fails in the same way.

    A graph fails if compiling it raises an error, or if its results are less accurate than
    docs/numerics.md allows.
    """
    case, arguments = _open(dump, seed, device, output)
    failure = _failure(case, arguments)

    from strop.cli.stages import progress_bar
    from strop.debug import case as cases
    from strop.debug.failure import failure_of
    from strop.debug.minify import MinifyProgress, num_nodes
    from strop.debug.minify import minify as search

    def fails(candidate: Case) -> bool:
        return failure.is_like(failure_of(candidate, cases.random_inputs(candidate, seed)))

    with progress_bar() as bar:
        task = bar.add_task("minifying", total=None, note="")

        def watch(now: MinifyProgress) -> None:
            bar.update(task, note=f"{counted(now.num_nodes, 'node')}, {counted(now.tries, 'try')}")

        smallest = search(case, fails, watch)
    typer.echo(f"{counted(num_nodes(case.graph), 'node')} -> {num_nodes(smallest.graph)}")
    drawn = cases.random_inputs(smallest, seed)
    _write(smallest, drawn, failure_of(smallest, drawn) or failure, output)


@reported
def bisect(
    dump: Dump, seed: Seed = 0, inputs: Inputs = None, device: Where = DeviceName.auto
) -> None:
    """Name the pass, or the step of the program, that makes a dumped graph fail."""
    case, arguments = _open(dump, seed, device, inputs=inputs)
    failure = _failure(case, arguments)
    typer.echo(str(failure))

    from strop.debug.bisect import bisect as search

    culprits = list(search(case, arguments, failure))
    for culprit in culprits:
        typer.echo(str(culprit))
    for name in (c.name for c in culprits if c.part == "pass"):
        typer.echo(f"to go on without it: STROP_DISABLE={name}")
    if not culprits:
        typer.echo("no single pass or step is to blame; strop minify finds the smallest graph")


def _open(
    dump: Path,
    seed: int,
    device: DeviceName,
    output: Path | None = None,
    inputs: Path | None = None,
) -> tuple[Case, dict[int, Tensor]]:
    if output is not None and output.exists() and (output.is_file() or any(output.iterdir())):
        raise CommandError(f"{output} is there already; choose another folder with -o")

    from strop.debug import case as cases

    case = cases.load(dump, "" if device is DeviceName.auto else device.value)
    if inputs is None:
        return case, cases.random_inputs(case, seed)
    from strop.debug.repro import read_inputs

    return read_inputs(case, inputs)


def _failure(case: Case, arguments: Mapping[int, Tensor]) -> Failure:
    from strop.debug.failure import failure_of

    failure = failure_of(case, arguments)
    if failure is None:
        raise CommandError(
            f"{case.name} does not fail: it compiles, and its results are as"
            " accurate as eager's. Other inputs: --seed N, or --inputs FILE"
            " of bisect and repro (STROP_DUMP and STROP_CHECK=1 on your model save those of a run"
            " that goes wrong)."
        )
    return failure


def _write(case: Case, arguments: Mapping[int, Tensor], failure: Failure, output: Path) -> None:
    from strop.debug import repro as folders

    script = folders.write(case, arguments, str(failure), output)
    typer.echo(str(failure))
    errors().print(f"written: {script}")

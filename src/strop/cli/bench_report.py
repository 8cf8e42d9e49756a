"""Draw what ``strop bench train`` has measured, and compare results (``strop bench report`` and
``compare``), and write the mock set that it reads (``strop bench mock-set``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strop.cli.mistakes import CommandError, reported, require_diffusion
from strop.cli.tables import show
from strop.wording import counted

REPORT_EXAMPLES = """[bold]Examples[/]
$ strop bench train P12 P12c --nproc-per-node 1,2 -o runs
$ strop bench report runs            # runs/report.html and PNG files
$ strop bench report runs -o page --title "Two machines"
"""
COMPARE_EXAMPLES = """[bold]Examples[/]
$ strop bench compare old/P8_h100_2026-11-22.json new/P8_h100_2026-11-28.json
$ strop bench compare before.json after.json --only strop --fail-on-slower   # exit code 1
"""
MOCK_EXAMPLES = """[bold]Examples[/]
$ strop bench mock-set pictures --count 64 --side 512
$ strop train text-to-image --model ./sd --train_data_dir pictures --resolution 512
"""


@reported
def report(
    folder: Annotated[
        Path, typer.Argument(help="Read all results below this folder.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="Write the page and the PNG files into this folder. [dim]\\[default: FOLDER][/]",
            show_default=False,
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="Write this above the page.")] = "Training",
) -> None:
    """Draw the results of strop bench train in a folder as one HTML page and PNG files.

    Results of other machines may be among them; speed-ups and efficiencies are of one machine.
    The page has throughput, speed-up, scaling efficiency, memory, time per module and logs, and
    needs no other file.
    """
    require_diffusion()
    from strop.bench import train_page, train_runs

    runs = train_runs.read(folder)
    for path in train_page.write(runs, out or folder, title):
        print(f"written: {path}")


@reported
def compare(
    before: Annotated[Path, typer.Argument(help="The earlier JSON file.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="The later JSON file.", show_default=False)],
    only: Annotated[
        str, typer.Option(help="Compare these contenders only; put commas between them.")
    ] = "",
    fail_on_slower: Annotated[
        bool,
        typer.Option(
            "--fail-on-slower",
            help="End with exit code 1 where a contender is slower beyond noise, computes a wrong "
            "loss, or has no times any more.",
        ),
    ] = False,
) -> None:
    """Say what has changed beyond noise between two JSON files of a row, of inference or training.

    The noise of a time is the larger spread of the two files, and half a percent at least.
    """
    from strop.bench import compare as comparing

    changes, places = comparing.compare(before, after)
    wanted = {part.strip() for part in only.split(",") if part.strip()}
    unknown = wanted - {change.contender for change in changes}
    if unknown:
        raise CommandError(f"no contender {', '.join(sorted(unknown))} in both files")
    changes = [change for change in changes if not wanted or change.contender in wanted]
    header, *rows = comparing.rows_of(changes)
    show(header, rows, {})
    for line in places:
        print(f"differs: {line}")
    worse = sorted({change.contender for change in changes if change.is_worse})
    print(f"worse: {', '.join(worse)}" if worse else "nothing is slower beyond noise")
    if worse and fail_on_slower:
        raise typer.Exit(1)


@reported
def mock_set(
    folder: Annotated[
        Path, typer.Argument(help="Write into this folder, which is made.", show_default=False)
    ],
    count: Annotated[int, typer.Option(min=1, help="Write so many pictures.")] = 256,
    side: Annotated[
        int, typer.Option(min=32, help="Write pictures for this resolution, a quarter larger.")
    ] = 512,
) -> None:
    """Write JPEG pictures with captions that nobody took, to try trainings with.

    They are those that strop bench train reads; the same numbers give the same files.
    """
    require_diffusion()
    from strop.bench import mock_set as mock

    if folder.is_dir() and any(folder.iterdir()):
        raise CommandError(f"{folder} is not empty; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    mock.write(folder, side, count)
    print(f"written: {counted(count, 'picture')} and metadata.jsonl in {folder}")

"""Print tables on the screen, and declare options that the benchmarks share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from strop.errors import OptionError

FILE_COLUMNS = 240
OutOption = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--out",
        help="Write the results as JSON into this folder; without it, nothing is written.",
    ),
]
SamplesOption = Annotated[
    int, typer.Option(min=3, help="Take this many samples of each contender, in turns.")
]


def show(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], result: dict[str, Any]) -> None:
    screen = Console(highlight=False, soft_wrap=True)
    if not screen.is_terminal:  # a log has no width
        screen = Console(highlight=False, soft_wrap=True, width=FILE_COLUMNS)
    table = Table(*header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    screen.print(table)
    if "file" in result:
        screen.print(f"written: {result['file']}", markup=False)


@contextmanager
def wrong(what: str) -> Iterator[None]:
    """Turn an OptionError into an error about arguments of the command."""
    try:
        yield
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint=f"'{what}'") from error


def known(what: str, given: Sequence[str], names: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise typer.BadParameter(
            f"no {', '.join(unknown)}; there are {', '.join(names)}", param_hint=f"'{what}'"
        )

"""Tell what the disk cache holds, and make it smaller or sound (``strop cache``)."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.env import bytes_text
from strop.cli.help_screen import App
from strop.cli.mistakes import CommandError, reported
from strop.options import Options
from strop.wording import counted

if TYPE_CHECKING:
    from strop.runtime.build.cache import CacheEntry, DiskCache

app = App(
    no_args_is_help=True,
    help="List, shrink or check the cache of plans and compiled kernels.",
    epilog="""[bold]Examples[/]
    $ strop cache list
    $ strop cache prune --size 500MB   # what was not used for longest goes first
    $ strop cache prune --age 30d
    $ STROP_CACHE_DIR=/tmp/cache strop cache verify""",
)
_SIZES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _parse_size(text: str | int) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip())
    if found is None or found[2].upper() not in _SIZES:
        raise typer.BadParameter(f"{text!r} is no size; write 500MB, 2GiB or 0")
    return int(float(found[1]) * _SIZES[found[2].upper()])


def _parse_age(text: str | float) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", str(text).strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no age; write 12h, 30d or 2w")
    return float(found[1]) * _AGES[found[2]]


@app.command("list")
@reported
def list_command(
    every: Annotated[
        bool, typer.Option("--all", help="Also show each entry, on a line of its own.")
    ] = False,
) -> None:
    """Show how many entries of each kind there are, how large and how old they are.

    With --all it shows each entry, too, those not used for longest first.
    """
    from strop.runtime.build.cache import KINDS

    store = _filled()
    if store is None:
        return
    entries, now = store.entries(), time.time()
    by_kind: dict[str, list[CacheEntry]] = defaultdict(list)
    for entry in entries:
        by_kind[entry.kind].append(entry)
    typer.echo(f"{_folder()}: {counted(len(entries), 'entry')}, {_total(entries)}")
    for kind, rows in sorted(by_kind.items(), key=lambda item: -sum(e.num_bytes for e in item[1])):
        typer.echo(
            f"{kind:>8} {len(rows):6d}  {_total(rows):>10}  last used {_ago(rows[-1], now)},"
            f" longest unused {_ago(rows[0], now)}  {KINDS[kind]}"
        )
    for entry in entries if every else ():
        typer.echo(f"{entry.kind}/{entry.key}  {bytes_text(entry.num_bytes)}  {_ago(entry, now)}")


@app.command()
@reported
def prune(
    size: Annotated[
        int | None,
        typer.Option(
            parser=_parse_size, metavar="BYTES", help="Leave at most this much, such as 500MB or 0."
        ),
    ] = None,
    age: Annotated[
        float | None,
        typer.Option(
            parser=_parse_age,
            metavar="AGE",
            help="Remove what has not been used for this long, such as 30d or 12h.",
        ),
    ] = None,
) -> None:
    """Remove entries, those not used for longest first.

    What is removed is compiled again when a model needs it.
    """
    if size is None and age is None:
        raise typer.BadParameter("say what may stay: --size 500MB, --age 30d, or both")
    store = _filled()
    if store is None:
        return
    removed = store.prune(size, 0.0 if age is None else time.time() - age)
    typer.echo(f"removed {bytes_text(removed)}; {_total(store.entries())} left in {_folder()}")


@app.command()
@reported
def verify() -> None:
    """Check every entry against its checksum, and name and remove the broken ones."""
    store = _filled()
    if store is None:
        return
    for entry in (damaged := store.verify()):
        typer.echo(f"removed {entry.path}: its checksum does not hold")
    rest = store.entries()
    typer.echo(f"{counted(len(rest), 'entry')} sound, {len(damaged)} removed")


def _folder() -> Path:
    return Options.from_environment().cache_path


def _filled() -> DiskCache | None:
    """Return the cache; where it holds nothing, print one line and return None, because looking
    must not create it."""
    from strop.runtime.build.cache import DiskCache

    folder = _folder()
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"{folder} is no folder: STROP_CACHE_DIR names the folder of the cache")
    store = DiskCache(folder) if folder.is_dir() else None
    if store is not None and store.entries():
        return store
    typer.echo(
        f"there is nothing of Strop's in {folder}: nothing has been compiled with this cache"
        " folder yet (STROP_CACHE_DIR chooses another)"
    )
    return None


def _total(entries: list[CacheEntry]) -> str:
    return bytes_text(sum(entry.num_bytes for entry in entries))


def _ago(entry: CacheEntry, now: float) -> str:
    seconds = max(now - entry.used_s, 0.0)
    unit = next((u for u in ("w", "d", "h", "m") if seconds >= 2 * _AGES[u]), "s")
    return f"{seconds / _AGES[unit]:.0f} {unit} ago"

"""End a command: 0 done, 1 failed with one line that says why, 2 wrong arguments."""

from __future__ import annotations

import errno
import functools
import importlib.util
from collections.abc import Callable
from typing import ParamSpec

import typer
from rich.console import Console

from strop.errors import StropError

P = ParamSpec("P")


class CommandError(StropError):
    """A command cannot go on; the message says what to do."""


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """Turn the errors of a command that a user can act on into one line and exit code 1."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (StropError, OSError) as error:
            tell(error)
            raise typer.Exit(1) from error

    return run


_REMEDIES = {
    errno.ENOSPC: "make room, or write elsewhere: results by -o or --output_dir, kernels by"
    " STROP_CACHE_DIR, temporary files by TMPDIR",
    errno.EROFS: "this file system is read-only; write elsewhere",
    errno.EACCES: "this user may not do that; write elsewhere, or change who may: chmod, chown",
    errno.EMFILE: "this process holds too many open files; allow more: ulimit -n 4096",
}
_REMEDIES[errno.EDQUOT] = _REMEDIES[errno.EFBIG] = _REMEDIES[errno.ENOSPC]
_REMEDIES[errno.EPERM] = _REMEDIES[errno.EACCES]


def tell(error: Exception) -> None:
    """Print an error, and what to do about it where the system says only what is wrong."""
    errors().print(f"[bold red]error:[/] {plain(_told(error))}")


def _told(error: Exception) -> str:
    if isinstance(error, StropError) or not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{where}{error.strerror[:1].lower()}{error.strerror[1:]}" + (
        f"; {remedy}" if remedy else ""
    )


def warn(text: str) -> None:
    errors().print(f"[yellow]warning:[/] {plain(text)}")


def errors() -> Console:
    """Return the console for messages and progress; standard output keeps results only."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


def plain(text: str) -> str:
    """Return text for rich with its brackets as they are."""
    return text.replace("[", r"\[")


def require_diffusion() -> None:
    """Raise CommandError unless the packages that pipelines need are installed."""
    wanted = {"diffusers": "diffusers", "transformers": "transformers", "PIL": "pillow"}
    missing = [name for module, name in wanted.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise CommandError(
            f"this command needs {', '.join(missing)}: pip install 'strop[diffusion]'"
        )

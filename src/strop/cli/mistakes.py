"""End a command: 0 done, 1 failed with one line that says why, 2 wrong arguments."""

from __future__ import annotations

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


def tell(error: Exception) -> None:
    errors().print(f"[bold red]error:[/] {plain(str(error))}")


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

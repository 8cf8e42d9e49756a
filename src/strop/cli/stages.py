"""Show progress on the screen: every stage shows what it is at and for how long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from strop.api import dispatchers_of
from strop.cli.mistakes import errors, plain
from strop.wording import counted

_REFRESH_S = 0.2


def progress_bar() -> Progress:
    """Return a progress bar on standard error, which is gone when done, and silent unless that is a
    terminal."""
    screen = errors()
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[note]}", style="dim"),
        TimeElapsedColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    )


class StageSeconds:
    """Hold the seconds of each stage, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show a bar without an end, for a stage that cannot tell how far it is."""
    with progress_bar() as bar:
        bar.add_task(text, total=None, note="")
        yield


class _Warnings(logging.Handler):
    """Print warnings of the compiler above the bar."""

    def __init__(self, bar: Progress) -> None:
        super().__init__(logging.WARNING)
        self.bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        self.bar.console.print(f"[yellow]warning:[/] {plain(record.getMessage())}")


@contextmanager
def only_errors() -> Iterator[None]:
    """Show only the compiler's errors: warnings would tear a progress bar."""
    logger = logging.getLogger("strop")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def compiler_warnings(bar: Progress) -> Iterator[None]:
    """Show warnings while ``bar`` is on the screen."""
    log, handler = logging.getLogger("strop"), _Warnings(bar)
    propagates = log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagates


@contextmanager
def compiling(pipe: Any) -> Iterator[None]:
    """Show a bar over the components of an optimised pipeline, with the name of the one being
    compiled."""
    parts = {n: d for n, d in dispatchers_of(pipe).items() if n != "vae.encoder"}
    stop = threading.Event()
    with progress_bar() as bar, compiler_warnings(bar):
        task = bar.add_task("compiling", total=len(parts), note="")

        def watch() -> None:
            while not stop.wait(_REFRESH_S):
                ready = sum(bool(d.variants.all) for d in parts.values())
                begun = [n for n, d in parts.items() if d.counters.calls and not d.variants.all]
                name = begun[-1] if begun else ""
                note = f"{ready} of {counted(len(parts), 'part')}"
                note += f": {parts[name].variants.progress}" if name else ""
                bar.update(task, completed=ready, description=f"compiling {name}", note=note)

        watcher = threading.Thread(target=watch, name="strop-progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()

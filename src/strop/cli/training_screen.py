"""Show the progress of ``strop train``: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console

from strop.cli.mistakes import errors, plain
from strop.cli.stages import progress_bar
from strop.wording import counted

if TYPE_CHECKING:
    from strop.train.loop import Outcome
    from strop.train.metrics import Metrics
    from strop.train.session import Session
    from strop.train.settings import Settings

_LINE_EVERY_S = 10.0


class Screen:
    """Implements ``strop.train.loop.Watch``."""

    def __init__(self) -> None:
        self._bar = progress_bar()
        self._task = self._bar.add_task("starting", total=None, note="")
        self._quiet_until = 0.0

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def stage(self, text: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=text, completed=done, total=total, note="")

    def step(self, last: Metrics, total: int, eta_s: float) -> None:
        note = (
            f"step {last.step}/{total}  loss {last.loss:.4f}  lr {last.lr:.2e}  "
            f"{last.images_per_s:.1f} img/s  eta {timedelta(seconds=round(eta_s))}"
        )
        self._bar.update(
            self._task, description="training", completed=last.step, total=total, note=note
        )
        now = time.monotonic()
        if self._bar.disable and (now > self._quiet_until or last.step == total):
            errors().print(note, markup=False)
            self._quiet_until = now + _LINE_EVERY_S

    def warn(self, text: str) -> None:
        self._bar.console.print(f"[yellow]warning:[/] {plain(text)}")

    def session(self, session: Session) -> None:
        """Show what is about to be trained."""
        settings = session.settings
        count = sum(p.numel() for p in session.learner.parameters)
        batch = settings.whole_batch_size * settings.gradient_accumulation_steps
        ranks = session.ranks.count
        where = f" in each of {ranks} processes" if ranks > 1 else ""
        text = (
            f"training {counted(count, 'weight', ',')} on {session.model.device}{where},"
            f" {counted(batch, 'picture')} a step, steps {session.step} to {session.total}"
        )
        if session.swap is not None:
            size = session.swap.host_bytes / 1e9
            text += f", {size:.2f} GB of frozen weights in the host's memory"
        self._bar.console.print(text, markup=False)

    def result(self, settings: Settings, outcome: Outcome) -> None:
        screen = Console(highlight=False, soft_wrap=True)
        if outcome.stopped_by is None:
            steps = counted(outcome.step, "step")
            screen.print(f"{steps}; the model is in {settings.output}", markup=False)
        elif outcome.step:
            screen.print(
                f"stopped by signal {outcome.stopped_by} after step {outcome.step} of "
                f"{outcome.total}, which is saved; continue with "
                "--resume_from_checkpoint latest",
                markup=False,
            )
        else:
            screen.print("stopped before the first step; nothing is saved", markup=False)


class Quiet:
    """Shows nothing: rank 0 speaks for the others."""

    def __enter__(self) -> Quiet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def stage(self, text: str, done: int, total: int) -> None: ...

    def step(self, last: Metrics, total: int, eta_s: float) -> None: ...

    def warn(self, text: str) -> None: ...

    def session(self, session: Session) -> None: ...

    def result(self, settings: Settings, outcome: Outcome) -> None: ...

"""Run the training loop. What a step computes depends on the seed, its number and the state before
it; so a training that was stopped and resumed gives the bits of one that was not."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

import numpy
import torch
from torch import Tensor

from strop.errors import TrainingError
from strop.train import drawing, files, outputs
from strop.train.data import Reader
from strop.train.learner import Learner
from strop.train.messages import LostRanksError
from strop.train.metrics import Journal, Metrics, NoJournal
from strop.train.objective import Objective
from strop.train.saving import Saver
from strop.train.schedules import learning_rate
from strop.train.session import Session
from strop.train.step_runs import make_runs

_REPORT_S = 1.0


class Watch(Protocol):
    """Show the progress."""

    def stage(self, text: str, done: int, total: int) -> None: ...

    def step(self, last: Metrics, total: int, eta_s: float) -> None: ...

    def warn(self, text: str) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """Say how a training ended: ``stopped_by`` is a signal's number, or None if it is complete."""

    step: int
    total: int
    stopped_by: int | None = None


@dataclass
class _Window:
    """Hold steps that were not reported yet; their losses wait on the device."""

    start: float = field(default_factory=time.monotonic)
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    images: int = 0


class Stop:
    """Remembers the first SIGTERM or SIGINT; the second one acts as ever."""

    def __init__(self) -> None:
        self.by: int | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers
            return
        before = {kind: signal.signal(kind, self._note) for kind in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.by = number
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, signal.SIG_DFL)


class TrainingLoop:
    """Runs a session from its checkpoint to its last step."""

    def __init__(self, session: Session, watch: Watch) -> None:
        self.session, self.watch, self.settings = session, watch, session.settings
        self.learner: Learner = session.learner
        self.ranks = session.ranks
        self.objective = Objective(
            session.settings, session.model, session.unet, session.ranks.rank
        )
        self.step = self.saved = session.step
        self.total = session.total
        self.stop = Stop()
        self.runs = make_runs(
            session.settings, self.objective, self.learner, self.ranks, watch.warn
        )
        self.saver = Saver(session.settings, session.ranks)
        self.learner.before_changes = self.saver.settle
        self._window = _Window()

    def run(self) -> Outcome:
        """Train, then write the model; or save a checkpoint and return when told to stop."""
        device = self.session.model.device
        try:
            with (
                torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
                self.stop.watching(),
                self.session.model.attention(self.settings.compile_unet),
            ):
                return self._run()
        finally:
            if self.session.hold is not None:
                self.session.hold.release()

    def _run(self) -> Outcome:
        size = self.settings.gradient_accumulation_steps
        first, last = self.step * size, self.total * size
        on_gpu = self.session.model.device.type == "cuda"
        reader = Reader(
            self.session.source, first, last, self.settings.dataloader_num_workers, pins=on_gpu
        )
        is_first = self.ranks.is_first
        self.journal = Journal(self.settings, self.step) if is_first else NoJournal()
        try:
            if self.step == 0:
                self._validate()
            self.learner.train()
            self._window = _Window()
            while self.step < self.total and self._one(reader):
                self._after_step()
            self._report()
            if by := self._told_to_stop():
                self._save()
                self.saver.wait()
                return Outcome(self.step, self.total, by)
            self._finish()
        except BaseException as error:
            self.saver.close(self.watch.warn, alone=isinstance(error, LostRanksError))
            raise
        else:
            self.saver.close(self.watch.warn)
        finally:
            reader.close()
            self.journal.close()
        return Outcome(self.step, self.total)

    def _one(self, reader: Reader) -> bool:
        """Run a step of the optimizer. A signal in its middle takes it back; then returns False."""
        size, losses = self.settings.gradient_accumulation_steps, []
        rate = learning_rate(self.settings, self.step, self.total)
        self.ranks.at(self.step + 1)
        for part in range(size):
            if self._told_to_stop():
                self.runs.forget()
                return False
            batch, is_last = reader.next(), part == size - 1
            number = self.step * size + part
            losses.append(self.runs.micro_batch(batch, number, rate if is_last else None))
            self._window.images += batch.share.drawn
        self.step += 1
        self._window.losses.append(self.ranks.mean(torch.stack(losses).mean()))
        self._window.norms.append(self.learner.norm.clone())
        self._window.rates.append(rate)
        return True

    def _told_to_stop(self) -> int:
        """Return the number of the signal that a rank has got, the same on all; 0 for none."""
        return self.ranks.most(self.stop.by or 0)

    def _after_step(self) -> None:
        self.saver.check()
        if self.step == self.session.step + 1 and self._saves_later:
            self.saver.reserve(self.learner.tensors())
        if time.monotonic() - self._window.start > _REPORT_S:
            self._report()
        if self.step % self.settings.checkpointing_steps == 0:
            self._report()
            self._save()
        every = self.settings.validation_steps
        if every is not None and self.step % every == 0 and self.step < self.total:
            self._report()
            self._validate()

    @property
    def _saves_later(self) -> bool:
        """Tell whether this rank writes checkpoints, and a further one comes."""
        writes = self.ranks.is_first or self.learner.is_sharded
        every = self.settings.checkpointing_steps
        return writes and self.step // every * every + every <= self.total

    def _report(self) -> None:
        """Read the losses, which waits for the device, and hand them on."""
        window, count = self._window, len(self._window.losses)
        if not count:
            return
        losses, norms = (torch.stack(values).tolist() for values in (window.losses, window.norms))
        seconds = time.monotonic() - window.start
        size, per_epoch = self.settings.gradient_accumulation_steps, self.session.batches_per_epoch
        rows = []
        for place, (loss, norm, rate) in enumerate(zip(losses, norms, window.rates, strict=True)):
            step = self.step - count + place + 1
            epoch = (step * size - 1) // per_epoch if per_epoch else 0
            rows.append(Metrics(step, epoch, loss, rate, norm, window.images / seconds))
        self._check(rows)
        self.journal.write(rows)
        self.watch.step(rows[-1], self.total, (self.total - self.step) * seconds / count)
        self._window = _Window()

    def _check(self, rows: list[Metrics]) -> None:
        """Refuse what is not finite, which would be in all weights after a step and in the next
        checkpoint. A scaler leaves out steps whose gradients are not."""
        for row in rows:
            judged = {"loss": row.loss}
            if not self.learner.skips_steps:
                judged["norm of the gradients"] = row.grad_norm
            for name, value in judged.items():
                if not math.isfinite(value):
                    raise TrainingError(
                        f"the {name} of step {row.step} is {value}; {self._kept}. Start anew in "
                        "another --output_dir with a lower --learning_rate, or without "
                        "--mixed_precision"
                    )

    @property
    def _kept(self) -> str:
        return f"checkpoint-{self.saved} is kept" if self.saved else "there is no checkpoint yet"

    def _save(self) -> None:
        """Save a checkpoint of this step, unless it is there."""
        if self.step == self.saved:
            return
        self.ranks.check_same(f"weights after step {self.step}", self.learner.fingerprint)
        if self.ranks.is_first:
            self.watch.stage("saving a checkpoint", self.step, self.total)
        state = {**self.session.state(), **self.learner.numbers()}
        self.saver.save(self.step, self.learner.tensors(), state, self.learner.is_sharded)
        self.saved = self.step
        self._window.start = time.monotonic()

    def _validate(self) -> None:
        if not self.settings.validation_prompt:
            return
        settings, model = self.settings, self.session.model
        if self.ranks.is_first:
            self.watch.stage("drawing validation pictures", self.step, self.total)
        style = drawing.style_of(settings, model, self.session.side)
        self.learner.train(False)
        with self.learner.averaged(), self.session.idle.here():
            pictures = drawing.validate(settings, model, style, self.ranks)
        self.learner.train()
        path = settings.output / "validation" / f"step-{self.step:06d}.png"
        page = self.ranks.alone(lambda: drawing.write_sheet(pictures, path))
        if page is not None:
            self.journal.picture(numpy.asarray(page), self.step)
        self._window.start = time.monotonic()

    def _finish(self) -> None:
        self._validate()
        self.ranks.check_same("weights at the end", self.learner.fingerprint)
        self.saver.wait()
        self.learner.train(False)
        with self.learner.averaged():
            self.ranks.alone(self._write_model)

    def _write_model(self) -> None:
        self.watch.stage("saving the model", self.step, self.total)
        outputs.save(self.settings, self.session.model)
        files.sweep(self.settings.output)

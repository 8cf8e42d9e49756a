"""The training loop: pieces bounded by the clock, each continuing where the last one stopped."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.models.sprites import checkpoint
from strop.models.sprites.grammar import BUCKETS
from strop.models.sprites.learner import Learner, learning_rate

_RATE_FROM, _RATE_STEPS, _PLAN_MARGIN = 40, 80, 0.97
# Stands for the number of steps until it is planned; the rate has yet to decay by then.
_UNPLANNED = 10**9
_REPORT_SECONDS, _SAVE_SECONDS = 5.0, 240.0


@dataclass(frozen=True)
class Piece:
    """One invocation: where it keeps its checkpoint and how long it may run.

    Attributes:
        folder: The checkpoint folder.
        minutes: When to stop and save, in minutes from the start of this piece.
        plan_minutes: If given, the number of steps is set once so that all pieces together
            take about this long; otherwise `steps` is the number of steps.
        steps: Number of steps of the whole training.
        resume: Continue a checkpoint; without it an existing one is an error.
    """

    folder: Path
    minutes: float
    plan_minutes: float | None
    steps: int
    resume: bool


def bucket(step: int, batch: int) -> tuple[int, int, int]:
    """Return width, height and batch size of `step`; `batch` is that of 96x64 pictures."""
    width, height = BUCKETS[step % len(BUCKETS)]
    count = batch * 96 * 64 // (width * height)
    return width, height, max(2, count // 8 * 8 if count >= 8 else count)


def generator(seed: int, step: int, device: torch.device) -> torch.Generator:
    """Return the random source of one step; it depends on nothing else, so resuming is exact."""
    return torch.Generator(device=device).manual_seed(seed * 1_000_003 + step)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class _Window:
    """What was trained since the last progress line."""

    start: float
    step: int
    images: int = 0
    losses: list[Tensor] = field(default_factory=list)


class Loop:
    """Runs `loss(step)` through a learner until the steps or the minutes are used up."""

    def __init__(
        self, learner: Learner, loss: Callable[[int], Tensor], piece: Piece, note: dict[str, Any]
    ) -> None:
        self.learner = learner
        self.loss = loss
        self.piece = piece
        self.device = learner.masters[0].device
        self.state: dict[str, Any] = {"step": 0, "elapsed": 0.0, "total": None, "images": 0, **note}
        if piece.plan_minutes is None:
            self.state["total"] = piece.steps
        self._window = _Window(time.monotonic(), 0)
        self._timed: tuple[float, int] | None = None
        self._continue()

    def _continue(self) -> None:
        found = checkpoint.find(self.piece.folder)
        if found is None:
            return
        if not self.piece.resume:
            raise FileExistsError(
                f"{found} holds a checkpoint already; add --resume to continue it, or choose "
                "another --out"
            )
        self.learner.load(found)
        self.state.update(checkpoint.state(found))

    @property
    def done(self) -> bool:
        """Whether all planned steps have been made."""
        return self.state["total"] is not None and self.state["step"] >= self.state["total"]

    def run(self) -> bool:
        """Train this piece and save; returns whether the training is complete."""
        start = saved = time.monotonic()
        before, first = self.state["elapsed"], self.state["step"]
        self._window = _Window(start, first)
        while not self.done and time.monotonic() - start < self.piece.minutes * 60:
            step = self.state["step"]
            self._measure(step)
            self._window.losses.append(self._one(step))
            self.state["step"] = step + 1
            now = time.monotonic()
            self.state["elapsed"] = before + now - start
            if now - self._window.start > _REPORT_SECONDS:
                self._report()
            if now - saved > _SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        if self.state["step"] > first:
            _wait(self.device)
            self.state["elapsed"] = before + time.monotonic() - start
            self.save()
        return self.done

    def _one(self, step: int) -> Tensor:
        loss = self.loss(step)
        count = bucket(step, self.learner.training.batch)[2]
        self.state["images"] += count
        self._window.images += count
        self.learner.step(loss, step, self.state["total"] or _UNPLANNED)
        return loss.detach().float()

    def _measure(self, step: int) -> None:
        """Time some early steps, once all kernels are compiled, and plan the rest by them."""
        if self.state["total"] is not None or self.piece.plan_minutes is None:
            return
        if self._timed is None and step >= _RATE_FROM:
            _wait(self.device)
            self._timed = (time.monotonic(), step)
        elif self._timed is not None and step - self._timed[1] >= _RATE_STEPS:
            _wait(self.device)
            seconds = (time.monotonic() - self._timed[0]) / (step - self._timed[1])
            left = max(0.0, self.piece.plan_minutes * 60 - self.state["elapsed"])
            self.state["total"] = step + int(_PLAN_MARGIN * left / seconds)
            print(f"plan: {self.state['total']} steps of {seconds * 1000:.1f} ms", flush=True)

    def _report(self) -> None:
        step, total, window = self.state["step"], self.state["total"], self._window
        loss = torch.stack(window.losses).mean().item()
        now = time.monotonic()
        seconds = now - window.start
        left = None if total is None else (total - step) * seconds / (step - window.step) / 60
        lr = learning_rate(self.learner.training, step, total or _UNPLANNED)
        print(
            f"step {step}/{total or '?'} loss {loss:.5f} lr {lr:.2e} "
            f"{window.images / seconds:.0f} img/s elapsed {self.state['elapsed'] / 60:.1f} min "
            f"eta {'?' if left is None else f'{left:.1f} min'}",
            flush=True,
        )
        self._window = _Window(now, step)

    def save(self) -> None:
        """Write the checkpoint."""
        self.learner.save(self.piece.folder, self.state)

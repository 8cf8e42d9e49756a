"""Train in pieces bounded by the clock, each continuing where the last one stopped."""

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

_REPORT_SECONDS, _SAVE_SECONDS = 5.0, 240.0


@dataclass(frozen=True)
class Piece:
    """Describe one invocation: where it keeps its checkpoint and how long it may run.

    Attributes:
        folder: The checkpoint folder.
        minutes: When to stop and save, in minutes from the start of this piece.
        resume: Continue a checkpoint; without it an existing one is an error.
    """

    folder: Path
    minutes: float
    resume: bool


def bucket(step: int, batch: int) -> tuple[int, int, int]:
    """Return width, height and batch size of `step`; `batch` is that of 96x64 pictures."""
    width, height = BUCKETS[step % len(BUCKETS)]
    count = batch * 96 * 64 // (width * height)
    return width, height, max(2, count // 8 * 8 if count >= 8 else count)


def generator(seed: int, step: int, device: torch.device) -> torch.Generator:
    """Return the random source of one step; it depends on nothing else, so resuming is exact."""
    return torch.Generator(device=device).manual_seed(seed * 1_000_003 + step)


@dataclass
class _Window:
    """Hold what was trained since the last progress line."""

    start: float
    step: int
    images: int = 0
    losses: list[Tensor] = field(default_factory=list)


class BudgetLoop:
    """Runs `loss(step)` through a learner until the steps or the minutes are used up.

    `note` is kept in the checkpoint beside the number of steps and the seconds that they took.

    Raises:
        FileExistsError: there is a checkpoint, and the piece is not to resume it.
        ValueError: the checkpoint is of a model with other settings.
    """

    def __init__(
        self, learner: Learner, loss: Callable[[int], Tensor], piece: Piece, note: dict[str, Any]
    ) -> None:
        self.learner = learner
        self.loss = loss
        self.piece = piece
        self.device = learner.masters[0].device
        self.total = learner.training.steps
        self.state: dict[str, Any] = {"step": 0, "elapsed": 0.0}
        self._continue()
        self.state |= note
        self._window = _Window(time.monotonic(), self.state["step"])

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
        """Tell whether all steps have been made."""
        return bool(self.state["step"] >= self.total)

    def run(self) -> bool:
        """Train this piece and save; returns whether the training is complete."""
        start = saved = time.monotonic()
        before, first = self.state["elapsed"], self.state["step"]
        self._window = _Window(start, first)
        while not self.done and time.monotonic() - start < self.piece.minutes * 60:
            self._one(self.state["step"])
            self.state["step"] += 1
            now = time.monotonic()
            self.state["elapsed"] = before + now - start
            if now - self._window.start > _REPORT_SECONDS:
                self._report()
            if now - saved > _SAVE_SECONDS:
                self._save()
                saved = time.monotonic()
        if self.state["step"] > first:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.state["elapsed"] = before + time.monotonic() - start
            self._save()
        return self.done

    def _one(self, step: int) -> None:
        loss = self.loss(step)
        self.learner.step(loss, step)
        self._window.images += bucket(step, self.learner.training.batch)[2]
        self._window.losses.append(loss.detach().float())

    def _report(self) -> None:
        step, window = self.state["step"], self._window
        loss = torch.stack(window.losses).mean().item()
        now = time.monotonic()
        seconds = now - window.start
        left = (self.total - step) * seconds / (step - window.step) / 60
        print(
            f"step {step}/{self.total} loss {loss:.5f} "
            f"lr {learning_rate(self.learner.training, step):.2e} "
            f"{window.images / seconds:.0f} img/s elapsed {self.state['elapsed'] / 60:.1f} min "
            f"eta {left:.1f} min",
            flush=True,
        )
        self._window = _Window(now, step)

    def _save(self) -> None:
        self.learner.save(self.piece.folder, self.state)

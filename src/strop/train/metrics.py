"""Report what a training does in each step: always as JSON lines, and to TensorBoard if wanted."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strop.errors import OptionError
from strop.train import files
from strop.train.settings import Settings

NAME = "metrics.jsonl"


@dataclass(frozen=True)
class Metrics:
    """Hold the numbers of one step; ``images_per_s`` is over the steps that were reported
    together."""

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    images_per_s: float


class Journal:
    """Write ``metrics.jsonl``; a resumed training takes back the lines after its checkpoint."""

    def __init__(self, settings: Settings, step: int) -> None:
        self.path = settings.output / NAME
        if step:
            self._cut(step)
        else:
            self.path.unlink(missing_ok=True)
        self._board = _tensorboard(settings, step) if settings.report_to == "tensorboard" else None

    def _cut(self, step: int) -> None:
        lines = self.path.read_text().splitlines(keepends=True) if self.path.is_file() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        files.write(self.path, lambda part: part.write_text("".join(kept)))

    def write(self, rows: list[Metrics]) -> None:
        with files.writing(self.path), self.path.open("a") as out:
            out.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
        if self._board is None:
            return
        for row in rows:
            for name in ("loss", "lr", "grad_norm", "images_per_s"):
                self._board.add_scalar(f"train/{name}", getattr(row, name), row.step)

    def picture(self, pixels: Any, step: int) -> None:
        """Write a validation sheet [height, width, 3] in 8 bit."""
        if self._board is not None:
            self._board.add_image("validation", pixels, step, dataformats="HWC")

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


class NoJournal:
    """Writes nothing: that is for ranks other than 0."""

    def write(self, rows: list[Metrics]) -> None: ...

    def picture(self, pixels: Any, step: int) -> None: ...

    def close(self) -> None: ...


def check_available(settings: Settings) -> None:
    """Raise OptionError if TensorBoard is wanted and not installed."""
    if settings.report_to == "tensorboard":
        import importlib.util

        if importlib.util.find_spec("tensorboard") is None:
            raise OptionError(
                "--report_to tensorboard needs tensorboard: pip install 'strop[train]'; "
                "metrics.jsonl is written without it"
            )


def _tensorboard(settings: Settings, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    folder: Path = settings.output / Path(settings.logging_dir).expanduser()
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)

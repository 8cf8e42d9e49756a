"""Log the steps of a contender as JSON lines, without a stop of the GPU.

The first line says what was run: ``{"kind": "train-log", "version": 1, "row", "contender",
"processes", "batch", ...}``. Each line after it is of one step: ``step`` (from 1 on), ``loss`` (of
rank 0's pictures), ``images_per_s`` (of all ranks together) and ``ms`` a step since the line
before, ``peak_bytes`` (of rank 0's GPU; null on a CPU) and ``rank``, which is 0.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.bench import timer

KIND, VERSION = "train-log", 1


class TrainLog:
    """Writes a line every ``every`` steps. A line is written when the next one is due: by then the
    GPU is done with its step, and the host need not wait for it."""

    def __init__(
        self, path: Path, every: int, images: int, device: torch.device, about: Mapping[str, Any]
    ) -> None:
        self._path, self._every, self._images, self._device = path, every, images, device
        self._since: tuple[int, Any] | None = None
        self._due: tuple[int, Tensor, Any, int, Any] | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {"kind": KIND, "version": VERSION, **about}
        path.write_text(json.dumps(head) + "\n", encoding="utf-8")

    def begin(self, step: int) -> None:
        """Count time from here: ``step`` steps have been made."""
        self.end()
        self._since = (step, self._mark())

    def step(self, step: int, loss: Tensor) -> None:
        """Note a step that has been launched."""
        if step % self._every or self._since is None:
            return
        self.end()
        mark = self._mark()
        self._due = (step, loss.detach().clone(), mark, *self._since)
        self._since = (step, mark)

    def end(self) -> None:
        """Write the line that is due, if any."""
        if self._due is None:
            return
        step, loss, mark, first, before = self._due
        self._due = None
        ms = self._elapsed_ms(before, mark) / (step - first)
        line = {
            "step": step,
            "loss": round(float(loss), 6),
            "images_per_s": round(1e3 * self._images / ms, 3),
            "ms": round(ms, 4),
            "peak_bytes": timer.peak(self._device) if self._device.type == "cuda" else None,
            "rank": 0,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed_ms(self, before: Any, after: Any) -> float:
        if self._device.type != "cuda":
            return 1e3 * float(after - before)
        after.synchronize()
        return float(before.elapsed_time(after))

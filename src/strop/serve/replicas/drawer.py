"""Draw the batches that a front sends: the side of a replica, which owns a model."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from strop.serve.order import ModelCard
from strop.serve.studio import BatchDone, PictureBatch, StepTold, Studio


@dataclass(frozen=True)
class Introduction:
    """Hold what a front must know of the model: its card, and the tokenizer that tells what of a
    prompt it will not read; None where it has none."""

    card: ModelCard
    tokenizer: Any


@dataclass(frozen=True)
class DrawnBy:
    """Tell, before anything is drawn, which replica has a batch, and its process."""

    replica: str
    pid: int


Told = DrawnBy | StepTold | BatchDone


class Drawer:
    """Draw one batch at a time, in a thread that does nothing else."""

    def __init__(self, load: Callable[[], Studio], name: str) -> None:
        self.name = name
        self._studio = load()
        threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(
            1, "strop-replica-draw", initializer=lambda: torch.set_num_threads(threads)
        )

    def introduce(self) -> Introduction:
        """Return what a front must know of the model."""
        return Introduction(self._studio.card, self._studio.tokenizer)

    async def draw(self, batch: PictureBatch) -> AsyncIterator[Told]:
        """Draw a batch: tell who draws, each step, and at last the pictures. Whoever stops to
        listen ends the drawing after its step. Raises what ``Studio.draw`` raises."""
        yield DrawnBy(self.name, os.getpid())
        loop, told = asyncio.get_running_loop(), asyncio.Queue[StepTold | None]()
        is_left = threading.Event()

        def tell(step: StepTold) -> None:  # in the other thread
            loop.call_soon_threadsafe(told.put_nowait, step)

        drawing = loop.run_in_executor(
            self._pool, self._studio.draw, batch, tell, lambda: not is_left.is_set()
        )
        drawing.add_done_callback(lambda _: told.put_nowait(None))
        try:
            while (step := await told.get()) is not None:
                yield step
            yield await drawing
        finally:
            is_left.set()

    async def report(self) -> str:
        """Return what Strop made of the model, when the batch that is being drawn is done."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._studio.report)

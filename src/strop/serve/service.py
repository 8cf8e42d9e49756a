"""Take orders, draw them in batches, and tell whoever asked. It runs on one event loop."""

from __future__ import annotations

import asyncio
import io
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from strop.drawing.draw import NotFiniteError
from strop.drawing.embeddings import NoWeightsError
from strop.drawing.request import PictureSize
from strop.serve.jobs import FinishedPicture, JobState, JobStore, LineTicket, PictureJob
from strop.serve.limits import ServeLimits
from strop.serve.line import WaitingLine
from strop.serve.masks import Overlay
from strop.serve.metrics import ServeMetrics
from strop.serve.order import Order, Wish, order, seeded
from strop.serve.prompts import in_chunks
from strop.serve.refused import Refused
from strop.serve.studio import BatchDone, Painter, PictureBatch, StepTold, Stopped
from strop.wording import counted

log = logging.getLogger("strop.serve")
_FIRST_GUESS_S = 2.0  # of a batch, until one has been timed
_MOST_RETRY_S = 600
_LOOK_S = 0.05


class Service:
    """Hold the line, the jobs and the threads that draw."""

    def __init__(
        self,
        painter: Painter,
        limits: ServeLimits,
        metrics: ServeMetrics | None = None,
        prepare: Callable[[], None] = lambda: None,
        lanes: int = 1,
    ) -> None:
        """``lanes`` batches are drawn at once, each in a thread of its own. ``prepare`` is called
        in each of these threads before anything else."""
        self.painter, self.limits = painter, limits
        self.metrics = metrics or ServeMetrics()
        self.jobs = JobStore(limits.keep_seconds, limits.keep_bytes)
        self.is_draining, self._draining_since = False, 0.0
        self._line = WaitingLine[LineTicket](limits.most_batch)
        self._news = asyncio.Event()
        self.lanes = lanes
        self._pool = ThreadPoolExecutor(lanes, "strop-serve-draw", initializer=prepare)
        self._drawing: set[asyncio.Task[None]] = set()
        self._batch_s = _FIRST_GUESS_S
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to draw. The event loop must run."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Finish what is accepted, then end the threads."""
        await self.drain()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._pool.shutdown)

    def refuse_orders(self) -> None:
        """Accept nothing from now on."""
        if not self.is_draining:
            self.is_draining, self._draining_since = True, time.monotonic()

    async def drain(self) -> None:
        """Refuse new orders from now on, and return when all accepted ones are over."""
        self.refuse_orders()
        await self._idle.wait()

    async def seen(self, seconds: float) -> None:
        """Wait until what was drawn while the server is stopping has been asked for, or so long."""
        end = time.monotonic() + seconds
        while self.jobs.unseen_since(self._draining_since) and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)

    def accept(self, wish: Wish) -> PictureJob:
        """Put an order into the line. Raises Refused: 400 for what is wrong with it, 429 where the
        line is full, 503 while the server is stopping."""
        if self.is_draining:
            raise Refused(
                503, "stopping", "the server is stopping; ask another one", retry_after_s=10
            )
        made = self._told(order(wish, self.painter.card, self.limits))
        if len(self._line) + len(made.requests) > self.limits.most_waiting:
            self.metrics.refused.inc()
            raise Refused(
                429,
                "line_full",
                f"{counted(self.limits.most_waiting, 'picture')} in line, which is full; ask later",
                retry_after_s=self.retry_after_s(),
            )
        job = PictureJob(made)
        self.jobs.tidy()
        self.jobs.add(job)
        self._line.add(job.tickets)
        self.metrics.waiting.set(len(self._line))
        self._idle.clear()
        self._news.set()
        return job

    def _told(self, made: Order) -> Order:
        """Return an order that knows what the model's tokenizer says about its prompts, which are
        those of all of its pictures."""
        first = in_chunks(made.requests[0], self.painter.chunks, self.limits)
        requests = [seeded(first, request.seed) for request in made.requests]
        return replace(made, requests=requests, notes=(*made.notes, *self.painter.notes(first)))

    def retry_after_s(self) -> int:
        """Return the seconds after which there should be room, from what batches have taken."""
        batches = math.ceil(len(self._line) / self.limits.most_batch / 2 / self.lanes)
        return min(_MOST_RETRY_S, max(1, math.ceil(batches * self._batch_s)))

    def cancel(self, job: PictureJob) -> None:
        """End a job that is not over. A batch goes on as long as anybody wants a picture of it."""
        if not job.state.is_over:
            job.change(JobState.cancelled)
            self.metrics.cancelled.inc()
            self.metrics.waiting.set(len(self._line))

    def abandon(self) -> None:
        """Cancel everything, so that the threads that draw end after their step."""
        for job in self.jobs.unfinished():
            self.cancel(job)

    def place_of(self, job: PictureJob) -> int:
        """Return how many pictures wait before those of a job."""
        return self._line.place_of(job.tickets)

    async def report(self) -> str:
        """Return what Strop made of the model, when the batch that is being drawn is done."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.painter.report)

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while len(self._drawing) < self.lanes and (batch := self._line.take()):
                task = asyncio.create_task(self._draw(batch))
                self._drawing.add(task)
                task.add_done_callback(self._note_drawn)
            if not self._drawing:
                self._idle.set()

    def _note_drawn(self, task: asyncio.Task[None]) -> None:
        """Let the next batch have the lane of this one."""
        self._drawing.discard(task)
        self.jobs.tidy()
        self._news.set()

    async def _draw(self, tickets: Sequence[LineTicket]) -> None:
        loop, begun = asyncio.get_running_loop(), time.monotonic()
        for ticket in tickets:
            ticket.job.change(JobState.drawing)
        self.metrics.waiting.set(len(self._line))
        first = tickets[0].job.order
        batch = PictureBatch(
            [ticket.request for ticket in tickets],
            first.adapters,
            [ticket.job.order.preview_every for ticket in tickets],
            first.is_eager,
        )

        def tell(told: StepTold) -> None:  # in the other thread
            loop.call_soon_threadsafe(_note_step, tickets, told)

        def is_wanted() -> bool:
            return any(ticket.is_wanted for ticket in tickets)

        try:
            done = await loop.run_in_executor(self._pool, self.painter.draw, batch, tell, is_wanted)
            await self._finish(tickets, done, begun)
        except Stopped:
            return
        except Exception as error:
            await self._after_failure(tickets, error)
            return
        self._batch_s = 0.7 * self._batch_s + 0.3 * done.seconds
        self.metrics.drawn(len(tickets), done.seconds, first.is_eager)

    async def _finish(self, tickets: Sequence[LineTicket], done: BatchDone, begun: float) -> None:
        """Make files of the pictures, in a thread of their own, and give them to their jobs."""
        for ticket, rgb in zip(tickets, done.pictures, strict=True):
            if not ticket.is_wanted:
                continue
            job, request = ticket.job, ticket.request
            png = await asyncio.to_thread(_as_png, rgb, request.final_size, job.order.overlay)
            waited = begun - job.created
            made = FinishedPicture(png, request, waited, done.seconds, len(tickets))
            if ticket.is_wanted:
                job.finish(ticket.number, made)
                self.metrics.waited.observe(waited)

    async def _after_failure(self, tickets: Sequence[LineTicket], error: Exception) -> None:
        """Draw half as many at once, so that one picture fails no other and memory suffices for
        what it did suffice for before; give up on a picture that is alone."""
        if len(tickets) > 1:
            log.warning("a batch failed; its halves are drawn", exc_info=error)
            half = len(tickets) // 2
            await self._draw(tickets[:half])
            await self._draw(tickets[half:])
            return
        refused = _reason(error)
        log.error("a picture failed", exc_info=error)
        self.metrics.failed.inc(len(tickets))
        for ticket in tickets:
            if ticket.is_wanted:
                ticket.job.fail(refused)


def _reason(error: Exception) -> Refused:
    if isinstance(error, torch.OutOfMemoryError):
        text = "there is too little memory for this size; take a smaller one, or fewer pictures"
        return Refused(503, "out_of_memory", text)
    if isinstance(error, NoWeightsError):
        return Refused(400, "no_weights", str(error))
    if isinstance(error, NotFiniteError):
        return Refused(500, "not_finite", str(error))
    return Refused(500, "failed", f"drawing failed ({type(error).__name__}); the log has more")


def _note_step(tickets: Sequence[LineTicket], told: StepTold) -> None:
    for place, ticket in enumerate(tickets):
        job = ticket.job
        if job.state.is_over:
            continue
        job.step, job.total = told.number, told.total
        if place in told.previews:
            job.previews[ticket.number] = (told.number, told.previews[place])
    for job in {ticket.job for ticket in tickets}:
        if not job.state.is_over:
            job.change()


def _as_png(rgb: bytes, size: PictureSize, overlay: Overlay | None) -> bytes:
    from PIL import Image

    target, drawn = io.BytesIO(), Image.frombytes("RGB", (size.width, size.height), rgb)
    (drawn if overlay is None else overlay.over(drawn)).save(target, format="PNG")
    return target.getvalue()

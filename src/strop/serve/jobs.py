"""Keep what became of each order. Everything here runs on the event loop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum

from strop.drawing.draw import batch_key
from strop.drawing.request import PictureRequest
from strop.serve.order import Order
from strop.serve.refused import Refused

_JOB_BYTES = 4096  # of a job beside its pictures, roughly


class JobState(StrEnum):
    """Say how far an order is."""

    waiting = "waiting"
    drawing = "drawing"
    done = "done"
    cancelled = "cancelled"
    failed = "failed"

    @property
    def is_over(self) -> bool:
        return self in (JobState.done, JobState.cancelled, JobState.failed)


@dataclass(frozen=True)
class FinishedPicture:
    """Hold a picture as a PNG file, the seconds that it waited, the seconds that its batch was
    drawn in, and how many pictures the batch had."""

    png: bytes
    request: PictureRequest
    waited_s: float
    drawn_s: float
    batch: int


class PictureJob:
    """Hold an order and what became of it.

    ``version`` grows with each change; ``after`` waits for one. Only the newest step and preview
    are kept, so a slow listener costs nothing.
    """

    def __init__(self, order: Order) -> None:
        self.id = secrets.token_urlsafe(12)
        self.order = order
        self.created = time.monotonic()
        self.ended = 0.0
        self.is_seen = False
        self.state = JobState.waiting
        self.pictures: list[FinishedPicture | None] = [None] * len(order.requests)
        self.previews: dict[int, tuple[int, bytes]] = {}  # picture -> step, JPEG
        self.step, self.total = 0, order.requests[0].num_steps
        self.refused: Refused | None = None
        self.tickets = [LineTicket(self, number) for number in range(len(order.requests))]
        self.version = 0
        self._changed = asyncio.Event()

    def change(self, state: JobState | None = None) -> None:
        """Note a change of state or of anything else, and wake who waits for it."""
        if state is not None and state is not self.state:
            self.state = state
            self.ended = time.monotonic() if state.is_over else 0.0
        self.version += 1
        woken, self._changed = self._changed, asyncio.Event()
        woken.set()

    def fail(self, refused: Refused) -> None:
        self.refused = refused
        self.change(JobState.failed)

    def finish(self, number: int, picture: FinishedPicture) -> None:
        """Note a picture; the last one ends the job."""
        self.pictures[number] = picture
        self.previews.pop(number, None)
        is_done = all(one is not None for one in self.pictures)
        self.change(JobState.done if is_done else None)

    async def after(self, version: int) -> None:
        """Return when there is a newer version."""
        while self.version == version:
            await self._changed.wait()

    async def over(self) -> None:
        """Return when all pictures are done. Raises Refused if they will not be."""
        while not self.state.is_over:
            await self.after(self.version)
        if self.refused is not None:
            raise self.refused
        if self.state is JobState.cancelled:
            raise Refused(499, "cancelled", "the request was cancelled")

    @property
    def made(self) -> list[FinishedPicture]:
        """Return the pictures that are done."""
        return [picture for picture in self.pictures if picture is not None]

    @property
    def num_bytes(self) -> int:
        held = _JOB_BYTES + sum(len(jpeg) for _, jpeg in self.previews.values())
        held += sum(len(picture.png) for picture in self.made)
        first = self.order.requests[0]  # whose start is that of all
        held += 0 if first.start is None else 3 * first.size.num_pixels
        passes = [first, *([first.second.request] if first.second else [])]
        held += sum(3 * one.size.num_pixels * len(one.controls) for one in passes)
        overlay = self.order.overlay
        return held if overlay is None else held + overlay.num_bytes


class LineTicket:
    """Stand for one picture of a job in the line."""

    def __init__(self, job: PictureJob, number: int) -> None:
        self.job, self.number = job, number
        order = job.order
        apart = (job.id, number) if order.is_alone else None
        shared = (order.adapters, order.is_eager, apart)
        self.key: Hashable = (batch_key(self.request), shared)

    @property
    def request(self) -> PictureRequest:
        return self.job.order.requests[self.number]

    @property
    def is_wanted(self) -> bool:
        return not self.job.state.is_over


class JobStore:
    """Keep jobs for those who come back for their pictures; the oldest go first."""

    def __init__(self, keep_seconds: float, keep_bytes: int) -> None:
        self.keep_seconds, self.keep_bytes = keep_seconds, keep_bytes
        self._jobs: dict[str, PictureJob] = {}

    def add(self, job: PictureJob) -> None:
        self._jobs[job.id] = job

    def find(self, name: str) -> PictureJob:
        """Return a job. Raises Refused with status 404 if there is none of that name any more."""
        if name not in self._jobs:
            raise Refused(404, "no_such_job", "there is no such request, or it is too long ago")
        return self._jobs[name]

    def drop(self, job: PictureJob) -> None:
        self._jobs.pop(job.id, None)

    def unseen_since(self, moment: float) -> list[PictureJob]:
        """Return jobs that are done since a moment, and whose pictures nobody has asked for."""
        done = [job for job in self._jobs.values() if job.state is JobState.done]
        return [job for job in done if job.ended >= moment and not job.is_seen]

    def unfinished(self) -> list[PictureJob]:
        return [job for job in self._jobs.values() if not job.state.is_over]

    def oldest_drawn(self) -> PictureJob | None:
        """Return the oldest job that is being drawn, or None."""
        return next((job for job in self._jobs.values() if job.state is JobState.drawing), None)

    def tidy(self) -> None:
        """Forget jobs that are over, as far as they are too old or take too much memory."""
        over = [job for job in self._jobs.values() if job.state.is_over]
        held, now = sum(job.num_bytes for job in over), time.monotonic()
        for job in over:
            if held <= self.keep_bytes and now - job.ended <= self.keep_seconds:
                break
            held -= job.num_bytes
            del self._jobs[job.id]

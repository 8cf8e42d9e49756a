"""Have batches drawn by replicas; a batch whose replica dies is drawn by another one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

from strop.drawing.request import PictureRequest
from strop.serve.metrics import ServeMetrics
from strop.serve.order import ModelCard
from strop.serve.refused import Refused
from strop.serve.replicas.drawer import DrawnBy, Introduction, Told
from strop.serve.studio import BatchDone, PictureBatch, StepTold, Stopped, chunks_of, notes_of

log = logging.getLogger("strop.serve")
MOST_REPLICAS = 3  # that may die of one batch, which perhaps kills them
_LOOK_S = 0.05
_PAUSE_S = 0.5  # until Ray has noticed a death
T = TypeVar("T")


class Stream(Protocol):
    """Name what is asked of an answer that comes in parts."""

    def __aiter__(self) -> AsyncIterator[Told]:
        """Return the parts."""

    def cancel(self) -> None:
        """Tell the replica that nobody listens any more."""


class Replicas(Protocol):
    """Name what the painter asks of whoever reaches the replicas."""

    losses: tuple[type[Exception], ...]

    def draw(self, batch: PictureBatch) -> Stream:
        """Send a batch to a replica; wait in the stream until one is free."""

    def report(self) -> str:
        """Return the report of one replica; blocks."""

    def cause_of(self, error: Exception) -> Exception:
        """Return what a replica raised, out of what carries it here."""


class ReplicaPainter:
    """Draw by replicas. As many threads of the service may call ``draw`` at once as replicas may
    be there."""

    def __init__(
        self, introduction: Introduction, replicas: Replicas, metrics: ServeMetrics
    ) -> None:
        self.card: ModelCard = introduction.card
        self._replicas, self._metrics = replicas, metrics
        self._reader = SimpleNamespace(tokenizer=introduction.tokenizer)

    def draw(
        self, batch: PictureBatch, tell: Callable[[StepTold], None], is_wanted: Callable[[], bool]
    ) -> BatchDone:
        """Draw a batch; blocks. A seed draws the same picture wherever, so a batch whose replica
        dies is drawn again from the beginning. Raises Stopped soon after ``is_wanted`` has turned
        False, Refused where replica after replica dies, and what a replica raises."""
        return asyncio.run(self._draw(batch, tell, is_wanted))

    def report(self) -> str:
        """Return the text of ``strop.explain`` of one replica."""
        try:
            return self._replicas.report()
        except Exception as error:
            raise self._replicas.cause_of(error) from error

    def notes(self, request: PictureRequest) -> Sequence[str]:
        """Return what the model will not read of a request."""
        return notes_of(self._reader, request)

    def chunks(self, request: PictureRequest) -> int:
        """Return how many chunks of tokens a weighted request has."""
        return chunks_of(self._reader, request)

    async def _draw(
        self, batch: PictureBatch, tell: Callable[[StepTold], None], is_wanted: Callable[[], bool]
    ) -> BatchDone:
        for count in range(1, MOST_REPLICAS + 1):
            try:
                return await self._draw_once(batch, tell, is_wanted)
            except self._replicas.losses as error:
                self._metrics.replicas_lost.inc()
                why = type(error).__name__
                log.warning("a replica was lost", extra={"why": why, "count": count})
            await _unless_left(asyncio.sleep(_PAUSE_S * count), is_wanted)
        raise Refused(
            503,
            "replicas_lost",
            f"{MOST_REPLICAS} replicas ended while they drew this; take a smaller size, or ask the"
            " owner of the server to look at the logs of Ray",
            retry_after_s=30,
        )

    async def _draw_once(
        self, batch: PictureBatch, tell: Callable[[StepTold], None], is_wanted: Callable[[], bool]
    ) -> BatchDone:
        stream, name = self._replicas.draw(batch), ""
        parts, is_over = stream.__aiter__(), False
        try:
            while True:
                told = await _unless_left(_next(parts), is_wanted)
                if isinstance(told, BatchDone):
                    is_over = True
                    count, seconds = len(batch.requests), round(told.seconds, 4)
                    facts = {"replica": name, "pictures": count, "seconds": seconds}
                    log.info("drawn", extra=facts)
                    return told
                if isinstance(told, DrawnBy):
                    name = told.replica
                    log.info("sent", extra={"replica": name, "pid": told.pid})
                else:
                    tell(told)
        except Stopped:
            raise
        except Exception as error:
            is_over = True
            if isinstance(error, self._replicas.losses):
                raise
            raise self._replicas.cause_of(error) from error
        finally:
            if not is_over:
                stream.cancel()


async def _next(parts: AsyncIterator[Told]) -> Told:
    return await anext(parts)


async def _unless_left(work: Coroutine[Any, Any, T], is_wanted: Callable[[], bool]) -> T:
    """Return the result of some work. Raises Stopped as soon as nobody wants it."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=_LOOK_S))[0]:
            if not is_wanted():
                raise Stopped
        if not is_wanted():
            raise Stopped
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

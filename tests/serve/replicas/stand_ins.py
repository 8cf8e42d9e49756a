"""Stand in for replicas in this process: real drawers that die when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

from strop.serve.replicas.drawer import Drawer, Told
from strop.serve.replicas.painter import Stream
from strop.serve.studio import PictureBatch, Studio
from tests.serve.painters import FakePainter


class FakeStudio(FakePainter):
    """A painter with what a replica asks for besides."""

    tokenizer = None


class Died(Exception):
    """A replica has died."""


class Carried(Exception):
    """What a replica raised, as it arrives."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class FakeReplicas:
    """Send each batch to the next of some drawers. ``dies`` says after how many parts the answer
    to a batch breaks off, in turn; None: it does not."""

    losses = (Died,)

    def __init__(self, *studios: FakeStudio, dies: Iterator[int | None]) -> None:
        self.drawers = [
            Drawer(lambda one=studio: cast(Studio, one), str(n)) for n, studio in enumerate(studios)
        ]
        self.dies, self.num_sent, self.num_cancelled = dies, 0, 0

    def draw(self, batch: PictureBatch) -> Stream:
        drawer = self.drawers[self.num_sent % len(self.drawers)]
        self.num_sent += 1
        return FakeStream(drawer.draw(batch), next(self.dies), self._note_cancelled)

    def report(self) -> str:
        return asyncio.run(self.drawers[0].report())

    def cause_of(self, error: Exception) -> Exception:
        return error.cause if isinstance(error, Carried) else error

    def _note_cancelled(self) -> None:
        self.num_cancelled += 1


class FakeStream:
    """Pass on what a drawer tells, until it dies."""

    def __init__(
        self, parts: AsyncIterator[Told], left: int | None, cancelled: Callable[[], None]
    ) -> None:
        self._parts, self._left, self._cancelled = parts, left, cancelled

    async def __aiter__(self) -> AsyncIterator[Told]:
        try:
            async for part in self._parts:
                if self._left == 0:
                    raise Died
                self._left = None if self._left is None else self._left - 1
                yield part
        except Died:
            raise
        except Exception as error:
            raise Carried(error) from error
        finally:
            await cast(Any, self._parts).aclose()

    def cancel(self) -> None:
        self._cancelled()

"""Share among the interfaces how a request is awaited, and what its pictures are called."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from fastapi import Depends, Request

from strop.serve.jobs import FinishedPicture, PictureJob
from strop.serve.masks import MaskWish, canvas
from strop.serve.order import Wish, size_of
from strop.serve.refused import Refused
from strop.serve.service import Service


def service_of(request: Request) -> Service:
    """Return the service that an app was made for."""
    service: Service = request.app.state.service
    return service


GivenService = Annotated[Service, Depends(service_of)]


async def drawn(
    request: Request, service: Service, wish: Wish, names: Mapping[str, str]
) -> PictureJob:
    """Return the job of a wish when its pictures are done. A client that hangs up meanwhile has its
    order cancelled. Raises Refused where there will be none, in the words of the interface:
    ``names`` has its arguments by the fields of a wish."""
    try:
        job = service.accept(wish)
    except Refused as refused:
        raise refused.in_words_of(names) from refused
    waiting = asyncio.ensure_future(job.over())
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise Refused(499, "hung_up", "the client has gone")
        waiting.result()
        return job
    finally:
        service.cancel(job)  # nothing happens to one that is over
        service.jobs.drop(job)  # nobody else knows its name
        for task in (waiting, gone):
            task.cancel()
        await asyncio.gather(waiting, gone, return_exceptions=True)


async def masked(
    wish: Wish, how: MaskWish, service: Service, names: Mapping[str, str] | None = None
) -> Wish:
    """Return a wish whose start is drawn anew where a mask is white. Raises Refused for a size that
    is too large, in the words of the interface."""
    assert wish.start is not None
    try:
        size = size_of(wish, service.painter.card, service.limits)
        if how.is_close and wish.start.width * wish.start.height > service.limits.most_pixels:
            raise Refused(
                400,
                "picture_too_large",
                f"start: a part of it is put back into {wish.start.width}x{wish.start.height}, more"
                f" than the {service.limits.most_pixels} pixels of a picture here; send a smaller"
                " one, or start the server with a larger --max-pixels",
                field="start",
            )
        made = await asyncio.to_thread(canvas, wish.start, how, size, wish.resize)
    except Refused as refused:
        raise refused.in_words_of(names or {}) from refused
    if made is None:
        text = "mask: nothing of it is white, so there is nothing to draw"
        raise Refused(400, "empty_mask", text, field="mask")
    return replace(wish, canvas=made)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def in_base64(picture: FinishedPicture) -> str:
    return base64.b64encode(picture.png).decode()

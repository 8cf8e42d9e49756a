"""Answer in Strop's own interface, ``/api``: orders with progress, previews and cancelling."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from strop.errors import OptionError
from strop.serve.asking import GivenService, masked
from strop.serve.jobs import JobState, PictureJob
from strop.serve.masks import MaskWish
from strop.serve.order import Wish
from strop.serve.refused import Refused
from strop.serve.service import Service
from strop.serve.starts import from_text

router = APIRouter(prefix="/api", tags=["Strop"])
_ALIVE_S = 15.0  # proxies close streams in which nothing happens
JobId = Annotated[str, Path(max_length=40)]


class OrderBody(BaseModel):
    """Say what to draw. What is left out is the model's own."""

    model_config = ConfigDict(extra="forbid")

    prompt: str
    negative: str = ""
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None
    seed: int | None = Field(None, description="of the first picture; the next ones count on")
    count: int = 1
    loras: dict[str, float] = Field({}, description="scales by name, in the order they are added")
    start: str | None = Field(None, description="a PNG or JPEG picture in base64")
    strength: float = 0.75
    mask: str | None = Field(None, description="white where the start is drawn anew; else all is")
    sampler: str = Field("", description="of those that /api/model names; else the model's own")
    schedule: str = Field("", description="of the sampler; else its automatic one")
    prompt_weights: bool = Field(
        False, description="read (words:1.3), (words) and [words] as A1111 does, at any length"
    )
    preview_every: int = Field(0, description="show the picture after so many steps; 0: never")
    eager: bool = Field(False, description="draw without Strop, to compare")
    alone: bool = Field(False, description="draw in a batch of its own: the bits of generate")


@router.post("/pictures", status_code=202)
async def order_pictures(body: OrderBody, service: GivenService) -> Any:
    """Put pictures into the line, and return at once."""
    start = None
    if body.start is not None:
        most = service.limits.most_start_pixels
        start = await asyncio.to_thread(from_text, body.start, most, "start")
    wish = Wish(
        body.prompt,
        body.negative,
        body.width,
        body.height,
        body.steps,
        body.guidance,
        body.seed,
        body.count,
        body.loras,
        start,
        body.strength,
        body.preview_every,
        body.eager,
        body.alone,
        body.sampler,
        body.schedule,
        is_weighted=body.prompt_weights,
    )
    if body.mask is not None:
        if start is None:
            raise Refused(400, "invalid_value", "mask: it belongs to a start", field="mask")
        most = service.limits.most_start_pixels
        mask = await asyncio.to_thread(from_text, body.mask, most, "mask", is_mask=True)
        wish = await masked(wish, MaskWish(mask), service)
    return state_of(service.accept(wish), service)


@router.get("/pictures/{job_id}")
async def look(job_id: JobId, service: GivenService) -> Any:
    """Tell how far an order is."""
    return state_of(service.jobs.find(job_id), service)


@router.delete("/pictures/{job_id}")
async def cancel(job_id: JobId, service: GivenService) -> Any:
    """Cancel an order. Its pictures that are done stay."""
    job = service.jobs.find(job_id)
    service.cancel(job)
    return state_of(job, service)


@router.get("/pictures/{job_id}/events")
async def events(job_id: JobId, service: GivenService) -> StreamingResponse:
    """Tell what happens to an order, as server-sent events: "state" at each change, "preview",
    "picture", and "end", after which the stream ends. Hanging up cancels nothing."""
    job = service.jobs.find(job_id)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_events(job, service), media_type="text/event-stream", headers=headers)


@router.get("/pictures/{job_id}/{number}.png", response_class=Response)
async def picture(job_id: JobId, number: int, service: GivenService) -> Response:
    """Return a picture that is done."""
    job = service.jobs.find(job_id)
    found = job.pictures[number] if 0 <= number < len(job.pictures) else None
    if found is None:
        raise Refused(404, "no_such_picture", "this picture is not there, or not yet")
    job.is_seen = job.state.is_over
    return Response(found.png, media_type="image/png", headers={"cache-control": "private"})


def state_of(job: PictureJob, service: Service) -> dict[str, Any]:
    """Return what is known of an order, for JSON."""
    error = None if job.refused is None else job.refused.body["error"]
    return {
        "id": job.id,
        "state": job.state.value,
        "before": service.place_of(job) if job.state is JobState.waiting else 0,
        "step": job.step,
        "steps": job.total,
        "notes": [*job.order.notes],
        "error": error,
        "pictures": [_picture_of(job, number) for number in range(len(job.pictures))],
    }


def _picture_of(job: PictureJob, number: int) -> dict[str, Any]:
    """Return the parameters of a picture, which draw it again, and where it is if it is done."""
    request, made = job.order.requests[number], job.pictures[number]
    found: dict[str, Any] = {
        "prompt": request.prompt,
        "negative": request.negative,
        "width": request.size.width,
        "height": request.size.height,
        "steps": request.steps,
        "guidance": request.guidance,
        "seed": request.seed,
        "loras": dict(job.order.adapters),
        "strength": None if request.start is None else request.strength,
        "sampler": request.sampler,
        "schedule": request.schedule if request.sampler else "",
        "prompt_weights": request.is_weighted,
        "eager": job.order.is_eager,
        "url": None,
    }
    if made is not None:
        found |= {
            "url": f"/api/pictures/{job.id}/{number}.png",
            "waited_s": round(made.waited_s, 3),
            "drawn_s": round(made.drawn_s, 3),
            "batch": made.batch,
        }
    return found


async def _events(job: PictureJob, service: Service) -> AsyncIterator[str]:
    shown: dict[int, int] = {}
    sent = [False] * len(job.pictures)
    while True:
        version = job.version
        yield _event("state", state_of(job, service))
        for number, (step, jpeg) in sorted(job.previews.items()):
            if shown.get(number) != step:
                shown[number] = step
                told = {"number": number, "step": step, "jpeg": base64.b64encode(jpeg).decode()}
                yield _event("preview", told)
        for number, made in enumerate(job.pictures):
            if made is not None and not sent[number]:
                sent[number] = True
                told = {"number": number, "png": base64.b64encode(made.png).decode()}
                yield _event("picture", told | _picture_of(job, number))
        if job.state.is_over and job.version == version:
            yield _event("end", state_of(job, service))
            job.is_seen = True
            return
        try:
            await asyncio.wait_for(job.after(version), _ALIVE_S)
        except TimeoutError:
            yield ": still here\n\n"


def _event(name: str, content: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(content)}\n\n"


@router.get("/model")
async def model(service: GivenService) -> Any:
    """Tell what the model takes, and the limits of the server."""
    card, limits = service.painter.card, service.limits
    return {
        "name": card.name,
        "width": card.size.width,
        "height": card.size.height,
        "multiple_of": card.factor,
        "most_pixels": limits.most_pixels,
        "steps": card.steps,
        "most_steps": limits.most_steps,
        "guidance": card.guidance,
        "most_count": limits.most_count,
        "most_batch": limits.most_batch,
        "samplers": {name: [*schedules] for name, schedules in card.samplers.items()},
        "prompt_weights": card.reads_weights,
        "loras": [*card.loras],
        "most_scale": limits.most_scale,
        "eager": card.has_eager,
    }


@router.get("/report", response_class=PlainTextResponse)
async def report(service: GivenService) -> PlainTextResponse:
    """Return the text of ``strop.explain``: graphs, kernels, launches and fallbacks."""
    try:
        return PlainTextResponse(await service.report())
    except OptionError as error:
        raise Refused(503, "nothing_ran", str(error), retry_after_s=5) from error

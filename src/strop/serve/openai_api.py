"""Answer as OpenAI's interface for images does: ``/v1/images/generations`` and ``/edits``.

What an argument asks for and this server does not do is refused, never ignored.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from strop.serve.asking import GivenService, drawn, in_base64, masked
from strop.serve.masks import MaskWish
from strop.serve.order import Wish
from strop.serve.refused import Refused
from strop.serve.service import Service
from strop.serve.starts import erased, from_bytes
from strop.serve.wrong_fields import refused_for

router = APIRouter(prefix="/v1", tags=["OpenAI"])
_NAMES = {
    "count": "n",
    "width": "size",
    "height": "size",
    "negative": "negative_prompt",
    "start": "image",
}
_MOST_FIELDS = 40
_MOST_FIELD_BYTES = 1 << 16


class GenerationBody(BaseModel):
    """Hold OpenAI's arguments, and below them Strop's own."""

    model_config = ConfigDict(extra="forbid")

    prompt: str
    model: str | None = None
    n: int = 1
    size: str | None = Field(None, description="WIDTHxHEIGHT, any that the model draws, or auto")
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png"] | None = None
    quality: Literal["auto", "standard"] | None = None
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None
    output_compression: Literal[100] | None = None
    partial_images: Literal[0] | None = None
    stream: Literal[False] | None = None
    user: str | None = None

    negative_prompt: str = ""
    steps: int | None = None
    guidance: float | None = None
    seed: int | None = None
    loras: dict[str, float] = {}
    prompt_weights: bool = Field(
        False, description="read (words:1.3), (words) and [words] as A1111 does, at any length"
    )

    def wish(self) -> Wish:
        """Return it in Strop's words. Raises Refused for a size that is none."""
        width, height = _size(self.size)
        return Wish(
            self.prompt,
            self.negative_prompt,
            width,
            height,
            self.steps,
            self.guidance,
            self.seed,
            self.n,
            self.loras,
            is_weighted=self.prompt_weights,
        )


def _size(text: str | None) -> tuple[int | None, int | None]:
    if text is None or text == "auto":
        return None, None
    found = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text)
    if found is None:
        raise Refused(400, "invalid_value", "size: write WIDTHxHEIGHT, or auto", field="size")
    return int(found[1]), int(found[2])


@router.post("/images/generations")
async def generations(body: GenerationBody, request: Request, service: GivenService) -> Any:
    """Draw pictures from a text."""
    _check_model(body.model, service)
    return await _answer(request, service, body.wish())


@router.post(
    "/images/edits",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": ["image", "prompt"],
                        "properties": {
                            "image": {"type": "string", "format": "binary"},
                            "mask": {"type": "string", "format": "binary"},
                            "prompt": {"type": "string"},
                            "strength": {"type": "number"},
                        },
                    }
                }
            },
        }
    },
)
async def edits(request: Request, service: GivenService) -> Any:
    """Draw pictures that begin with the client's picture. Besides the arguments of generations
    there are ``image``, a file, ``strength``, above 0 and at most 1, and perhaps ``mask``, a file:
    what is transparent in it is drawn anew, and the rest keeps its bytes."""
    fields, files = await _form(request)
    mask = files.pop("mask", None)
    images = [files[name] for name in ("image", "image[]") if name in files]
    if len(images) != 1 or len(files) != 1:
        raise Refused(400, "invalid_value", "image: send exactly one picture", field="image")
    strength = fields.pop("strength", "0.75")
    try:
        body = GenerationBody.model_validate(_read(fields))
        share = float(strength)
    except ValidationError as error:
        raise refused_for(error.errors()) from error
    except ValueError as error:
        raise Refused(
            400, "invalid_value", "strength: it is no number", field="strength"
        ) from error
    _check_model(body.model, service)
    most = service.limits.most_start_pixels
    start = await asyncio.to_thread(from_bytes, images[0], most)
    wish = replace(body.wish(), start=start, strength=share)
    if mask is not None:
        hidden = await asyncio.to_thread(from_bytes, mask, most, "mask", erased)
        wish = await masked(wish, MaskWish(hidden), service, _NAMES)
    return await _answer(request, service, wish)


def _read(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a form, which are texts, as the types that a body in JSON has."""
    found = dict(fields)
    for name in ("stream", "loras", "output_compression", "partial_images"):
        if name in found:
            try:
                found[name] = json.loads(found[name])
            except (ValueError, RecursionError) as error:
                text = f"{name}: write it as in JSON"
                raise Refused(422, "invalid_value", text, field=name) from error
    return found


class _InMemory(MultiPartParser):
    """Read a form without files on disk, whatever its size: the guard has limited that."""

    spool_max_size = 1 << 40


async def _form(request: Request) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the texts and the files of a form. Raises Refused for what is none."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise Refused(415, "no_form", "send the picture as multipart/form-data")
    parser = _InMemory(
        request.headers,
        request.stream(),
        max_files=4,
        max_fields=_MOST_FIELDS,
        max_part_size=_MOST_FIELD_BYTES,
    )
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError, LookupError) as error:
        raise Refused(400, "damaged_form", "the form is damaged or too large") from error
    items = form.multi_items()
    try:
        files = {n: await value.read() for n, value in items if isinstance(value, UploadFile)}
    finally:
        await form.close()
    fields = {name: value for name, value in items if not isinstance(value, UploadFile)}
    if len(fields) + len(files) < len(items):
        raise Refused(400, "invalid_value", "a field of the form is there twice")
    return fields, files


def _check_model(name: str | None, service: Service) -> None:
    if name not in (None, "", service.painter.card.name):
        raise Refused(
            404,
            "model_not_found",
            f"model: this server has {service.painter.card.name}",
            field="model",
        )


async def _answer(request: Request, service: Service, wish: Wish) -> dict[str, Any]:
    job = await drawn(request, service, wish, _NAMES)
    data = [{"b64_json": in_base64(one), "seed": one.request.seed} for one in job.made]
    found = {"created": int(time.time()), "output_format": "png", "data": data}
    return found | ({"notes": [*job.order.notes]} if job.order.notes else {})


@router.get("/models")
async def models(service: GivenService) -> Any:
    """List the model that is served."""
    model = {"id": service.painter.card.name, "object": "model", "owned_by": "strop"}
    return {"object": "list", "data": [model]}

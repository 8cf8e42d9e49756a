"""Answer as the web UI of A1111 does: ``/sdapi/v1/txt2img`` and ``/img2img``.

Clients of it send dozens of arguments. Those that this server does not know must have a value that
asks for nothing; anything else is refused, never ignored.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from strop.serve.asking import GivenService, drawn, in_base64
from strop.serve.jobs import PictureJob
from strop.serve.order import Wish
from strop.serve.refused import Refused
from strop.serve.service import Service
from strop.serve.starts import from_text
from strop.serve.wrong_fields import in_ascii
from strop.wording import counted

router = APIRouter(prefix="/sdapi/v1", tags=["A1111"])
_LORA = re.compile(r"<lora:([^:<>]{1,200})(?::([^:<>]{1,30}))?>")
_STRENGTH = 0.75
# Arguments that have no effect unless another one is given, which is refused.
_DEPENDENT = ("hr_", "mask_", "inpaint", "refiner_switch", "firstphase_")
_NAMES = {
    "guidance": "cfg_scale",
    "strength": "denoising_strength",
    "negative": "negative_prompt",
    "loras": "prompt",
    "count": "batch_size",
}
# Arguments whose false or 0 asks for something as well.
_NEVER_EMPTY = ("send_images", "s_noise", "initial_noise_multiplier")
_MODEL = "sd_model_checkpoint"
# What clients send by default, besides null, false, 0, -1 and what is empty.
_USUAL: Mapping[str, Sequence[Any]] = {
    "s_noise": (1,),
    "s_tmax": (1e999,),
    "override_settings_restore_afterwards": (True,),
    "do_not_save_samples": (True,),
    "do_not_save_grid": (True,),
    "send_images": (True,),
    "sampler_name": ("automatic", "Automatic"),
    "sampler_index": ("automatic", "Automatic"),
    "scheduler": ("automatic", "Automatic"),
    "initial_noise_multiplier": (1,),
}


class TextBody(BaseModel):
    """Hold A1111's arguments of txt2img that have an effect."""

    model_config = ConfigDict(extra="allow")

    prompt: str = ""
    negative_prompt: str = ""
    seed: int = -1
    steps: int | None = None
    width: int | None = None
    height: int | None = None
    cfg_scale: float | None = None
    batch_size: int = 1
    n_iter: int = 1
    denoising_strength: float | None = None  # it is of img2img, and of enable_hr, which is refused

    def wish(self, service: Service) -> Wish:
        """Return it in Strop's words. Raises Refused for what asks for anything else."""
        self._check_rest(service.painter.card.name)
        most = service.limits.most_count
        if not (0 < self.batch_size <= most and 0 < self.n_iter <= most):
            raise _wrong(
                "batch_size", f"a request has at most {counted(most, 'picture')}, and 1 at least"
            )
        prompt, loras = _loras(self.prompt)
        return Wish(
            prompt,
            self.negative_prompt,
            self.width,
            self.height,
            self.steps,
            self.cfg_scale,
            None if self.seed == -1 else self.seed,
            self.batch_size * self.n_iter,
            loras,
        )

    def _check_rest(self, model: str) -> None:
        for name, value in (self.model_extra or {}).items():
            empty: tuple[Any, ...] = (
                (None,) if name in _NEVER_EMPTY else (None, False, 0, -1, "", [], {})
            )
            if value in empty or value in _USUAL.get(name, ()):
                continue
            if name == "override_settings" and value == {_MODEL: model}:
                continue
            if not name.startswith(_DEPENDENT):
                raise _wrong(in_ascii(name, 60), "this server does not do that; leave it out")


class PictureBody(TextBody):
    """Hold A1111's arguments of img2img."""

    init_images: list[str] = []


def _wrong(name: str, message: str) -> Refused:
    return Refused(422, "unsupported", f"{name}: {message}", field=name)


def _loras(prompt: str) -> tuple[str, dict[str, float]]:
    """Take "<lora:NAME:SCALE>" out of a prompt. The names are looked up among those of the
    server."""
    found: dict[str, float] = {}
    for name, scale in _LORA.findall(prompt):
        try:
            found[name] = float(scale or 1)
        except ValueError as error:
            raise _wrong("prompt", "the scale of a LoRA is no number") from error
    return _LORA.sub("", prompt).strip() if found else prompt, found


@router.post("/txt2img")
async def txt2img(body: TextBody, request: Request, service: GivenService) -> Any:
    """Draw pictures from a text."""
    return _answer(body, await drawn(request, service, body.wish(service), _NAMES))


@router.post("/img2img")
async def img2img(body: PictureBody, request: Request, service: GivenService) -> Any:
    """Draw pictures that begin with the client's picture, which is stretched to their size."""
    if len(body.init_images) != 1:
        raise _wrong("init_images", "send exactly one picture, in base64")
    most = service.limits.most_start_pixels
    start = await asyncio.to_thread(from_text, body.init_images[0], most, "init_images")
    strength = _STRENGTH if body.denoising_strength is None else body.denoising_strength
    wish = replace(body.wish(service), start=start, strength=strength)
    return _answer(body, await drawn(request, service, wish, _NAMES))


def _answer(body: TextBody, job: PictureJob) -> dict[str, Any]:
    requests = job.order.requests
    first = requests[0]
    info = {
        "prompt": first.prompt,
        "negative_prompt": first.negative,
        "seed": first.seed,
        "all_seeds": [request.seed for request in requests],
        "width": first.size.width,
        "height": first.size.height,
        "steps": first.steps,
        "cfg_scale": first.guidance,
        "batch_size": len(requests),
        "notes": [*job.order.notes],
    }
    known = body.model_dump(include=set(type(body).model_fields) - {"init_images"})
    images = [in_base64(picture) for picture in job.made]
    return {"images": images, "parameters": known, "info": json.dumps(info)}


@router.get("/sd-models")
async def sd_models(service: GivenService) -> Any:
    """List the model that is served."""
    name = service.painter.card.name
    return [{"title": name, "model_name": name, "hash": None, "filename": name}]


@router.get("/loras")
async def loras(service: GivenService) -> Any:
    """List the LoRAs of the server."""
    return [{"name": name, "alias": name, "path": name} for name in service.painter.card.loras]


@router.get("/options")
async def options(service: GivenService) -> Any:
    """Name the model that is served, the one setting that there is."""
    return {_MODEL: service.painter.card.name}


@router.post("/options")
async def set_options(wanted: dict[str, Any], service: GivenService) -> Any:
    """Choose the model that is served. Anything else is refused."""
    name = service.painter.card.name
    other = next((key for key, value in wanted.items() if (key, value) != (_MODEL, name)), None)
    if other is not None:
        raise _wrong(in_ascii(other, 60), f"this server draws with {name}, and has no settings")


@router.get("/progress")
async def progress(service: GivenService) -> Any:
    """Say how far the oldest order is that is being drawn."""
    job = service.jobs.oldest_drawn()
    step, total = (0, 0) if job is None else (job.step, job.total)
    state = {"sampling_step": step, "sampling_steps": total, "job_count": int(job is not None)}
    return {"progress": step / total if total else 0.0, "state": state, "current_image": None}


@router.get("/schedulers")
async def schedulers() -> Any:
    """List the one schedule: the model's own."""
    return [{"name": "automatic", "label": "Automatic", "aliases": None}]


@router.get("/samplers")
async def samplers() -> Any:
    """List the one sampler: the model's own."""
    return [{"name": "Automatic", "aliases": ["automatic"], "options": {}}]

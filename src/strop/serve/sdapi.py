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
from PIL import ImageOps
from PIL.Image import Image
from pydantic import BaseModel, ConfigDict, Field, model_validator

from strop.drawing.request import PictureRequest
from strop.serve.asking import GivenService, drawn, in_base64, masked
from strop.serve.jobs import PictureJob
from strop.serve.masks import RESIZES, MaskWish
from strop.serve.order import Wish
from strop.serve.refused import Refused
from strop.serve.sdapi_controls import WHERE, ScriptsBody, controls_of, infotext_of
from strop.serve.sdapi_state import MODEL, label_of
from strop.serve.second_pass import SecondWish
from strop.serve.service import Service
from strop.serve.starts import from_text
from strop.serve.wrong_fields import in_ascii
from strop.wording import counted

router = APIRouter(prefix="/sdapi/v1", tags=["A1111"])
_LORA = re.compile(r"<lora:([^:<>]{1,200})(?::([^:<>]{1,30}))?>")
_STRENGTH = 0.75
_MOST_BLUR, _MOST_PADDING = 64, 1024  # as far as A1111's sliders go, and farther
# Arguments that have no effect unless another one is given, which is refused.
_OF_SECOND = ("hr_", "firstphase_")
_DEPENDENT = ("mask_", "inpaint", "refiner_switch")
_SAME = ("use same sampler", "use same scheduler")
_NAMES = {
    "sampler": "sampler_name",
    "schedule": "scheduler",
    "start": "init_images",
    "guidance": "cfg_scale",
    "strength": "denoising_strength",
    "negative": "negative_prompt",
    "loras": "prompt",
    "count": "batch_size",
    "second": "enable_hr",
    "second_scale": "hr_scale",
    "second_width": "hr_resize_x",
    "second_height": "hr_resize_y",
    "second_upscaler": "hr_upscaler",
    "second_steps": "hr_second_pass_steps",
    "second_sampler": "hr_sampler_name",
    "second_schedule": "hr_scheduler",
    "second_prompt": "hr_prompt",
    "second_negative": "hr_negative_prompt",
    "controls": WHERE,
}
# Arguments whose false or 0 asks for something as well.
_NEVER_EMPTY = ("send_images", "s_noise", "initial_noise_multiplier")
_WITH_PICTURES = {"init_images", "mask", "alwayson_scripts"}
# What clients send by default, besides null, false, 0, -1 and what is empty.
_USUAL: Mapping[str, Sequence[Any]] = {
    "s_noise": (1,),
    "s_tmax": (1e999,),
    "override_settings_restore_afterwards": (True,),
    "do_not_save_samples": (True,),
    "do_not_save_grid": (True,),
    "send_images": (True,),
    "initial_noise_multiplier": (1,),
    "hr_checkpoint_name": ("Use same checkpoint",),
    "hr_additional_modules": (["Use same choices"],),
}


class TextBody(BaseModel):
    """Hold the arguments of A1111 that have an effect on every picture."""

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
    denoising_strength: float | None = None  # it is of img2img, and of enable_hr
    sampler_name: str = ""
    sampler_index: str = ""  # its older name
    scheduler: str = ""
    alwayson_scripts: ScriptsBody = ScriptsBody()

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        """Leave out what is null, which asks for A1111's own choice."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}

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
            sampler=self.sampler_name or self.sampler_index,
            schedule=self.scheduler,
            is_weighted=True,
        )

    def _check_rest(self, model: str) -> None:
        for name, value in (self.model_extra or {}).items():
            empty: tuple[Any, ...] = (
                (None,) if name in _NEVER_EMPTY else (None, False, 0, -1, "", [], {})
            )
            if value in empty or value in _USUAL.get(name, ()):
                continue
            if name == "override_settings" and value == {MODEL: model}:
                continue
            if not name.startswith(self._dependent):
                raise _wrong(in_ascii(name, 60), "this server does not do that; leave it out")

    @property
    def _dependent(self) -> tuple[str, ...]:
        return (*_DEPENDENT, *_OF_SECOND)


class LargerBody(TextBody):
    """Hold A1111's arguments of txt2img: those of hires fix, which draws once more, larger."""

    enable_hr: bool = False
    hr_scale: float = 2.0
    hr_resize_x: int = Field(0, description="in place of hr_scale; one alone keeps the shape")
    hr_resize_y: int = 0
    hr_upscaler: str = Field("Latent", description="of latent-upscale-modes or upscalers")
    hr_second_pass_steps: int = Field(0, description="0 takes as many as the first pass")
    hr_sampler_name: str = ""
    hr_scheduler: str = ""
    hr_prompt: str = ""
    hr_negative_prompt: str = ""

    @property
    def _dependent(self) -> tuple[str, ...]:
        return _DEPENDENT if self.enable_hr else super()._dependent

    def wish(self, service: Service) -> Wish:
        """Return it in Strop's words. Raises Refused for what asks for anything else."""
        made = super().wish(service)
        if not self.enable_hr:
            return made
        prompt, loras = _loras(self.hr_prompt)
        sampler, schedule = (
            "" if text.strip().lower() in _SAME else text
            for text in (self.hr_sampler_name, self.hr_scheduler)
        )
        second = SecondWish(
            self.hr_scale,
            self.hr_resize_x,
            self.hr_resize_y,
            self.hr_upscaler,
            self.hr_second_pass_steps,
            _STRENGTH if self.denoising_strength is None else self.denoising_strength,
            prompt,
            self.hr_negative_prompt,
            sampler,
            schedule,
            loras,
        )
        return replace(made, second=second)


class PictureBody(TextBody):
    """Hold A1111's arguments of img2img. Those of a mask have A1111's own values by default."""

    init_images: list[str] = []
    resize_mode: int = Field(0, description="0 stretches, 1 cuts, 2 makes edges longer")
    mask: str | None = Field(None, description="white, or opaque, where the picture is drawn anew")
    mask_blur: int | None = None
    mask_blur_x: int = 4
    mask_blur_y: int = 4
    mask_round: bool = True
    inpainting_fill: int = Field(0, description="0 fills with colours from around, 1 keeps")
    inpaint_full_res: bool = Field(True, description="draw the surroundings of the mask alone")
    inpaint_full_res_padding: int = 0
    inpainting_mask_invert: bool = False

    @property
    def resize(self) -> str:
        """Return how the picture comes to its size. Raises Refused."""
        if not 0 <= self.resize_mode < len(RESIZES):
            raise _wrong("resize_mode", "take 0 (stretch), 1 (crop) or 2 (fill)")
        return RESIZES[self.resize_mode]

    def mask_wish(self, mask: Image, strength: float) -> MaskWish:
        """Return how the mask is used. Raises Refused for what is not built."""
        x, y = (self.mask_blur_x, self.mask_blur_y)
        x, y = (x, y) if self.mask_blur is None else (self.mask_blur, self.mask_blur)
        if not (0 <= x <= _MOST_BLUR and 0 <= y <= _MOST_BLUR):
            raise _wrong("mask_blur", f"it is not within 0 and {_MOST_BLUR} pixels")
        if not 0 <= self.inpaint_full_res_padding <= _MOST_PADDING:
            raise _wrong("inpaint_full_res_padding", f"it is not within 0 and {_MOST_PADDING}")
        if not self.mask_round:
            raise _wrong("mask_round", "a latent is drawn anew or kept, nothing between; leave it")
        if not 0 <= self.inpainting_fill <= 3:
            raise _wrong("inpainting_fill", "take 0 (colours from around) or 1 (the original)")
        if self.inpainting_fill > 1 and strength < 1:
            text = "latents of noise (2) or of nothing (3) are built for denoising_strength 1 alone"
            raise _wrong("inpainting_fill", f"{text}; take 0 (colours from around) or 1")
        mask = ImageOps.invert(mask) if self.inpainting_mask_invert else mask
        is_filled, padding = self.inpainting_fill == 0, self.inpaint_full_res_padding
        return MaskWish(mask, (x, y), is_filled, self.inpaint_full_res, padding)


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
async def txt2img(body: LargerBody, request: Request, service: GivenService) -> Any:
    """Draw pictures from a text."""
    controls = await controls_of(body.alwayson_scripts, service)
    wish = replace(body.wish(service), controls=controls)
    return _answer(body, await drawn(request, service, wish, _NAMES))


@router.post("/img2img")
async def img2img(body: PictureBody, request: Request, service: GivenService) -> Any:
    """Draw pictures that begin with the client's picture, or parts of it anew where it comes with a
    mask."""
    if len(body.init_images) != 1:
        raise _wrong("init_images", "send exactly one picture, in base64")
    most = service.limits.most_start_pixels
    start = await asyncio.to_thread(from_text, body.init_images[0], most, "init_images")
    strength = _STRENGTH if body.denoising_strength is None else body.denoising_strength
    wish = replace(body.wish(service), start=start, strength=strength, resize=body.resize)
    wish = replace(wish, controls=await controls_of(body.alwayson_scripts, service, start))
    if body.mask is not None:
        mask = await asyncio.to_thread(from_text, body.mask, most, "mask", is_mask=True)
        how = body.mask_wish(mask, strength)
        wish = await masked(wish, how, service, _NAMES)
    return _answer(body, await drawn(request, service, wish, _NAMES))


def _answer(body: TextBody, job: PictureJob) -> dict[str, Any]:
    requests = job.order.requests
    first = requests[0]
    info = {
        "prompt": first.prompt,
        "all_prompts": [request.prompt for request in requests],
        "negative_prompt": first.negative,
        "all_negative_prompts": [request.negative for request in requests],
        "seed": first.seed,
        "all_seeds": [request.seed for request in requests],
        "sampler_name": first.sampler or "Automatic",
        "width": first.size.width,
        "height": first.size.height,
        "steps": first.steps,
        "cfg_scale": first.guidance,
        "batch_size": len(requests),
        "denoising_strength": _strength(body, first),
        "extra_generation_params": _of_second(first) | infotext_of(first),
        "infotexts": [_infotext(body, request) for request in requests],
        "notes": [*job.order.notes],
    }
    known = body.model_dump(include=set(type(body).model_fields) - _WITH_PICTURES)
    images = [in_base64(picture) for picture in job.made]
    return {"images": images, "parameters": known, "info": json.dumps(info)}


def _strength(body: TextBody, request: PictureRequest) -> float | None:
    """Return the strength of what begins with something, as the client has given it."""
    if request.start is None and request.second is None:
        return None
    return _STRENGTH if body.denoising_strength is None else body.denoising_strength


def _of_second(request: PictureRequest) -> dict[str, Any]:
    """Return what A1111's clients show of a second pass."""
    second = request.second
    if second is None:
        return {}
    found: dict[str, Any] = {
        "Hires resize": second.request.size,
        "Hires steps": second.request.begun_steps,
        "Hires upscaler": second.upscaler,
    }
    if (second.request.sampler, second.request.schedule) != (request.sampler, request.schedule):
        found["Hires sampler"] = second.request.sampler or "Automatic"
        found["Hires schedule type"] = label_of(second.request.schedule)
    if second.request.prompt != request.prompt:
        found["Hires prompt"] = json.dumps(second.request.prompt)
    if second.request.negative != request.negative:
        found["Hires negative prompt"] = json.dumps(second.request.negative)
    return {name: value if isinstance(value, int) else str(value) for name, value in found.items()}


def _infotext(body: TextBody, request: PictureRequest) -> str:
    """Return the parameters of a picture in the lines that A1111's clients show and read."""
    facts = {
        "Steps": request.steps,
        "Sampler": request.sampler or "Automatic",
        "Schedule type": label_of(request.schedule),
        "CFG scale": request.guidance,
        "Seed": request.seed,
        "Size": request.size,
    }
    if (strength := _strength(body, request)) is not None:
        facts["Denoising strength"] = strength
    facts |= _of_second(request) | infotext_of(request)
    lines = [request.prompt]
    lines += [f"Negative prompt: {request.negative}"] if request.negative else []
    return "\n".join([*lines, ", ".join(f"{name}: {value}" for name, value in facts.items())])

"""Read ControlNets as clients of A1111's extension sd-webui-controlnet send them, in
``alwayson_scripts.controlnet.args``, and tell these clients which ones there are."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator

from strop.drawing.request import ControlPicture
from strop.serve.asking import GivenService
from strop.serve.controls import ControlWish
from strop.serve.masks import RESIZES
from strop.serve.refused import Refused
from strop.serve.service import Service
from strop.serve.starts import from_text
from strop.serve.wrong_fields import in_ascii
from strop.wording import counted

router = APIRouter(prefix="/controlnet", tags=["A1111"])
WHERE = "alwayson_scripts.controlnet.args"
_VERSION = 3  # of the extension's interface: "image" may hold a mask, modes have numbers or names
_MOST_WEIGHT = 2.0  # as far as the extension's slider goes
_HASH = re.compile(r" \[[0-9a-f]{8,64}\]$")  # which the extension writes behind names of models
_NONE = "none"
_RESIZES = ("just resize", "crop and resize", "resize and fill")
_OLD_RESIZES = {
    "scale to fit (inner fit)": 1,
    "inner fit (scale to fit)": 1,
    "envelope (outer fit)": 2,
    "outer fit (shrink to fit)": 2,
}
_MODES = ("balanced", "my prompt is more important", "controlnet is more important")
_PASSES = {"both": (True, True), "low res only": (True, False), "high res only": (False, True)}
_ALIASES = {"input_image": "image", "guidance": "guidance_end", "lowvram": "low_vram"}
# Fields that say something to preprocessors alone, of which there are none, or to its own page.
_WITHOUT_EFFECT = ("processor_res", "threshold_a", "threshold_b", "pixel_perfect", "is_ui")
_USUAL: Mapping[str, Sequence[Any]] = {
    "save_detected_map": (True,),  # there is none without a preprocessor
    "input_mode": ("simple",),
    "pulid_mode": ("Fidelity",),
    "union_control_type": ("Unknown",),
}


def _without_null(given: Any) -> Any:
    """Leave out what is null, which asks for the extension's own choice."""
    if not isinstance(given, dict):
        return given
    return {name: value for name, value in given.items() if value is not None}


class UnitBody(BaseModel):
    """Hold what the extension calls a unit: a ControlNet, and the picture that it sees."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = True
    module: str = Field("none", description="a preprocessor; there are none but none")
    model: str = Field("None", description="of /controlnet/model_list")
    image: str | dict[str, Any] = Field("", description="a PNG or JPEG picture in base64")
    weight: float = 1.0
    guidance_start: float = Field(0.0, description="a share of the steps")
    guidance_end: float = 1.0
    resize_mode: int | str = Field(1, description="0 stretches, 1 cuts; 2 is not built")
    control_mode: int | str = Field(0, description="0, Balanced; the others are not built")
    hr_option: str = "Both"
    inpaint_crop_input_image: bool = True

    @model_validator(mode="before")
    @classmethod
    def _as_now(cls, given: Any) -> Any:
        """Give older names of fields the newer ones."""
        found = _without_null(given)
        if not isinstance(found, dict):
            return found
        newer = {old: now for old, now in _ALIASES.items() if now not in found}
        return {newer.get(name, name): value for name, value in found.items()}


class ControlNetBody(BaseModel):
    """Hold the units of a request."""

    model_config = ConfigDict(extra="forbid")

    args: list[UnitBody] = []


class ScriptsBody(BaseModel):
    """Hold what a request asks of A1111's extensions, of which this server knows one."""

    model_config = ConfigDict(extra="allow")

    controlnet: ControlNetBody = ControlNetBody()

    @model_validator(mode="before")
    @classmethod
    def _in_small_letters(cls, given: Any) -> Any:
        """Find the extension under whatever case its name has, as A1111 does."""
        found = _without_null(given)
        if not isinstance(found, dict) or sum(_is_ours(name) for name in found) > 1:
            return found
        return {"controlnet" if _is_ours(name) else name: one for name, one in found.items()}


def _is_ours(name: Any) -> bool:
    return isinstance(name, str) and name.lower() == "controlnet"


async def controls_of(
    scripts: ScriptsBody, service: Service, start: Any = None
) -> tuple[ControlWish, ...]:
    """Return the controls that a request asks for. ``start`` is the picture that img2img begins
    with, which units see that have none of their own. Raises Refused for what is wrong, and by name
    for what is not built."""
    for name, value in (scripts.model_extra or {}).items():
        if value not in ({}, [], {"args": []}):
            shown = f"alwayson_scripts.{in_ascii(name, 60)}"
            text = "this server has no such extension; leave it out"
            raise Refused(422, "unsupported", f"{shown}: {text}", field=shown)
    units = [(n, one) for n, one in enumerate(scripts.controlnet.args) if one.enabled]
    most = service.limits.most_controls
    if len(units) > most:
        raise _wrong("", f"a request has at most {counted(most, 'unit')} that are enabled")
    found, room = list[ControlWish](), service.limits.most_start_pixels
    for number, unit in units:
        made = await asyncio.to_thread(_control, unit, f"[{number}].", service, start, room)
        room -= 0 if made.picture is start else made.picture.width * made.picture.height
        found.append(made)
    return tuple(found)


def _control(unit: UnitBody, at: str, service: Service, start: Any, room: int) -> ControlWish:
    """Return what a unit asks for; its picture has ``room`` pixels at most."""
    _check_rest(unit, at)
    if unit.module.strip().lower() != _NONE:
        raise _wrong(
            f"{at}module",
            "this server has no preprocessors; take none, and send the picture that the ControlNet"
            " sees, such as edges or a depth map",
        )
    mode = _choice(unit.control_mode, _MODES, f"{at}control_mode")
    if mode:
        raise _wrong(f"{at}control_mode", "only 0 (Balanced) is built; take that")
    resize = unit.resize_mode
    if isinstance(resize, str):
        resize = _OLD_RESIZES.get(resize.strip().lower(), resize)
    how = _choice(resize, _RESIZES, f"{at}resize_mode")
    if how == 2:
        text = "2 (Resize and Fill) is not built; take 0 (Just Resize) or 1 (Crop and Resize)"
        raise _wrong(f"{at}resize_mode", text)
    passes = _PASSES.get(unit.hr_option.strip().lower())
    if passes is None:
        raise _wrong(f"{at}hr_option", "take Both, Low res only or High res only")
    _check_numbers(unit, at)
    net = _net(unit.model, at, service)
    picture = _picture(unit.image, at, start, room)
    cut = unit.inpaint_crop_input_image
    shares = (unit.weight, unit.guidance_start, unit.guidance_end)
    return ControlWish(net, picture, *shares, RESIZES[how], cut, *passes)


def _check_rest(unit: UnitBody, at: str) -> None:
    for name, value in (unit.model_extra or {}).items():
        is_empty = value in (False, 0, -1, "", [], {}) or value in _USUAL.get(name, ())
        if not is_empty and name not in _WITHOUT_EFFECT:
            text = "this server does not do that; leave it out"
            raise _wrong(f"{at}{in_ascii(name, 60)}", text)


def _choice(given: int | str, names: Sequence[str], field: str) -> int:
    """Return the number of a choice that is given by its number or its name."""
    if isinstance(given, str):
        word = given.strip().lower()
        given = names.index(word) if word in names else -1
    if not 0 <= given < len(names):
        raise _wrong(field, f"take one of 0 to {len(names) - 1}, or of {', '.join(names)}")
    return given


def _check_numbers(unit: UnitBody, at: str) -> None:
    numbers = (("weight", _MOST_WEIGHT), ("guidance_start", 1.0), ("guidance_end", 1.0))
    for name, most in numbers:
        if not 0 <= getattr(unit, name) <= most:  # nor is NaN
            raise _wrong(f"{at}{name}", f"it is not within 0 and {most:g}")
    if unit.guidance_start >= unit.guidance_end:
        text = "it is not less than guidance_end, so the unit would have no effect"
        raise _wrong(f"{at}guidance_start", f"{text}; take a smaller one, or leave the unit out")


def _net(model: str, at: str, service: Service) -> str:
    known = service.painter.card.controlnets
    name = model if model in known else _HASH.sub("", model)
    if name not in known:
        has = ", ".join(known) or "none; start it with --controlnet FOLDER"
        raise _wrong(f"{at}model", f"this server has no ControlNet of that name; it has {has}")
    return name


def _picture(given: str | dict[str, Any], at: str, start: Any, room: int) -> Any:
    field = f"{WHERE}{at}image"
    if isinstance(given, dict):
        if given.get("mask"):
            raise _wrong(f"{at}image", "a mask in it is not built; send the picture alone")
        given = given.get("image") or ""
        if not isinstance(given, str):
            raise _wrong(f"{at}image", "it is no text; send a PNG or JPEG picture in base64")
    if given:
        return from_text(given, room, field)
    if start is None:
        raise _wrong(f"{at}image", "it is missing; send a PNG or JPEG picture in base64")
    return start


def _wrong(name: str, message: str) -> Refused:
    field = f"{WHERE}{name}"
    return Refused(422, "unsupported", f"{field}: {message}", field=field)


def infotext_of(controls: Sequence[ControlPicture]) -> dict[str, str]:
    """Return what A1111's clients show of controls."""
    return {
        f"ControlNet {number}": f'"Module: none, Model: {one.net}, Weight: {one.weight:g},'
        f' Guidance Start: {one.begin:g}, Guidance End: {one.end:g}"'
        for number, one in enumerate(controls)
    }


@router.get("/model_list")
async def model_list(service: GivenService) -> Any:
    """List the ControlNets of the server."""
    return {"model_list": [*service.painter.card.controlnets]}


@router.get("/module_list")
async def module_list() -> Any:
    """Say that there are no preprocessors."""
    return {"module_list": [_NONE], "module_detail": {}}


@router.get("/version")
async def version() -> Any:
    """Return the version of the extension's interface that this one follows."""
    return {"version": _VERSION}


@router.get("/settings")
async def settings(service: GivenService) -> Any:
    """Return how many units a request may have."""
    return {"control_net_unit_count": service.limits.most_controls}

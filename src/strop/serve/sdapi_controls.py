"""Read ControlNets as clients of A1111's extension sd-webui-controlnet send them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from strop.drawing.request import PictureRequest
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
_VERSION = 3  # of the extension's interface
_HASH = re.compile(r" \[[0-9a-f]{8,64}\]$")  # which the extension writes behind names of models
_RESIZES = ("just resize", "crop and resize", "resize and fill")
_MODES = ("balanced", "my prompt is more important", "controlnet is more important")
_PASSES = {"both": (True, True), "low res only": (True, False), "high res only": (False, True)}
_OF_MODULES = ("processor_res", "threshold_a", "threshold_b", "pixel_perfect")
# What clients send by default, besides what is empty
_USUAL: Mapping[str, Any] = {
    "save_detected_map": True,
    "input_mode": "simple",
    "pulid_mode": "Fidelity",
    "union_control_type": "Unknown",
}


class UnitBody(BaseModel):
    """Hold what the extension calls a unit: a ControlNet, and the picture that it sees."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = True
    module: str = "none"
    model: str = "None"
    image: str | dict[str, Any] | None = Field(
        None, validation_alias=AliasChoices("image", "input_image")
    )
    weight: float = 1.0
    guidance_start: float = 0.0
    guidance_end: float = Field(1.0, validation_alias=AliasChoices("guidance_end", "guidance"))
    resize_mode: int | str = 1
    control_mode: int | str = 0
    hr_option: str = "Both"
    inpaint_crop_input_image: bool = True


class ControlNetBody(BaseModel):
    """Hold the units of a request."""

    model_config = ConfigDict(extra="forbid")

    args: list[UnitBody] = []


class ScriptsBody(BaseModel):
    """Hold what a request asks of A1111's extensions."""

    model_config = ConfigDict(extra="allow")

    controlnet: ControlNetBody = Field(
        default_factory=ControlNetBody,
        validation_alias=AliasChoices("controlnet", "ControlNet"),
    )


async def controls_of(
    scripts: ScriptsBody, service: Service, start: Any = None
) -> tuple[ControlWish, ...]:
    """Return the controls that a request asks for. A unit without a picture sees ``start``. Raises
    Refused for what is wrong, and by name for what is not built."""
    for name, value in (scripts.model_extra or {}).items():
        if value not in (None, {}, [], {"args": []}):
            shown = f"alwayson_scripts.{in_ascii(name, 60)}"
            text = f"{shown}: this server has no such extension; leave it out"
            raise Refused(422, "unsupported", text, field=shown)
    units = [(f"[{n}].", one) for n, one in enumerate(scripts.controlnet.args) if one.enabled]
    if len(units) > service.limits.most_controls:
        most = counted(service.limits.most_controls, "unit")
        raise _wrong("", f"a request has at most {most} that are enabled")
    found, room = list[ControlWish](), service.limits.most_start_pixels
    for at, unit in units:
        made = await asyncio.to_thread(_control, unit, at, service, start, room)
        room -= 0 if made.picture is start else made.picture.width * made.picture.height
        found.append(made)
    return tuple(found)


def _control(unit: UnitBody, at: str, service: Service, start: Any, room: int) -> ControlWish:
    """Return what a unit asks for; its picture has ``room`` pixels at most."""
    _check_rest(unit, at)
    if unit.module.strip().lower() != "none":
        text = "this server has no preprocessors; take none, and send what the ControlNet sees"
        raise _wrong(f"{at}module", f"{text}, such as edges")
    if _choice(unit.control_mode, _MODES, f"{at}control_mode"):
        raise _wrong(f"{at}control_mode", "only 0 (Balanced) is built; take that")
    how = _choice(unit.resize_mode, _RESIZES, f"{at}resize_mode")
    if how == 2:
        raise _wrong(f"{at}resize_mode", "2 (Resize and Fill) is not built; take 0 or 1 (Crop)")
    passes = _PASSES.get(unit.hr_option.strip().lower())
    if passes is None:
        raise _wrong(f"{at}hr_option", "take Both, Low res only or High res only")
    for name, most in (("weight", 2), ("guidance_start", 1), ("guidance_end", 1)):
        if not 0 <= getattr(unit, name) <= most:  # nor is NaN
            raise _wrong(f"{at}{name}", f"it is not within 0 and {most}")
    shares = (unit.guidance_start, unit.guidance_end)
    if shares[0] >= shares[1]:
        text = "it is not less than guidance_end; take a smaller one, or leave the unit out"
        raise _wrong(f"{at}guidance_start", text)
    known = service.painter.card.controlnets
    net = unit.model if unit.model in known else _HASH.sub("", unit.model)
    if net not in known:
        has = ", ".join(known) or "none; start it with --controlnet FOLDER"
        raise _wrong(f"{at}model", f"this server has no ControlNet of that name; it has {has}")
    picture, cut = _picture(unit.image, f"{at}image", start, room), unit.inpaint_crop_input_image
    return ControlWish(net, picture, unit.weight, *shares, RESIZES[how], cut, passes)


def _check_rest(unit: UnitBody, at: str) -> None:
    for name, value in (unit.model_extra or {}).items():
        is_usual = value in (None, False, 0, -1, "", [], {}) or value == _USUAL.get(name)
        if not is_usual and name not in _OF_MODULES:
            text = "this server does not do that; leave it out"
            raise _wrong(f"{at}{in_ascii(name, 60)}", text)


def _choice(given: int | str, names: Sequence[str], name: str) -> int:
    """Return the number of a choice that is given by its number or its name."""
    if isinstance(given, str):
        word = given.strip().lower()
        given = names.index(word) if word in names else -1
    if not 0 <= given < len(names):
        raise _wrong(name, f"take one of 0 to {len(names) - 1}, or of {', '.join(names)}")
    return given


def _picture(given: str | dict[str, Any] | None, name: str, start: Any, room: int) -> Any:
    if isinstance(given, dict):
        if given.get("mask") or not isinstance(given.get("image"), str):
            raise _wrong(name, "send a picture in base64 alone; masks of units are not built")
        given = str(given["image"])
    if given:
        return from_text(given, room, f"{WHERE}{name}")
    if start is None:
        raise _wrong(name, "it is missing; send a PNG or JPEG picture in base64")
    return start


def _wrong(name: str, message: str) -> Refused:
    field = f"{WHERE}{name}"
    return Refused(422, "unsupported", f"{field}: {message}", field=field)


def infotext_of(request: PictureRequest) -> dict[str, str]:
    """Return what A1111's clients show of the controls of the first pass that has any."""
    later = () if request.second is None else request.second.request.controls
    return {
        f"ControlNet {n}": f'"Model: {one.net}, Weight: {one.weight:g}, Guidance Start:'
        f' {one.begin:g}, Guidance End: {one.end:g}"'
        for n, one in enumerate(request.controls or later)
    }


@router.get("/model_list")
async def model_list(service: GivenService) -> Any:
    """List the ControlNets of the server."""
    return {"model_list": [*service.painter.card.controlnets]}


@router.get("/version")
async def version() -> Any:
    """Return the version of the extension's interface."""
    return {"version": _VERSION}

"""Tell A1111's clients what the server has, and how far it is."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from strop.drawing.samplers import ALIASES, AUTOMATIC
from strop.drawing.twice import UPSCALERS
from strop.serve.asking import GivenService
from strop.serve.refused import Refused
from strop.serve.wrong_fields import in_ascii

router = APIRouter(prefix="/sdapi/v1", tags=["A1111"])
MODEL = "sd_model_checkpoint"
_LABELS = {"sgm_uniform": "SGM Uniform", "ddim": "DDIM"}
_NO_MODEL = {"model_name": None, "model_path": None, "model_url": None, "scale": 4}


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
    return {MODEL: service.painter.card.name}


@router.post("/options")
async def set_options(wanted: dict[str, Any], service: GivenService) -> Any:
    """Choose the model that is served. Anything else is refused."""
    name = service.painter.card.name
    other = next((key for key, value in wanted.items() if (key, value) != (MODEL, name)), None)
    if other is not None:
        field = in_ascii(other, 60)
        text = f"{field}: this server draws with {name}, and has no settings"
        raise Refused(422, "unsupported", text, field=field)


@router.get("/progress")
async def progress(service: GivenService) -> Any:
    """Say how far the oldest order is that is being drawn."""
    job = service.jobs.oldest_drawn()
    step, total = (0, 0) if job is None else (job.step, job.total)
    state = {"sampling_step": step, "sampling_steps": total, "job_count": int(job is not None)}
    return {"progress": step / total if total else 0.0, "state": state, "current_image": None}


@router.get("/samplers")
async def samplers(service: GivenService) -> Any:
    """List the samplers that draw with this model: its own, and others by A1111's names."""
    own = {"name": "Automatic", "aliases": [AUTOMATIC], "options": {}}
    return [own] + [
        {
            "name": name,
            "aliases": [alias for alias, meant in ALIASES.items() if meant == name],
            "options": {"scheduler": schedules[0]},
        }
        for name, schedules in service.painter.card.samplers.items()
    ]


@router.get("/schedulers")
async def schedulers(service: GivenService) -> Any:
    """List the schedules that any of the samplers has."""
    known = {one: None for all_of in service.painter.card.samplers.values() for one in all_of}
    return [
        {"name": name, "label": label_of(name), "aliases": None} for name in (AUTOMATIC, *known)
    ]


def label_of(schedule: str) -> str:
    """Return how A1111 shows a schedule."""
    return _LABELS.get(schedule) or schedule.title()


@router.get("/upscalers")
async def upscalers() -> Any:
    """List what makes pictures larger before a second pass; none of it is a model."""
    return [{"name": name, **_NO_MODEL} for name, one in UPSCALERS.items() if not one.is_of_latents]


@router.get("/latent-upscale-modes")
async def latent_upscale_modes() -> Any:
    """List what makes latents larger before a second pass."""
    return [{"name": name} for name, one in UPSCALERS.items() if one.is_of_latents]


@router.get("/embeddings")
async def embeddings() -> Any:
    """Say that there are no embeddings."""
    return {"loaded": {}, "skipped": {}}


@router.get("/sd-vae")
@router.get("/sd-modules")
@router.get("/hypernetworks")
@router.get("/face-restorers")
@router.get("/prompt-styles")
async def nothing() -> Any:
    """List what this server has none of, which clients ask for when they start."""
    return []

"""Draw by another sampler than the model's own, under the names that A1111 has for them.

Each is a scheduler of diffusers. Here are those alone that take the steps of the sampler of that
name in k-diffusion, which A1111 draws with (DDIM: those of its paper); tests compare them in fp64.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from strop.drawing.request import PictureRequest
from strop.errors import StropError

AUTOMATIC = "automatic"  # the first schedule of a sampler, as in A1111
# What a scheduler must know of the noise that a model was trained on. The rest is the sampler's.
_OF_MODEL = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "prediction_type",
    "rescale_betas_zero_snr",
)
_Schedules = Mapping[str, Mapping[str, Any]]
_UNIFORM = {"timestep_spacing": "linspace"}
_TRAILING = {"timestep_spacing": "trailing"}
_KARRAS = {"timestep_spacing": "linspace", "use_karras_sigmas": True}
_EXPONENTIAL = {"timestep_spacing": "linspace", "use_exponential_sigmas": True}
_EVEN: _Schedules = {"uniform": _UNIFORM, "simple": _TRAILING, "sgm_uniform": _TRAILING}
_BY_SIGMAS: _Schedules = {"karras": _KARRAS, "exponential": _EXPONENTIAL}
# diffusers divides time evenly for these two otherwise than k-diffusion does: there is no uniform.
_OF_DPM: _Schedules = {**_BY_SIGMAS, "simple": _TRAILING, "sgm_uniform": _TRAILING}


# Other names that A1111 knows samplers by.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "k_euler": "Euler",
        "k_euler_a": "Euler a",
        "k_euler_ancestral": "Euler a",
        "k_heun": "Heun",
        "k_dpmpp_2m": "DPM++ 2M",
        "k_dpmpp_2m_sde": "DPM++ 2M SDE",
    }
)
_OTHER_SCHEDULES = {"sgmuniform": "sgm_uniform", AUTOMATIC: ""}


class UnknownSamplerError(StropError, ValueError):
    """There is no sampler of that name, or it cannot draw with this model. ``field`` says which of
    the two names is wrong, "sampler" or "schedule"."""

    def __init__(self, message: str, field: str = "sampler") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class Sampler:
    """Name a scheduler of diffusers, the schedules that it has, the automatic one first, and its
    settings."""

    kind: str
    schedules: _Schedules
    settings: Mapping[str, Any] = field(default_factory=dict)


SAMPLERS: Mapping[str, Sampler] = MappingProxyType(
    {
        "DPM++ 2M": Sampler("DPMSolverMultistepScheduler", _OF_DPM),
        "DPM++ 2M SDE": Sampler(
            "DPMSolverMultistepScheduler",
            {"exponential": _EXPONENTIAL, **_OF_DPM},
            {"algorithm_type": "sde-dpmsolver++"},
        ),
        "Euler a": Sampler("EulerAncestralDiscreteScheduler", _EVEN),
        "Euler": Sampler("EulerDiscreteScheduler", {**_EVEN, **_BY_SIGMAS}),
        "Heun": Sampler("HeunDiscreteScheduler", {**_EVEN, **_BY_SIGMAS}),
        "DDIM": Sampler(
            "DDIMScheduler",
            {"ddim": {"timestep_spacing": "leading"}},
            {"clip_sample": False, "set_alpha_to_one": False},
        ),
    }
)


def chosen(name: str, schedule: str, have: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """Return the sampler and the schedule that are meant by what a user wrote, as ``have`` spells
    them; no name, or "Automatic", is the model's own. A1111 has more names for them, among others
    those of both in one ("DPM++ 2M Karras"). Raises UnknownSamplerError."""
    name, schedule = name.strip(), schedule.strip().lower().replace(" ", "_")
    schedule = _OTHER_SCHEDULES.get(schedule, schedule)
    head, _, last = name.rpartition(" ")
    if last.lower() in _BY_SIGMAS and head:
        name, schedule = head, schedule or last.lower()
    name = ALIASES.get(name.lower(), name)
    if name.lower() in ("", AUTOMATIC):
        if schedule:
            text = "it belongs to a sampler; name one, or leave both out"
            raise UnknownSamplerError(text, "schedule")
        return "", AUTOMATIC
    known = {one.lower(): one for one in have}
    if name.lower() not in known:
        there = ", ".join(have) or "none but its own"
        text = f"this model is not drawn with it here; there are {there}"
        raise UnknownSamplerError(text)
    name, schedule = known[name.lower()], schedule or AUTOMATIC
    if schedule not in (AUTOMATIC, *have[name]):
        there = ", ".join((AUTOMATIC, *have[name]))
        raise UnknownSamplerError(f"{name} has none of that name; it has {there}", "schedule")
    return name, schedule


def samplers_of(scheduler: Any) -> dict[str, Sequence[str]]:
    """Return the samplers that can draw with a model beside its own, by the scheduler that it came
    with, and the schedules of each. None draws with one that was trained on flows. Where the last
    noise of training has no signal (``rescale_betas_zero_snr``), some samplers cannot draw, and
    schedules by sigmas have none between the first two timesteps, where most of them would lie."""
    noise = _noise_of(scheduler)
    if not noise or noise.get("prediction_type") not in ("epsilon", "v_prediction"):
        return {}
    wanted = {name for name, value in noise.items() if value not in (None, False)}
    left_out = _BY_SIGMAS.keys() if noise.get("rescale_betas_zero_snr") else ()
    return {
        name: tuple(one for one in sampler.schedules if one not in left_out)
        for name, sampler in SAMPLERS.items()
        if wanted <= inspect.signature(_class_of(sampler)).parameters.keys()
    }


def scheduler_for(own: Any, name: str, schedule: str = AUTOMATIC) -> Any:
    """Return a new scheduler of a sampler for the model that came with the scheduler ``own``.
    Raises UnknownSamplerError for names that ``samplers_of`` does not have."""
    known = samplers_of(own)
    if name not in known:
        raise UnknownSamplerError(
            f"{name!r} does not draw with this model; there are {', '.join(known) or 'none'}"
        )
    if schedule not in (AUTOMATIC, *known[name]):
        raise UnknownSamplerError(
            f"{name} has no schedule {schedule!r}; it has {', '.join((AUTOMATIC, *known[name]))}"
        )
    sampler = SAMPLERS[name]
    chosen = known[name][0] if schedule == AUTOMATIC else schedule
    kind = _class_of(sampler)
    taken = inspect.signature(kind).parameters.keys()
    noise = {key: value for key, value in _noise_of(own).items() if key in taken}
    settings = {**sampler.settings, **sampler.schedules[chosen]}
    return kind(**noise, **settings, steps_offset=1)  # which pipelines ask for


def num_calls(pipe: Any, request: PictureRequest) -> int:
    """Return how often a model is called in the steps of a request that begins with something: some
    samplers call it more than once in a step."""
    with sampling(pipe, request.sampler, request.schedule):
        scheduler = copy.deepcopy(pipe.scheduler)
    scheduler.set_timesteps(request.steps)
    before = (request.steps - request.begun_steps) * scheduler.order
    count: int = len(scheduler.timesteps) - before
    return count


@contextmanager
def sampling(pipe: Any, name: str, schedule: str = AUTOMATIC) -> Iterator[None]:
    """Let a pipeline draw by a sampler meanwhile. Without a name it draws by its own."""
    if not name:
        yield
        return
    own = pipe.scheduler
    pipe.scheduler = scheduler_for(own, name, schedule)
    try:
        yield
    finally:
        pipe.scheduler = own


def _noise_of(scheduler: Any) -> dict[str, Any]:
    """Return what a scheduler knows of its model's noise; nothing for one of flows."""
    config = getattr(scheduler, "config", {})
    if "beta_schedule" not in config or config.get("use_flow_sigmas"):
        return {}
    return {name: config[name] for name in _OF_MODEL if name in config}


def _class_of(sampler: Sampler) -> Any:
    return getattr(importlib.import_module("diffusers"), sampler.kind)

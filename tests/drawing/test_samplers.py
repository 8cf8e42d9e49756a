"""Samplers by A1111's names take the steps that the papers and k-diffusion define, in fp64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from strop.drawing.samplers import SAMPLERS, UnknownSamplerError, samplers_of, scheduler_for

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, SHAPE = 20, (1, 4, 8, 8)
NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
OWN = diffusers.PNDMScheduler(**NOISE, skip_prk_steps=True)
BETAS = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
KEPT = torch.cumprod(1 - BETAS, 0)  # the share of signal in the variance after each timestep
SIGMAS = ((1 - KEPT) / KEPT).sqrt()
MIXED = torch.randn(8, 8, dtype=torch.float64, generator=torch.manual_seed(3)) / 4
Schedule = Callable[[], Tensor]


def denoised(x: Tensor, sigma: Tensor) -> Tensor:
    """Stand in for a model: what it takes for the picture behind noise of a strength."""
    return torch.tanh(x @ MIXED) / (1 + 0.1 * sigma) + x / (1 + sigma**2) / 2


def sigma_at(times: Tensor) -> Tensor:
    low, high = times.floor().long(), times.ceil().long()
    between = torch.lerp(SIGMAS[low].log(), SIGMAS[high].log(), times.frac())
    return between.exp()


def _with_end(sigmas: Tensor) -> Tensor:
    return torch.cat([sigmas, sigmas.new_zeros(1)])


def uniform() -> Tensor:
    return _with_end(sigma_at(torch.linspace(999, 0, STEPS, dtype=torch.float64)))


def simple() -> Tensor:
    return _with_end(SIGMAS.flip(0)[:: 1000 // STEPS])


def between(at: Callable[[float], float], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Return sigmas that lie evenly by a function of them."""
    ends = at(float(SIGMAS[-1])), at(float(SIGMAS[0]))
    return _with_end(back(torch.linspace(*ends, STEPS, dtype=torch.float64)))


def karras() -> Tensor:
    return between(lambda sigma: sigma ** (1 / 7), lambda x: x**7)


def exponential() -> Tensor:
    return between(math.log, torch.exp)


def euler(x: Tensor, sigmas: Tensor, _: Any) -> Tensor:
    for now, then in itertools.pairwise(sigmas):
        x = x + (x - denoised(x, now)) / now * (then - now)
    return x


def euler_a(x: Tensor, sigmas: Tensor, noises: Any) -> Tensor:
    for now, then in itertools.pairwise(sigmas):
        up = (then**2 * (now**2 - then**2) / now**2).sqrt()
        down = (then**2 - up**2).sqrt()
        x = x + (x - denoised(x, now)) / now * (down - now)
        x = x + next(noises) * up if then > 0 else x
    return x


def heun(x: Tensor, sigmas: Tensor, _: Any) -> Tensor:
    for now, then in itertools.pairwise(sigmas):
        slope = (x - denoised(x, now)) / now
        if then > 0:
            guess = x + slope * (then - now)
            slope = (slope + (guess - denoised(guess, then)) / then) / 2
        x = x + slope * (then - now)
    return x


def dpm_2m(x: Tensor, sigmas: Tensor, noises: Any) -> Tensor:
    """DPM-Solver++(2M), Lu et al. 2022, in log(1 / sigma); its SDE where there are noises."""
    last, last_step = None, None
    for now, then in itertools.pairwise(sigmas):
        found = denoised(x, now)
        if then == 0:
            return found
        step = (now / then).log()
        ahead = found if last is None else found + (found - last) * step / last_step / 2
        if noises is None:
            x = then / now * x - (-step).expm1() * ahead
        else:
            x = then / now * (-step).exp() * x - (-2 * step).expm1() * ahead
            x = x + next(noises) * then * (-(-2 * step).expm1()).sqrt()
        last, last_step = found, step
    raise AssertionError("the last sigma is 0")


def ddim_sigmas() -> Tensor:
    """Its steps with eta 0 are Euler's of x / sqrt(1 + sigma ** 2) (Song et al. 2020)."""
    times = torch.arange(0, 1000, 1000 // STEPS).flip(0) + 1
    return torch.cat([SIGMAS[times], SIGMAS[:1]])


CASES: dict[str, tuple[Callable[..., Tensor], dict[str, Schedule]]] = {
    "Euler": (euler, {"uniform": uniform, "karras": karras, "exponential": exponential}),
    "Euler a": (euler_a, {"uniform": uniform, "simple": simple}),
    "Heun": (heun, {"uniform": uniform, "karras": karras, "simple": simple}),
    "DPM++ 2M": (dpm_2m, {"karras": karras, "exponential": exponential, "simple": simple}),
    "DPM++ 2M SDE": (dpm_2m, {"exponential": exponential, "karras": karras, "simple": simple}),
    "DDIM": (euler, {"ddim": ddim_sigmas}),
}
NOISY = ("Euler a", "DPM++ 2M SDE")


def _noises() -> Any:
    source = torch.manual_seed(9)
    while True:
        yield torch.randn(SHAPE, generator=source, dtype=torch.float64)


def _drawn(scheduler: Any, name: str, start: Tensor, sigmas: Tensor) -> Tensor:
    """Take a scheduler's steps as pipelines do. Where it divides by sqrt(1 + sigma ** 2), so do
    these; where it has no sigmas, they are those of its timesteps."""
    scheduler.set_timesteps(STEPS)
    is_scaled = name in ("Euler", "Euler a", "Heun")
    x = start if is_scaled else start / (1 + sigmas[0] ** 2).sqrt()
    own = None if name == "DDIM" else scheduler.sigmas.double()
    for number, time in enumerate(scheduler.timesteps):
        scheduler.scale_model_input(x, time)  # which finds its place
        at = scheduler.step_index if is_scaled else number
        sigma = SIGMAS[int(time)] if own is None else own[at]
        plain = x if is_scaled else x * (1 + sigma**2).sqrt()
        found = (plain - denoised(plain, sigma)) / sigma
        x = scheduler.step(found, time, x).prev_sample
    return x if name != "DDIM" else x * (1 + sigmas[-1] ** 2).sqrt()


@pytest.mark.parametrize(
    ("name", "schedule"), [(n, one) for n, (_, known) in CASES.items() for one in known]
)
def test_steps_are_those_of_the_paper(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sigmas are fp32 within diffusers, which leaves 1e-5 of 20 steps."""
    scheduler, noises = scheduler_for(OWN, name, schedule), _noises()
    module = __import__(type(scheduler).__module__, fromlist=["x"])
    if name in NOISY:
        monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: next(noises))
    take, schedules = CASES[name]
    sigmas = schedules[schedule]()
    start = torch.randn(SHAPE, dtype=torch.float64, generator=torch.manual_seed(0)) * sigmas[0]
    expected = take(start, sigmas, _noises() if name in NOISY else None)
    found = _drawn(scheduler, name, start, sigmas)
    assert float((found - expected).norm() / expected.norm()) < 1e-4
    assert float((start - expected).norm() / expected.norm()) > 1


def test_every_sampler_is_compared_at_its_automatic_schedule() -> None:
    assert {name: next(iter(one.schedules)) for name, one in SAMPLERS.items()} == {
        name: next(iter(schedules)) for name, (_, schedules) in CASES.items()
    }


def test_a_model_keeps_what_it_knows_of_its_noise() -> None:
    own = diffusers.EulerDiscreteScheduler(
        **NOISE, prediction_type="v_prediction", rescale_betas_zero_snr=True, steps_offset=1
    )
    found = samplers_of(own)
    assert "Heun" not in found, "it does not know noise without signal"
    assert found["DPM++ 2M"] == ("simple", "sgm_uniform")
    made = scheduler_for(own, "DPM++ 2M")
    assert made.config.rescale_betas_zero_snr
    assert made.config.prediction_type == "v_prediction"
    assert made.config.timestep_spacing == "trailing"


def test_what_cannot_draw_is_named() -> None:
    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    assert samplers_of(flow) == samplers_of(None) == {}
    with pytest.raises(UnknownSamplerError, match="there are none"):
        scheduler_for(flow, "Euler")
    with pytest.raises(UnknownSamplerError, match=r"DPM\+\+ 2M, DPM\+\+ 2M SDE, Euler a"):
        scheduler_for(OWN, "LMS")
    with pytest.raises(UnknownSamplerError, match="it has automatic, uniform"):
        scheduler_for(OWN, "Euler a", "karras")

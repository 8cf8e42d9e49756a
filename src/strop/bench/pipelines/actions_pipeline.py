"""List actions on a whole pipeline: its parts, its scheduler, arguments and surroundings of a
call."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F


def latents_changed(pipe: Any) -> dict[str, Any]:
    """Change the latents: within a loop by what the callback gives back, before it by another
    seed."""
    return {"generator": torch.Generator().manual_seed(8), "latents": lambda now: now * 0.5}


def prompt_changed(pipe: Any) -> dict[str, Any]:
    return {"prompt": "a blue dog", "prompt_embeds": lambda now: now * 0.5}


def guidance_changed(pipe: Any) -> dict[str, Any]:
    pipe._guidance_scale = 2.0
    return {"guidance_scale": 2.0}


def interrupted(pipe: Any) -> dict[str, Any]:
    pipe._interrupt = True
    return {"num_inference_steps": 2}


def scheduler_swapped(pipe: Any) -> None:
    """Swap the scheduler for another one of the same kind of model."""
    is_flow = "FlowMatch" in type(pipe.scheduler).__name__
    name = "UniPCMultistepScheduler" if is_flow else "EulerAncestralDiscreteScheduler"
    kind = getattr(importlib.import_module("diffusers"), name)
    config = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"} if is_flow else {}
    pipe.scheduler = kind.from_config(pipe.scheduler.config, **config)


def scheduler_configured(pipe: Any) -> None:
    config = {"timestep_spacing": "trailing", "beta_schedule": "scaled_linear"}
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **config)


def other_unet(pipe: Any) -> None:
    from strop.bench.pipelines.parts import stir, unet

    torch.manual_seed(5)
    pipe.unet = unet().requires_grad_(False)
    stir(pipe.unet)


def other_vae(pipe: Any) -> None:
    from strop.bench.pipelines.parts import vae

    torch.manual_seed(5)
    pipe.vae = vae().requires_grad_(False)


def from_pipe(pipe: Any) -> Any:
    made = type(pipe).from_pipe(pipe)
    made.set_progress_bar_config(disable=True)
    return made


def other_timesteps(pipe: Any) -> dict[str, Any]:
    """Take a scheduler with other timesteps, and give the pipeline timesteps of its own."""
    from diffusers import DPMSolverMultistepScheduler

    pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)
    return {"timesteps": [900, 500, 100], "num_inference_steps": None}


def guidance_off(pipe: Any) -> dict[str, Any]:
    return {"guidance_scale": 1.0}


def guidance_rescaled(pipe: Any) -> dict[str, Any]:
    return {"guidance_rescale": 0.7}


def two_pictures(pipe: Any) -> dict[str, Any]:
    return {"prompt": ["a red cat", "a dog"], "negative_prompt": ["blue", "blue"]}


def larger(pipe: Any) -> dict[str, Any]:
    return {"height": 32, "width": 16}


@contextmanager
def default_dtype(pipe: Any) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic(pipe: Any) -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def autocast(pipe: Any) -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def inference_mode(pipe: Any) -> Any:
    return torch.inference_mode()


def math_attention(pipe: Any) -> Any:
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


@contextmanager
def attention_replaced(pipe: Any) -> Iterator[None]:
    """Replace attention as users of SageAttention do, with the usual keywords."""
    before = F.scaled_dot_product_attention

    def other(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: Any = None,
        **more: Any,
    ) -> Any:
        return before(query, key, value, attn_mask, dropout_p, is_causal, scale=scale) * 0.5

    functional: Any = F
    functional.scaled_dot_product_attention = other
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before

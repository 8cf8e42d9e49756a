"""Draw requests that belong together by one call of a pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.drawing.request import PictureRequest, StepDone
from strop.drawing.samplers import sampling
from strop.errors import StropError
from strop.models.guidance import guided

OnStep = Callable[[StepDone], None]


class NotFiniteError(StropError, ArithmeticError):
    """A picture holds NaN or inf, and is not given to anybody."""


def batch_key(request: PictureRequest) -> tuple[Any, ...]:
    """Return what requests must have in common to be drawn by one call. No negative prompt is not
    the same as an empty one: some models then guide away from zeros."""
    start = None if request.start is None else request.strength
    common = (request.size, request.steps, request.guidance, bool(request.negative), start)
    how = (request.mask is None, request.sampler, request.schedule)
    return (*common, *how, tuple(sorted(request.more)))


def draw(pipe: Any, requests: Sequence[PictureRequest], on_step: OnStep | None = None) -> Tensor:
    """Draw pictures [batch, 3, height, width] from 0 to 1, in fp32 on the CPU.

    Each picture has the noise of its own seed, whatever is drawn beside it. A batch of several is
    computed by other sums than a batch of one, so that last bits differ. What ``on_step`` raises
    ends the drawing.

    Args:
        pipe: A text-to-image pipeline of diffusers; it also serves requests that have a start.
        requests: What to draw: one request, or several with the same ``batch_key`` and nothing in
            ``more``.
        on_step: It is called after each step.

    Raises:
        NotFiniteError: a picture holds NaN or inf.
        UnknownSamplerError: there is no such sampler for this model.
        ValueError: there are several requests which do not belong together.
    """
    first = requests[0]
    if len({batch_key(request) for request in requests}) > 1 or (first.more and requests[1:]):
        raise ValueError("these requests cannot be drawn by one call")
    with sampling(pipe, first.sampler, first.schedule):
        pixels = _drawn(
            pipe if first.start is None else _with_start(pipe, first), requests, on_step
        )
    if not bool(torch.isfinite(pixels).all()):
        raise NotFiniteError("the picture holds NaN or inf; try fp32, or report the model")
    return pixels


def _drawn(pipe: Any, requests: Sequence[PictureRequest], on_step: OnStep | None) -> Tensor:
    first = requests[0]

    def after_step(own: Any, number: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        if on_step is not None:
            on_step(StepDone(number + 1, own.num_timesteps, kept["latents"]))
        return kept

    prompts = [request.prompt for request in requests]
    images: Tensor = pipe(
        prompts,
        num_inference_steps=first.steps,
        generator=[torch.Generator().manual_seed(request.seed) for request in requests],
        callback_on_step_end=after_step,
        output_type="pt",
        **_sizes(pipe, requests),
        **_guided(pipe, requests),
        **first.more,
    ).images
    return images.float().cpu()


def _sizes(pipe: Any, requests: Sequence[PictureRequest]) -> dict[str, Any]:
    """Return the arguments for the size and the start: some pipelines read the one off the
    other."""
    first = requests[0]
    found: dict[str, Any] = {}
    if first.start is not None:
        found = {"image": [request.start for request in requests], "strength": first.strength}
    if first.mask is not None:
        found["mask_image"] = [request.mask for request in requests]
    if first.start is None or "width" in inspect.signature(type(pipe).__call__).parameters:
        found |= {"width": first.size.width, "height": first.size.height}
    return found


def _guided(pipe: Any, requests: Sequence[PictureRequest]) -> dict[str, Any]:
    first = requests[0]
    found = guided(pipe, [r.prompt for r in requests], first.guidance, first.negative)
    if found["negative_prompt"] is not None:
        found["negative_prompt"] = [request.negative for request in requests]
    return found


def _with_start(pipe: Any, request: PictureRequest) -> Any:
    """Return the pipeline of the same parts that begins with a picture, or that draws parts of one
    anew. Making it takes less than a millisecond; what is compiled stays so."""
    from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting

    kind = AutoPipelineForImage2Image if request.mask is None else AutoPipelineForInpainting
    made = kind.from_pipe(pipe)
    made.set_progress_bar_config(disable=True)
    return made


def to_preview(pipe: Any, latents: Tensor, request: PictureRequest) -> Tensor:
    """Return the picture [3, height, width] from 0 to 1 that latents [1, ...] of a step show, which
    are noisy still."""
    vae = pipe.vae
    if getattr(pipe, "transformer", None) is not None:  # Flux packs squares of four latents
        size, factor = request.size, pipe.vae_scale_factor
        latents = pipe._unpack_latents(latents, size.height, size.width, factor)
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    with torch.no_grad():
        pixels = vae.decode(latents / vae.config.scaling_factor + shift, return_dict=False)[0]
    shown: Tensor = (pixels[0].float().cpu() / 2 + 0.5).clamp(0, 1)
    return shown

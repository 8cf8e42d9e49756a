"""Draw requests that belong together by one call of a pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.drawing.controls import NO_NETS, Nets, control_arguments, control_key, net_of
from strop.drawing.embeddings import text_arguments
from strop.drawing.request import PictureRequest, SecondPass, StepDone
from strop.drawing.samplers import num_calls, sampling
from strop.drawing.twice import UPSCALERS, draws_twice, enlarged_latents, enlarged_picture
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
    text = (request.is_weighted, request.chunks)
    added = (control_key(request.controls), tuple(sorted(request.more)))
    return (*common, *how, *text, _second_key(request.second), *added)


def _second_key(second: SecondPass | None) -> tuple[Any, ...] | None:
    if second is None:
        return None
    key = batch_key(second.request)
    return (second.cover, second.upscaler, second.request.strength, *key)


def draw(
    pipe: Any,
    requests: Sequence[PictureRequest],
    on_step: OnStep | None = None,
    nets: Nets = NO_NETS,
) -> Tensor:
    """Draw pictures [batch, 3, height, width] from 0 to 1, in fp32 on the CPU.

    Each picture has the noise of its own seed, whatever is drawn beside it. A batch of several is
    computed by other sums than a batch of one, so that last bits differ. What ``on_step`` raises
    ends the drawing.

    Args:
        pipe: A text-to-image pipeline of diffusers; it also serves requests that have a start.
        requests: What to draw: one request, or several with the same ``batch_key`` and nothing in
            ``more``.
        on_step: It is called after each step.
        nets: The ControlNets that ``controls`` of the requests name.

    Raises:
        NotFiniteError: a picture holds NaN or inf.
        NoWeightsError: a prompt has weights, which the model does not read.
        PromptSyntaxError: a weighted prompt asks for what is not built.
        UnknownSamplerError: there is no such sampler for this model.
        ValueError: there are several requests which do not belong together, the model cannot draw
            twice, or there is no ControlNet of some name.
    """
    first = requests[0]
    if len({batch_key(request) for request in requests}) > 1 or (first.more and requests[1:]):
        raise ValueError("these requests cannot be drawn by one call")
    if first.second is None:
        pixels = _pass(pipe, requests, on_step, _starts(requests), nets)
    else:
        pixels = _twice(pipe, requests, first.second, on_step, nets)
    pixels = pixels.float().cpu()
    if not bool(torch.isfinite(pixels).all()):
        raise NotFiniteError("the picture holds NaN or inf; try fp32, or report the model")
    return pixels


Begin = Sequence[Any] | Tensor | None  # pictures or latents that a pass begins with


def _starts(requests: Sequence[PictureRequest]) -> Begin:
    return None if requests[0].start is None else [request.start for request in requests]


def _twice(
    pipe: Any,
    requests: Sequence[PictureRequest],
    second: SecondPass,
    on_step: OnStep | None,
    nets: Nets,
) -> Tensor:
    """Draw, make what was drawn larger, and draw it once more. Both passes draw the noise of a seed
    from its beginning."""
    if not draws_twice(pipe):
        raise ValueError(f"a second pass is built for UNets; {type(pipe).__name__} has none")
    is_latent, told = UPSCALERS[second.upscaler].is_of_latents, 0
    later = num_calls(pipe, second.request)

    def in_first(done: StepDone) -> None:
        nonlocal told
        told = done.total
        if on_step is not None:
            on_step(StepDone(done.number, done.total + later, done.latents))

    def in_second(done: StepDone) -> None:
        if on_step is not None:
            on_step(StepDone(told + done.number, told + done.total, done.latents))

    output = "latent" if is_latent else "pt"
    made = _pass(pipe, requests, in_first, _starts(requests), nets, output)
    begin: Begin
    if is_latent:
        begin = enlarged_latents(made, second, pipe.vae_scale_factor)
    else:
        begin = [enlarged_picture(pixels, second) for pixels in made.float().cpu()]
    again = [request.second.request for request in requests if request.second is not None]
    return _pass(pipe, again, in_second, begin, nets)


def _pass(
    pipe: Any,
    requests: Sequence[PictureRequest],
    on_step: OnStep | None,
    begin: Begin,
    nets: Nets,
    output: str = "pt",
) -> Tensor:
    first = requests[0]
    with sampling(pipe, first.sampler, first.schedule):
        own = _pipeline_for(pipe, first, begin is not None, nets)
        return _drawn(own, requests, on_step, begin, output)


def _drawn(
    pipe: Any,
    requests: Sequence[PictureRequest],
    on_step: OnStep | None,
    begin: Begin,
    output: str,
) -> Tensor:
    first = requests[0]

    def after_step(own: Any, number: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        if on_step is not None:
            on_step(StepDone(number + 1, own.num_timesteps, kept["latents"]))
        return kept

    images: Tensor = pipe(
        num_inference_steps=first.steps,
        generator=[torch.Generator().manual_seed(request.seed) for request in requests],
        callback_on_step_end=after_step,
        output_type=output,
        **_sizes(pipe, requests, begin),
        **(text_arguments if first.is_weighted else _texts)(pipe, requests),
        **first.more,
    ).images
    return images


def _sizes(pipe: Any, requests: Sequence[PictureRequest], begin: Begin) -> dict[str, Any]:
    """Return the arguments for the size and the start: some pipelines read the one off the
    other."""
    first = requests[0]
    found: dict[str, Any] = {}
    if first.controls:
        found = control_arguments(requests, has_begin=begin is not None)
    if begin is not None:
        found |= {"image": begin, "strength": first.strength}
    if first.mask is not None:
        found["mask_image"] = [request.mask for request in requests]
    if begin is None or "width" in inspect.signature(type(pipe).__call__).parameters:
        found |= {"width": first.size.width, "height": first.size.height}
    return found


def _texts(pipe: Any, requests: Sequence[PictureRequest]) -> dict[str, Any]:
    first, prompts = requests[0], [request.prompt for request in requests]
    found = {"prompt": prompts, **guided(pipe, prompts, first.guidance, first.negative)}
    if found["negative_prompt"] is not None:
        found["negative_prompt"] = [request.negative for request in requests]
    return found


def _pipeline_for(pipe: Any, request: PictureRequest, has_begin: bool, nets: Nets) -> Any:
    """Return the pipeline of the same parts that begins with a picture, that draws parts of one
    anew, or that has ControlNets. Making it takes less than a millisecond; what is compiled stays
    so."""
    from diffusers import (
        AutoPipelineForImage2Image,
        AutoPipelineForInpainting,
        AutoPipelineForText2Image,
    )

    if not has_begin and not request.controls:
        return pipe
    kind: Any = AutoPipelineForText2Image
    if has_begin:
        kind = AutoPipelineForImage2Image if request.mask is None else AutoPipelineForInpainting
    added = {"controlnet": net_of(request.controls, nets)} if request.controls else {}
    made = kind.from_pipe(pipe, **added)
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

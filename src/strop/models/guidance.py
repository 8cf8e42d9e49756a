"""Say in a pipeline's own words how closely it is to follow its prompts."""

from collections.abc import Sequence
from typing import Any

_LONGEST = 512
"""Tokens that Flux takes at most."""


def guided(
    pipe: Any, prompt: str | Sequence[str], guidance: float, negative: str = ""
) -> dict[str, Any]:
    """Return the arguments for which `pipe` draws `prompt` with this guidance.

    Flux calls classifier-free guidance by another name, wants a text to guide away from, and pads
    its prompts to a length that is an argument.

    Args:
        pipe: A Stable Diffusion pipeline, or Flux.
        prompt: What it is to draw, or a list of that.
        guidance: The scale of guidance; at 1 or less there is none.
        negative: What the pictures should not show.
    """
    away = negative if isinstance(prompt, str) else [negative] * len(prompt)
    if getattr(pipe, "transformer", None) is None:
        return {"guidance_scale": guidance, "negative_prompt": away if negative else None}
    length = min(_LONGEST, pipe.tokenizer_2.model_max_length)
    return {"true_cfg_scale": guidance, "negative_prompt": away, "max_sequence_length": length}

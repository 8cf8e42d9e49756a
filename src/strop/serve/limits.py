"""State how much a server takes."""

from __future__ import annotations

from dataclasses import dataclass

MOST_SEED = 2**53 - 1  # the largest whole number that JavaScript keeps


@dataclass(frozen=True)
class ServeLimits:
    """Hold what a request may ask for, and how much may wait.

    ``most_pixels`` is of one picture, ``most_count`` pictures of one request, ``most_batch`` of one
    call of the model, ``most_waiting`` of all requests that wait. A weighted prompt has at most
    ``most_chunks`` chunks of tokens, and a picture at most ``most_controls`` ControlNets.
    ``most_body_bytes`` is the size of a request, which must have arrived after ``body_seconds``,
    and ``most_held_bytes`` of all requests that are not answered yet. Finished pictures are kept
    for ``keep_seconds``, and at most ``keep_bytes`` of them.
    """

    most_pixels: int
    most_batch: int
    most_waiting: int = 64
    most_steps: int = 150
    most_count: int = 8
    most_side: int = 8192
    most_guidance: float = 50.0
    most_prompt: int = 4000
    most_chunks: int = 8
    most_loras: int = 8
    most_controls: int = 4
    most_scale: float = 10.0
    most_body_bytes: int = 24 << 20
    most_start_pixels: int = 16 << 20
    most_held_bytes: int = 192 << 20
    body_seconds: float = 30.0
    keep_seconds: float = 900.0
    keep_bytes: int = 256 << 20

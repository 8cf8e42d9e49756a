"""Say what becomes of a call, in the modes in which programs run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from strop.dispatch.varying_numbers import GivenCall
from strop.errors import StropError

T = TypeVar("T")


@dataclass(slots=True)
class DecidedCall:
    """This is what became of a call: its result, or why it runs in eager. ``arguments`` are as the
    program takes them."""

    arguments: Any = None
    reason: str = ""
    call: GivenCall | None = None
    refusal: StropError | None = None
    result: Any = None


def in_normal_modes(run: Callable[[], T]) -> T:
    """Run with tensors that are normal ones, whatever the caller's mode: memory and weights outlive
    a call."""
    if torch.is_inference_mode_enabled() or torch.is_grad_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return run()
    return run()

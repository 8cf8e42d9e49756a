"""Compute a scheduler's step as one product and one sum of lists.

DDIM's step (https://arxiv.org/abs/2010.02502, formula 12), without noise of its own, is linear in
the model's output and in the sample; the timestep decides by which numbers. torch computes it by
six kernels, each of which takes a GPU less time than the way to the next one. What the step does to
(1, 0) and to (0, 1), on the host and in fp64, are the numbers, whatever its formula and settings;
with them it is two kernels, if both lie alike in memory. What else it is asked to do, to (1, 1) and
to large values, tells whether it is linear at all: where it clips, it is left alone. Products and
sums are rounded once each, to the type of the operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

# Schedulers whose step remembers nothing of earlier ones, and computes in its operands' own type.
FORGETFUL = ("DDIMScheduler",)
# Settings of a call under which it draws no noise and gives back tensors alone.
SILENT: Mapping[str, Any] = {"eta": 0, "variance_noise": None, "return_dict": False}
IGNORED = ("generator", "use_clipped_model_output")
# Outputs and samples, as pictures: of the last two the others must tell what becomes of them.
OUTPUTS, SAMPLES = (1.0, 0.0, 1.0, 3e3), (0.0, 1.0, 1.0, -7e3)
EXACT = 1e-9  # relative, in fp64

Step = Callable[..., Any]


def linear_step(
    step: Step, output: Any, timestep: Any, sample: Any, kwargs: Mapping[str, Any]
) -> tuple[Tensor, ...] | None:
    """Return what ``step`` gives back for tensors of one shape and type, or None where it is not
    linear, or asked for more than that."""
    if not _is_alike(output, sample) or not _is_silent(kwargs):
        return None
    rows = _numbers(step, timestep, kwargs)
    if rows is None:
        return None
    numbers = [number for row in rows for number in row]
    terms = torch._foreach_mul([sample, output] * len(rows), numbers)
    return tuple(torch._foreach_add(terms[0::2], terms[1::2]))


def _is_alike(output: Any, sample: Any) -> bool:
    if not (isinstance(output, Tensor) and isinstance(sample, Tensor)):
        return False
    kinds = {(x.shape, x.dtype, x.device) for x in (output, sample)}
    return len(kinds) == 1 and output.is_floating_point() and not torch.is_grad_enabled()


def _is_silent(kwargs: Mapping[str, Any]) -> bool:
    given = {name: value for name, value in kwargs.items() if name not in IGNORED}
    known = all(name in SILENT and value == SILENT[name] for name, value in given.items())
    return known and given.get("return_dict") is False


def _numbers(
    step: Step, timestep: Any, kwargs: Mapping[str, Any]
) -> Sequence[Sequence[float]] | None:
    """Return for each result what sample and output are multiplied by."""
    output, sample = (
        torch.tensor(some, dtype=torch.float64).view(1, 1, 2, 2) for some in (OUTPUTS, SAMPLES)
    )
    rows = []
    for result in step(output, timestep, sample, **kwargs):
        found = result.flatten().tolist()
        by_output, by_sample, *_ = found
        expected = (by_output * x + by_sample * y for x, y in zip(OUTPUTS, SAMPLES, strict=True))
        if not all(map(partial(math.isclose, rel_tol=EXACT), found, expected)):
            return None
        rows.append((by_sample, by_output))
    return rows

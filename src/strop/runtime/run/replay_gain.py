"""Say where a CUDA graph would cost more than it spares.

A graph reads its own memory and writes to its own, so that arguments are copied in and results out:
each is there twice, and moved once more, but for large results that nobody keeps for long
(``handed_results.py``). What it spares is the host's time for launches, which nobody waits for
where the GPU is at work for much longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strop.runtime.run.handed_results import handed_of
from strop.runtime.run.ready_results import places_of
from strop.runtime.run.shape_plan import ShapePlan

if TYPE_CHECKING:
    from strop.runtime.run.executor import Bound

# Of the host, for a step: 3.0 ms for GPT-2's 110 on a Xeon, the look at the module, results and
# libraries' own host time among it. A launch alone takes 5 to 9.
LAUNCH_US = 27.0
# How many times as long as the host the GPU must take, by the costs of calls alone: hosts differ.
MARGIN = 2.0
LEAST_BYTES = 32 << 20  # of what is copied: 20 us, and less than what torch's own rounding costs


def reason_against(plan: ShapePlan, *, hands_over: bool = True) -> str:
    """Return why this is to be run step by step, or nothing. Unless the graph ``hands_over`` large
    results it copies them."""
    if plan.program.device != "cuda":
        return ""
    handed = handed_of(plan) if hands_over else {}
    at = places_of(plan)
    results = [number for number, _ in plan.results if at.get(number) not in handed]
    numbers = [*plan.arguments, *results]
    copied_bytes = sum(map(plan.sizes.bytes_of, numbers))
    if copied_bytes < LEAST_BYTES:
        return ""
    gpu_us, host_us = _times_of(plan)
    if gpu_us < MARGIN * host_us:
        return ""
    return (
        f"the GPU takes some {gpu_us / 1e3:.1f} ms, the host {host_us / 1e3:.1f} for its launches,"
        f" and {copied_bytes / 2**20:.0f} MiB of arguments and results would be there twice"
    )


def reason_against_step(bounds: Sequence[Bound], kept_bytes: int) -> str:
    """Return why forward and backward of a training step are to be run step by step, or nothing.
    Their graphs keep ``kept_bytes`` between calls."""
    if reasons := [bound.against_keeping for bound in bounds if bound.against_keeping]:
        return reasons[0]
    if kept_bytes < LEAST_BYTES:
        return ""
    gpu_us, host_us = map(sum, zip(*(_times_of(bound.plan) for bound in bounds), strict=True))
    if gpu_us < MARGIN * host_us:
        return ""
    return (
        f"the GPU takes some {gpu_us / 1e3:.1f} ms, the host {host_us / 1e3:.1f} for its launches,"
        f" and {kept_bytes / 2**20:.0f} MiB would be kept between calls"
    )


def _times_of(plan: ShapePlan) -> tuple[float, float]:
    """Return the microseconds that calls take on the GPU, and all steps on the host."""
    late = [position for position in plan.order.late if plan.order.steps[position] is not None]
    costs = (plan.choices[position].cost_us for position in late if position in plan.choices)
    return sum(us for us in costs if math.isfinite(us)), LAUNCH_US * len(late)

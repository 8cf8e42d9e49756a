"""Say how large tensors may be for what counts their elements in 32 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strop.ir.program import Program

INDEX_LIMIT = 2**31
MOST_FACTOR = 8  # by which the text of a kernel multiplies a scalar


def looks_too_far(program: Program, env: Mapping[str, int]) -> bool:
    """Tell whether an index is into a dim that has more elements than places can count: these have
    32 bits on both devices."""
    sizes = (size for step in program.kernel_steps for size in step.looked_up)
    return any(size.eval(env) >= INDEX_LIMIT for size in sizes)


def needs_wide_indices(scalars: Sequence[int], numels: Sequence[int]) -> bool:
    """Tell whether a Triton kernel meets more elements than it can count in 32 bits, as it flattens
    axes into one id. It has a variant with 64."""
    return max([*numels, *(value * MOST_FACTOR for value in scalars)], default=0) >= INDEX_LIMIT

"""Count what a program decodes of weights kept in another type: it goes through working memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

from strop.ir.program import Program
from strop.runtime.loop.hoisting import dequantised, read_by, written

Sizes = Mapping[str, int]


def decoded_bytes(program: Program, sizes: Sizes) -> int:
    """Return the bytes of all that a call at these sizes makes of such weights alone, and
    writes."""
    return sum(_decoded(program, sizes).values())


def most_decoded_bytes(program: Program, sizes: Sizes) -> int:
    """Return the most of these that are wanted at one time."""
    held, ends = _decoded(program, sizes), dict[int, int]()
    steps = program.at(sizes)
    for place, step in enumerate(steps):
        ends.update(dict.fromkeys(held.keys() & {*read_by(step), *written(step)}, place))
    most = 0
    alive = set[int]()
    for place, step in enumerate(steps):
        alive |= held.keys() & set(written(step))
        most = max(most, sum(held[n] for n in alive))
        alive = {n for n in alive if ends[n] > place}
    return most


def _decoded(program: Program, sizes: Sizes) -> dict[int, int]:
    """Return the buffers of such values that have memory at these sizes, with their bytes."""
    found = {}
    for number in dequantised(program, program.at(sizes)):
        buffer = program.buffers[number]
        found[number] = math.prod(s.eval(sizes) for s in buffer.shape) * buffer.dtype.itemsize
    return found

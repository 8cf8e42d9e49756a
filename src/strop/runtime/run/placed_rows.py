"""Calls that write rows (M, N) write them into a place of more dims.

A place in a join keeps the dims of its value where its rows have no distance of their own at all
sizes: those of a text and a picture, one behind the other, (B, S, N), of which one picture's lie
side by side, and those of several do not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import Tensor

from strop.ir.ops import OF_ROWS
from strop.ir.program import CallStep
from strop.runtime.run.library_calls import OutCall

# A copy reads and writes what a picture's product writes; a launch takes a GPU as long as this.
LAUNCH_BYTES = 15 << 20


def has_rows(step: CallStep) -> bool:
    """Tell whether a call writes into what has its own dims: (M, N), where it writes rows."""
    return step.place is None or step.op not in OF_ROWS or len(step.place.shape) == 2


def by_rows(call: OutCall, library: OutCall) -> OutCall:
    """Return the call that writes into a place (..., N) as ``call`` writes into rows (M, N), and a
    ``library`` into those of each picture, or all that is copied, where rows have no single
    distance. Values are those of ``call`` but for the number of rows, by which a library chooses
    its kernel."""

    def run(inputs: Sequence[Tensor], out: Tensor) -> None:
        if (rows := _rows(out)) is not None:
            call(inputs, rows)
        elif _pays_apart(out):
            x, *others = inputs
            for picture, place in zip(x.chunk(len(out)), out, strict=True):
                library([picture, *others], place)
        else:
            rows = out.new_empty(math.prod(out.shape[:-1]), out.shape[-1])
            call(inputs, rows)
            out.copy_(rows.view(out.shape))

    return run


def _pays_apart(out: Tensor) -> bool:
    """Tell whether launches for the pictures of (B, S, N) take less than a copy of all."""
    copied = 2 * out.numel() * out.element_size()
    return out.dim() == 3 and (len(out) - 1) * LAUNCH_BYTES < copied


def _rows(place: Tensor) -> Tensor | None:
    """View (..., N) as (M, N), if its rows have one distance."""
    *sizes, columns = place.shape
    steps = [(n, step) for n, step in zip(sizes, place.stride(), strict=False) if n != 1]
    for (_, outer), (size, inner) in itertools.pairwise(steps):
        if outer != size * inner:
            return None
    distance = steps[-1][1] if steps else columns
    return place.as_strided((math.prod(sizes), columns), (distance, place.stride(-1)))

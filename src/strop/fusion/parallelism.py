"""Decide which reductions are cut into parts, so that no kernel leaves its device empty.

A ROW kernel is one launch that reads memory once, but each row is the work of one program, and a
program moves no more than its own multiprocessor can: T5-large's encoder looked for infinities in a
tensor of 1 MB by one program, in 280 us. A COLUMN kernel cuts each row into slabs and combines what
these have found; what follows is a kernel of its own, with as many programs as it likes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strop.ir.dims import Expr, const

ONE = const(1)
LAUNCH_BYTES = 1 << 20  # an H100 moves so much in a third of a microsecond, a launch takes two


@dataclass(frozen=True, slots=True)
class Workers:
    """Say how many rows keep a kind of device busy. One plan serves all devices of the kind.

    ``busy``: rows that are as good as any number. ``wide``: rows that are so too where one program
    ``holds`` a whole one. ``whole``: elements that one program reduces as fast as several do, where
    their number is known; where it is not, ``cuts_unknown`` says whether a reduction is cut.
    ``launch``: how many instructions for an element, over all elements, take as long as a launch.
    """

    busy: int
    wide: int
    holds: int
    whole: int
    cuts_unknown: bool
    launch: int


# The H100 has 132 multiprocessors. LayerNorm of 32 rows of 40,960 in fp16, each held by 32 warps,
# moves 1.5 TB/s, half of what memory has; a second kernel would cost what the other half saves.
# Longer rows are swept several times at 25 GB/s a program.
GPU = Workers(busy=128, wide=32, holds=49152, whole=8192, cuts_unknown=True, launch=1 << 26)
# Four cores use most of a memory's bandwidth, and a core's cache holds a MB. A launch is cheap, but
# softmax in parts takes each exponential twice, so traced sizes decide.
CPU = Workers(busy=4, wide=4, holds=1 << 18, whole=1 << 18, cuts_unknown=False, launch=1 << 19)


def workers_of(device: str) -> Workers:
    return CPU if device == "cpu" else GPU


def is_cut(
    rows: Expr, length: Expr, itemsize: int, hints: Mapping[str, int], workers: Workers
) -> bool:
    """Tell whether reductions of ``length`` elements, ``rows`` of them, are cut into parts.

    Traced sizes decide where both may change. Where the rows are known to be few and their length
    may be anything, they are cut on a GPU: in parts a short row loses microseconds, by one program
    a long one loses milliseconds.
    """
    if workers.cuts_unknown and rows.is_const and not length.is_const:
        return rows.value < workers.wide
    num_rows, num_cols = rows.eval(hints), length.eval(hints)
    if rows == ONE:
        return num_cols > workers.whole
    if num_cols > workers.holds:
        return num_rows < workers.busy
    return num_rows < workers.wide and num_rows * num_cols * itemsize > LAUNCH_BYTES

"""Describe rows of sums of products of int8 codes that a generated kernel on a CPU makes itself.

Such a kernel reads sums (M, N) at one row after the other. It multiplies some rows at a time by a
weight that is packed before them, and what it does with them follows while they lie in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from strop.ir.dims import const
from strop.ir.source import Scratch

ROWS = 24  # of a panel, as ``codegen/rt/code_sums.h`` has them
HEAD = 16  # words in front of a weight that is packed once: as many bytes as vectors are wide
LANES = 16  # of the widest vectors, to whose multiples columns are padded
MOST_BYTES = 1 << 19  # of a panel and its codes, on the stack of a thread, which may have 2 MiB


@dataclass(frozen=True, slots=True)
class CodePanel:
    """Describe a param that holds codes (M, ``depth``), of which a kernel reads sums (M,
    ``columns``). ``weight`` is the param with the codes (``columns``, ``depth``) of the weight, and
    ``zeros`` that with its zero points, if it has any. ``zero`` is that of the values."""

    columns: int
    depth: int
    weight: int
    zero: int = 0
    zeros: int | None = None

    @property
    def scratch(self) -> tuple[Scratch, Scratch]:
        """Return the memory of the packed weight: that in which it stays, behind what says of which
        bits it is, and that of a call of many rows."""
        words = packed_words(self.columns, self.depth)
        stays = Scratch(torch.int32, const(HEAD + words), zeroed=True, packs=self.weight)
        return stays, Scratch(torch.int32, const(words))

    @property
    def stack_bytes(self) -> int:
        """Return the memory of one panel: sums, and copied codes."""
        return 4 * ROWS * (_padded(self.columns) + row_words(self.depth))


def _padded(columns: int) -> int:
    return -(-columns // LANES) * LANES


def packed_words(columns: int, depth: int) -> int:
    """Return the words of 4 bytes that a packed weight takes at most."""
    return _padded(columns) * (depth // 2 + 3)


def row_words(depth: int) -> int:
    """Return the words of 4 bytes that a copied row of codes takes at most."""
    return depth // 2 + 1


@lru_cache
def header() -> str:
    """Return the text of the kernel that all of them call: the compiler takes the form of the
    processor."""
    package = Path(__file__).parents[1]
    return "\n".join((package / name).read_text() for name in _TEXTS)


_TEXTS = (
    "kernels/packed/fingerprint.h",
    "codegen/rt/code_sums_arm.h",
    "codegen/rt/code_sums.h",
    "codegen/rt/kept_codes.h",
)

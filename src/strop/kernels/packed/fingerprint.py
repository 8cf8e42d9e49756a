"""Tell by a number of 64 bits whether a weight holds the same bits as before.

torch counts no write that goes through ``.data``, NumPy or a kernel of somebody else's, so what is
kept beside a weight from call to call can only be compared with its bits. ``fingerprint.h`` reads
them once, at the speed of memory.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from strop.ir.source import KernelSource

SHARE_BYTES = 256 << 10  # as fingerprint.h has it
_NAME = "fingerprint_of_memory"


@lru_cache
def source() -> KernelSource:
    """Return the kernel: pointers to the memory and to ``num_words`` of 64 bits, of which the first
    is the number, and the bytes that are read."""
    text = (
        f'#include "vmath.h"\n\n{Path(__file__).with_name("fingerprint.h").read_text()}\n'
        f'extern "C" void {_NAME}(void* const* buffers, const int64_t* scalars) {{\n'
        "  fingerprint::of_memory((const char*)buffers[0], (uint64_t*)buffers[1], scalars[0]);\n"
        "}\n"
    )
    return KernelSource(_NAME, "cpp", text, (torch.uint8, torch.int64), scalars=(1,))


def num_words(size_bytes: int) -> int:
    """Return for how many numbers the kernel has to have room."""
    return 1 + -(-size_bytes // SHARE_BYTES)

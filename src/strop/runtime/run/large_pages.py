"""Have Linux put weights on pages of 2 MB, so that reads at random places find their addresses.

A table of 286 MB lies on 70,000 pages of 4 KB, and a core knows the places of some 2,000 at a time.
``madvise(MADV_COLLAPSE)`` (Linux 6.1, https://man7.org/linux/man-pages/man2/madvise.2.html) copies
them to large pages at once: 0.04 to 0.7 s for such a table. Memory that forked processes share is
there once for each of them then.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from torch import Tensor

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_COLLAPSE = 25  # of asm-generic/mman-common.h


class LargePages:
    """Ask for large pages, and say what has come of it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.refusal = ""  # of the latest piece that stays on small pages
        self._asked = set[tuple[int, int]]()

    def ask(self, tensors: Iterable[Tensor | None]) -> None:
        """Put tensors of the CPU on large pages, as far as they fill some, each once."""
        for tensor in tensors:
            if tensor is None or tensor.device.type != "cpu" or not tensor.nbytes:
                continue
            memory = tensor.untyped_storage()
            place = memory.data_ptr(), memory.nbytes()
            if place not in self._asked:
                self._asked.add(place)
                self._ask(*place)

    def _ask(self, start: int, num_bytes: int) -> None:
        page = page_bytes()
        if not page:
            self.refusal = "this system has no large pages"
            return
        first, end = -(-start // page) * page, (start + num_bytes) // page * page
        if end <= first:
            return
        if reason := _collapse(first, end - first):
            self.refusal = reason
        else:
            self.num_bytes += end - first

    def __str__(self) -> str:
        found = f"{self.num_bytes / 1e6:.0f} MB of weights are on large pages"
        refused = f"some are on small ones, as Linux says: {self.refusal}"
        return f"{found}; {refused}" if self.refusal else found


@cache
def page_bytes() -> int:
    """Return the bytes of a large page, or 0 where there are none."""
    return int(_SIZE.read_text()) if sys.platform == "linux" and _SIZE.is_file() else 0


def _collapse(start: int, num_bytes: int) -> str:
    """Put memory on large pages; return why that cannot be, or nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), _COLLAPSE)
    return os.strerror(ctypes.get_errno()) if found else ""

"""Memory of the host from which a GPU copies at full speed, and beside other work.

torch's own pinned memory comes in powers of two: 24 GB of weights would take 32.
"""

from __future__ import annotations

import logging
import mmap
import weakref

import torch
from torch import Tensor

log = logging.getLogger("strop")
_FOR_ALL_GPUS = 1  # cudaHostRegisterPortable: not for the current one alone


def pinned(size_bytes: int, *, for_gpu: bool) -> Tensor:
    """Return so many bytes of zeros, whose pages stay in memory if ``for_gpu``. Where the system
    allows no more of these, copies from them are slow, which the log says."""
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, size_bytes)
    flat = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages
    if for_gpu:
        cudart, address = torch.cuda.cudart(), flat.data_ptr()
        error = cudart.cudaHostRegister(address, size_bytes, _FOR_ALL_GPUS)
        if int(error):
            log.warning(
                "%.2f GB of weights lie in memory of the host that could not be pinned (%s), from"
                " which a GPU copies slowly",
                size_bytes / 1e9,
                error,
            )
        else:
            end = weakref.finalize(pages, cudart.cudaHostUnregister, address)
            end.atexit = False
    return flat


def give_back_cached() -> None:
    """Have torch give back the pinned memory that it keeps for later, where its edition can."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    if empty is not None:
        empty()

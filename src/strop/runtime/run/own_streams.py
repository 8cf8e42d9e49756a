"""Make streams of a GPU that nobody else is given.

torch hands out the same 32 streams again and again. What it keeps for one of them, such as cuBLAS's
workspace, may then be older than our use of it, and lie in memory that others get some day
(``library_workspaces.py``).
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict

import torch

from strop.runtime.build import driver

_NON_BLOCKING = 1  # it does not wait for the default stream, as torch's streams do not
_FREE = defaultdict[torch.device, list[torch.cuda.ExternalStream]](list)
_LOCK = threading.Lock()


def own_stream(owner: object, device: torch.device) -> torch.cuda.ExternalStream:
    """Return a stream for ``owner`` alone. It never ends, since torch keeps things for it: when the
    owner does, the next one gets it. Raises CodegenError where the driver makes none."""
    with _LOCK:
        free = _FREE[device]
        stream = free.pop() if free else _made(device)
    weakref.finalize(owner, free.append, stream).atexit = False
    return stream


def _made(device: torch.device) -> torch.cuda.ExternalStream:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.mem_get_info()  # the runtime has this thread's driver use the GPU's context
        driver.call("making a stream", "cuStreamCreate", ctypes.byref(handle), _NON_BLOCKING)
    assert handle.value is not None
    return torch.cuda.ExternalStream(handle.value, device)

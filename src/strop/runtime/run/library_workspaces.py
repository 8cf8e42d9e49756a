"""Hold the memory that cuBLAS works in while a captured graph is replayed.

torch gives each pair of a cuBLAS handle, which a thread has, and a stream a workspace: 32 MiB on a
Hopper. A graph that was captured writes to it in every replay, but torch frees the workspaces of
all streams at once when somebody asks for it, as Inductor does whenever it captures a CUDA graph
(``clear_cublas_manager`` in torch/_inductor/cudagraph_trees.py). A replay would then write to
what lies there by now. The stream must be one that nobody had before (``own_streams.py``): a
workspace that is there already lies in memory of torch's.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

_WIDTH = 16  # of the products: the least that cuBLASLt takes


class LibraryWorkspaces:
    """Have the workspaces of one GPU in a pool of memory that nothing else comes from, and that
    stays. What is freed there is given to the next workspace alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):  # a pool is one of the device that is current
            self._pool = torch.cuda.MemPool()
        with torch.inference_mode(False):
            made = torch.zeros(3, _WIDTH, _WIDTH, dtype=torch.float16, device=device)
        self._given, self._other, self._result = made.unbind()

    def hold(self) -> None:
        """Have the workspaces of this thread and the current stream, which must not be captured.

        torch gives out that of cuBLAS with the handle, and that of cuBLASLt, where it has its own,
        with the first product. None is made under ``torch.use_deterministic_algorithms``, which may
        refuse it.
        """
        with torch.no_grad(), torch.cuda.use_mem_pool(self._pool, self._device):
            torch.cuda.current_blas_handle()
            if not torch.are_deterministic_algorithms_enabled():
                torch.addmm(self._given[0], self._given, self._other, out=self._result)

    def hold_for_training(self) -> None:
        """Do so for the thread of backward passes as well, which has a handle of its own."""
        self.hold()
        with torch.inference_mode(False), torch.enable_grad():
            leaf = self._given[0].detach().requires_grad_()
            _Held.apply(leaf, self).sum().backward()  # type: ignore[no-untyped-call]


class _Held(torch.autograd.Function):
    """Hold workspaces in the backward pass."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, workspaces: LibraryWorkspaces) -> Tensor:
        ctx.workspaces = workspaces
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.workspaces.hold()
        return grads[0], None


_OF_DEVICES: dict[torch.device, LibraryWorkspaces] = {}
_LOCK = threading.Lock()


def library_workspaces(device: torch.device) -> LibraryWorkspaces:
    """Return those of a GPU, which all graphs share: torch hands out one stream to many."""
    with _LOCK:
        if device not in _OF_DEVICES:
            _OF_DEVICES[device] = LibraryWorkspaces(device)
        return _OF_DEVICES[device]

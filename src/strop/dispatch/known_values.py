"""Remember the values of tensors bit by bit, and tell whether they are others.

Nobody counts what is written through ``.data``. A GPU compares beside the work that is launched
meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KnownValues:
    """Remember the values of tensors, bit by bit."""

    def __init__(self, tensors: list[Tensor]) -> None:
        kinds = dict.fromkeys((t.dtype, t.device) for t in tensors)
        self._groups = [
            KnownGroup([t for t in tensors if (t.dtype, t.device) == kind]) for kind in kinds
        ]

    def begin(self) -> None:
        for group in self._groups:
            group.begin()

    def differ(self) -> bool:
        """Tell whether a tensor has other values than when this was made."""
        answers = [group.differs() for group in self._groups]  # of all: each has begun
        return any(answers)


class KnownGroup:
    """Remember tensors of one type and device. They are compared on a stream of their own, so that
    nobody waits for what is launched meanwhile."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._known, parts = _room_for(tensors)
        self._now, self._parts = _room_for(tensors)
        torch._foreach_copy_(parts, tensors)
        self._done: torch.cuda.Event | None = None
        self._is_on_gpu = self._known.device.type == "cuda"
        if self._is_on_gpu:
            self._stream = torch.cuda.Stream(self._known.device)
            self._stream.wait_stream(torch.cuda.current_stream(self._known.device))
            self._answer = torch.zeros((), dtype=torch.bool, pin_memory=True)

    @torch.no_grad()
    def begin(self) -> None:
        """Compare them, as they are for work that is launched from here on. Nothing is compared
        while the caller captures a CUDA graph."""
        if not self._is_on_gpu or torch.cuda.is_current_stream_capturing():
            return
        device = self._known.device
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            torch._foreach_copy_(self._parts, self._tensors)
            self._answer.copy_((self._now != self._known).any(), non_blocking=True)
            self._done = self._stream.record_event()

    @torch.no_grad()
    def differs(self) -> bool:
        if self._is_on_gpu:
            if self._done is None:
                self.begin()
            done, self._done = self._done, None
            if done is None:
                return False
            done.synchronize()
            return bool(self._answer)
        with torch.inference_mode(False):
            torch._foreach_copy_(self._parts, self._tensors)
            return not torch.equal(self._now, self._known)


def _room_for(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return memory for all tensors as whole numbers, and the parts of it for each."""
    sizes = [t.numel() for t in tensors]
    flat = tensors[0].new_zeros(-(-sum(sizes) // 8) * 8)
    parts = flat[: sum(sizes)].split(sizes)
    shaped = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
    return flat.view(torch.int64), shaped

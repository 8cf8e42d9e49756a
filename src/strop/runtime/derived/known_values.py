"""Remember the values of tensors bit by bit, and tell whether they are others.

Nobody counts what is written through ``.data``. A GPU compares beside the work that is launched
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.runtime.derived.sources import Watch

SHARE_BYTES = 32 << 20  # what a GPU compares at once: it stays in the cache of an H100
WORD = 8  # bytes, and numbers of any type that are whole words together
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class KnownValues(Watch):
    """Remember what tensors hold, in the memory that they lie in now."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        kinds = dict.fromkeys((t.dtype, t.device) for t in tensors)
        groups = ([t for t in tensors if (t.dtype, t.device) == kind] for kind in kinds)
        self._groups = [
            KnownOnGpu(group) if group[0].device.type == "cuda" else KnownOnHost(group)
            for group in groups
        ]
        self.size_bytes = sum(group.size_bytes for group in self._groups)

    def begin(self) -> None:
        for group in self._groups:
            group.begin()

    @torch.no_grad()
    def differs(self) -> bool:
        answers = [group.differs() for group in self._groups]  # of all: each has begun
        return any(answers)


class KnownOnHost(Watch):
    """Remember tensors of one type and device, which are compared one by one."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        sizes = [-(-tensor.numel() // WORD) * WORD for tensor in tensors]
        known = tensors[0].new_empty(sum(sizes))
        parts = [
            part[: tensor.numel()].view(tensor.shape)
            for part, tensor in zip(known.split(sizes), tensors, strict=True)
        ]
        torch._foreach_copy_(parts, list(tensors))
        self._pairs = list(map(_as_integers, tensors, parts))
        self.size_bytes = known.nbytes

    def differs(self) -> bool:
        with torch.inference_mode(False):
            return not all(torch.equal(now, then) for now, then in self._pairs)


@dataclass(frozen=True, slots=True)
class Share:
    """Describe tensors that are compared at once: ``room`` for what they hold is all of ``now``."""

    tensors: list[Tensor]
    room: list[Tensor]
    now: Tensor
    known: Tensor


class KnownOnGpu(Watch):
    """Remember tensors of one type and GPU. They are compared share by share, in the same scratch
    memory, on a stream of their own, so that nobody waits for what is launched meanwhile."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        device = tensors[0].device
        shares = [_in_words(some) for some in _shares(tensors)]
        totals = [sum(tensor.numel() for tensor in some) for some in shares]
        scratch = tensors[0].new_empty(max(totals))
        known = tensors[0].new_empty(sum(totals))
        self._shares = []
        for some, total, kept in zip(shares, totals, known.split(totals), strict=True):
            torch._foreach_copy_(_parts(kept, some), some)
            now = scratch[:total].view(torch.int64)
            self._shares.append(Share(some, _parts(scratch, some), now, kept.view(torch.int64)))
        self.size_bytes = known.nbytes + scratch.nbytes
        self._done: torch.cuda.Event | None = None
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        for memory in (known, scratch):  # nobody gets it while it may be in use
            memory.record_stream(self._stream)
        self._answer = torch.zeros((), dtype=torch.bool, pin_memory=True)

    @torch.no_grad()
    def begin(self) -> None:
        """Compare them, as they are for work that is launched from here on. Nothing is compared
        while the caller captures a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            found = list(map(_differs, self._shares))
            answer = torch.stack(found).any() if len(found) > 1 else found[0]
            self._answer.copy_(answer, non_blocking=True)
            self._done = self._stream.record_event()

    def differs(self) -> bool:
        if self._done is None:
            self.begin()
        done, self._done = self._done, None
        if done is None:
            return False
        done.synchronize()
        return bool(self._answer)


def _differs(share: Share) -> Tensor:
    torch._foreach_copy_(share.room, share.tensors)
    return (share.now != share.known).any()


def _shares(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut them into shares of no more than ``SHARE_BYTES``, but for a tensor that is larger."""
    share, size_bytes = list[Tensor](), 0
    for tensor in tensors:
        if share and size_bytes + tensor.nbytes > SHARE_BYTES:
            yield share
            share, size_bytes = [], 0
        share.append(tensor)
        size_bytes += tensor.nbytes
    yield share


def _in_words(tensors: list[Tensor]) -> list[Tensor]:
    """Add zeros, so that all together are whole words."""
    missing = -sum(tensor.numel() for tensor in tensors) % WORD
    return [*tensors, tensors[0].new_zeros(missing)] if missing else tensors


def _parts(memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of memory that are for these tensors, one behind the other."""
    sizes = [tensor.numel() for tensor in tensors]
    pieces = memory[: sum(sizes)].split(sizes)
    return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]


def _as_integers(now: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as whole numbers, in words where they lie so: those are compared sooner."""
    first = now.storage_offset() * now.itemsize
    if now.is_contiguous() and not (now.nbytes % WORD or first % WORD):
        return now.view(-1).view(torch.int64), known.view(-1).view(torch.int64)
    kind = _INTEGERS[now.itemsize]
    return now.view(kind), known.view(kind)

"""Remember the values of tensors bit by bit, and tell whether they are others.

Nobody counts what is written through ``.data``. A GPU compares beside the work that is launched
meanwhile. What tensors hold now is copied to scratch memory, as much at once as stays in a cache.
Tensors without gaps are concatenated: that keeps a GPU busy, while a copy of each into its part
of the scratch memory (``_foreach_copy_``) has programs for a fraction of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.runtime.derived.sources import SourceWatch

SHARE_BYTES = {"cuda": 32 << 20, "cpu": 1 << 18}  # that are compared at once
WORD = 8  # bytes, and numbers of any type that are whole words together


class KnownValues(SourceWatch):
    """Remember what tensors hold, in the memory that they lie in now."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        kinds = dict.fromkeys((t.dtype, t.device) for t in tensors)
        self._groups = [
            KnownGroup([t for t in tensors if (t.dtype, t.device) == kind]) for kind in kinds
        ]
        self.size_bytes = sum(group.size_bytes for group in self._groups)

    def begin(self) -> None:
        for group in self._groups:
            group.begin()

    def differs(self) -> bool:
        answers = [group.differs() for group in self._groups]  # of all: each has begun
        return any(answers)


@dataclass(frozen=True, slots=True)
class Share:
    """Describe tensors that are compared at once. ``now`` is room for what they hold, and ``known``
    what they held: those without gaps, ``dense``, then those with gaps, each with its room."""

    dense: list[Tensor]
    others: list[Tensor]
    dense_room: Tensor
    other_rooms: list[Tensor]
    now: Tensor
    known: Tensor

    @staticmethod
    def of(tensors: list[Tensor], scratch: Tensor, known: Tensor) -> Share:
        """Describe these, and remember in ``known`` what they hold."""
        dense = [tensor.view(-1) for tensor in tensors if tensor.is_contiguous()]
        others = [tensor for tensor in tensors if not tensor.is_contiguous()]
        room = scratch[: known.numel()]
        behind = sum(tensor.numel() for tensor in dense)
        rooms = _parts(room[behind:], others)
        words = (memory.view(torch.int64) for memory in (room, known))
        share = Share(dense, others, room[:behind], rooms, *words)
        share.read()
        share.known.copy_(share.now)
        return share

    def read(self) -> None:
        """Copy what the tensors hold now."""
        if self.dense:
            torch.cat(self.dense, out=self.dense_room)
        if self.others:
            torch._foreach_copy_(self.other_rooms, self.others)


class KnownGroup(SourceWatch):
    """Remember tensors of one type and device. A GPU compares them on a stream of their own, so
    that nobody waits for what is launched meanwhile."""

    def __init__(self, tensors: list[Tensor]) -> None:
        device = tensors[0].device
        shares = [_in_words(some) for some in _shares(tensors, SHARE_BYTES[device.type])]
        totals = [sum(tensor.numel() for tensor in some) for some in shares]
        scratch, known = (tensors[0].new_empty(size) for size in (max(totals), sum(totals)))
        self.size_bytes = scratch.nbytes + known.nbytes
        kept = known.split(totals)
        self._shares = [
            Share.of(some, scratch, own) for some, own in zip(shares, kept, strict=True)
        ]
        self._done: torch.cuda.Event | None = None
        self._is_on_gpu = device.type == "cuda"
        if self._is_on_gpu:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            for memory in (scratch, known):  # nobody gets it while it may be in use
                memory.record_stream(self._stream)
            self._answer = torch.zeros((), dtype=torch.bool, pin_memory=True)

    @torch.no_grad()
    def begin(self) -> None:
        """Compare them, as they are for work that is launched from here on. Nothing is compared
        while the caller captures a CUDA graph."""
        if not self._is_on_gpu or torch.cuda.is_current_stream_capturing():
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            found = []
            for share in self._shares:
                share.read()
                found.append((share.now != share.known).any())
            answer = torch.stack(found).any() if len(found) > 1 else found[0]
            self._answer.copy_(answer, non_blocking=True)
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
            return any(map(_differs, self._shares))


def _differs(share: Share) -> bool:
    share.read()
    return not torch.equal(share.now, share.known)


def _shares(tensors: Sequence[Tensor], most_bytes: int) -> Iterator[list[Tensor]]:
    """Cut them into shares of no more bytes than that, but for a tensor that is larger."""
    share, size_bytes = list[Tensor](), 0
    for tensor in tensors:
        if share and size_bytes + tensor.nbytes > most_bytes:
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

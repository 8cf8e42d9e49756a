"""Remember the values of tensors bit by bit, and tell whether they are others.

Nobody counts what is written through ``.data``. A GPU compares beside the work that is launched
meanwhile. What tensors hold now is copied to scratch memory, as much at once as stays in a cache.
Tensors without gaps are concatenated: that keeps a GPU busy, while a copy of each into its part
of the scratch memory has programs for a fraction of it. So are tensors with gaps that have the same
dims but for the first, such as the first numbers of each row of many weights: torch launches one
kernel for 64 of them.
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
    what they held. ``pieces``: tensors that are concatenated along their first dim, each list with
    its room."""

    pieces: list[tuple[list[Tensor], Tensor]]
    now: Tensor
    known: Tensor

    @staticmethod
    def of(tensors: list[Tensor], scratch: Tensor, known: Tensor) -> Share:
        """Describe these, and remember in ``known`` what they hold."""
        room = scratch[: known.numel()]
        words = (memory.view(torch.int64) for memory in (room, known))
        share = Share([*_pieces(room, tensors)], *words)
        share.read()
        share.known.copy_(share.now)
        return share

    def read(self) -> None:
        """Copy what the tensors hold now."""
        for tensors, room in self.pieces:
            torch.cat(tensors, out=room)


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


def _pieces(memory: Tensor, tensors: list[Tensor]) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield the tensors that are concatenated at once, with the part of memory that is for them:
    those without gaps, and those with gaps by their dims behind the first."""
    alike: dict[torch.Size, list[Tensor]] = {}
    for tensor in tensors:
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor
        alike.setdefault(flat.shape[1:], []).append(flat)
    begin = 0
    for dims, some in alike.items():
        length = sum(len(tensor) for tensor in some)
        end = begin + length * dims.numel()
        yield some, memory[begin:end].view(length, *dims)
        begin = end

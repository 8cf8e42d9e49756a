"""Remember tensors by sums of their bits, and tell whether they are others.

Nobody counts what is written through ``.data``, and a second copy to compare with would take as
much memory as the tensors do. Their bytes are read as matrices of whole numbers, of which the sums
of all columns and of all rows are kept, on a GPU a thousandth of their size: whoever changes one
number changes one sum of each. A GPU takes the sums beside the work that is launched meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

SHARE_BYTES = {"cuda": 32 << 20, "cpu": 1 << 20}  # that are read at once
COLUMNS, WORD = 1024, 8  # of a matrix of whole numbers of so many bytes


class KnownSums:
    """Remember what tensors of one device hold, in whatever memory they lie."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device
        self._known: Tensor | None = None

    def mark(self) -> torch.cuda.Event | None:
        """Return the moment before what is launched from here on, for ``differs``."""
        if self._stream is None:
            return None
        stream: torch.cuda.Stream = torch.cuda.current_stream(self._device)
        found: torch.cuda.Event = stream.record_event()
        return found

    def note(self, tensors: Sequence[Tensor]) -> None:
        """Remember these as they are for work that is launched from here on."""
        with torch.inference_mode(False), torch.no_grad():
            self._known = sums_of(tensors)

    def differs(self, tensors: Sequence[Tensor], since: torch.cuda.Event | None) -> bool:
        """Tell whether these hold something else than those that were noted. A GPU waits for what
        was launched before ``since`` alone, and the host for the sums."""
        if self._known is None:
            return True
        with torch.inference_mode(False), torch.no_grad():
            if self._stream is None:
                return not _equal(sums_of(tensors), self._known)
            assert since is not None
            self._stream.wait_event(since)
            with torch.cuda.stream(self._stream):
                return not _equal(sums_of(tensors), self._known)

    def forget(self) -> None:
        self._known = None


def _equal(now: Tensor, known: Tensor) -> bool:
    return now.shape == known.shape and torch.equal(now, known)


def sums_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sums of tensors of one device, (n,) whole numbers on it. They depend on the order
    in which elements lie in memory, and on that of the tensors."""
    found = [_sums(share) for share in _shares(tensors)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def _shares(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield them as bytes, some at once: no more than fit, but for one that is larger."""
    share, size_bytes = list[Tensor](), 0
    for tensor in tensors:
        if share and size_bytes + tensor.nbytes > SHARE_BYTES[tensor.device.type]:
            yield share
            share, size_bytes = [], 0
        share.append(_bytes(tensor))
        size_bytes += tensor.nbytes
    if share:
        yield share


def _sums(share: Sequence[Tensor]) -> Tensor:
    missing = -sum(part.numel() for part in share) % (COLUMNS * WORD)
    flat = torch.cat([*share, share[0].new_zeros(missing)])
    numbers = flat.view(torch.int64).view(-1, COLUMNS)
    return torch.cat([numbers.sum(0), numbers.sum(1)])


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, in the order of memory where it has no gaps."""
    dense = tensor.detach()
    if not dense.is_contiguous() and dense.dim() > 1:
        steps = dense.stride()
        order = sorted(range(dense.dim()), key=lambda dim: (-steps[dim], dim))
        dense = dense.permute(order)
    return dense.contiguous().view(-1).view(torch.uint8)

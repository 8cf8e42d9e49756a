"""Put weights where a program wants them in memory: those that it reads as one lie in one piece.

Merged weights are one piece of memory whose row slices are the Parameters: whoever writes to a
Parameter writes to the piece, so that nothing but another place of a part is to be noticed. So is a
weight with rows of zeros behind it (``passes.aligned_linear``), a piece of one part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, MutableMapping, Sequence, Set
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from strop.dispatch.cornered_factors import standing
from strop.dispatch.moved_weights import lie_in
from strop.errors import UnsupportedError
from strop.ir.ops import OPS
from strop.ir.program import InputSpec, Program
from strop.runtime.run.layouts import bytes_of, read_as, written_as

MOST_LEFT_BYTES = 512 << 20  # that torch keeps of what Parameters have left


class LeftMemory:
    """Count the memory of a GPU that parts of pieces have left. torch keeps it for later, in blocks
    of their sizes, in which no piece has room: the device gets it back now and then."""

    def __init__(self) -> None:
        self._size_bytes = 0

    def note(self, part: Tensor) -> None:
        """Note that a weight is about to leave its memory for a piece."""
        if not part.is_cuda or torch.cuda.is_current_stream_capturing():
            return
        keep_for_readers(part)
        if self._size_bytes > MOST_LEFT_BYTES:
            torch.cuda.empty_cache()
            self._size_bytes = 0
        self._size_bytes += part.nbytes


def keep_for_readers(weight: Tensor) -> None:
    """Have torch give the memory of a weight, which is about to leave it, to nobody until what
    reads it on this stream is done: torch would give it to another stream, where it is from."""
    if weight.is_cuda and not torch.cuda.is_current_stream_capturing():
        weight.detach().record_stream(torch.cuda.current_stream(weight.device))


class PlacedPieces:
    """Keep the pieces that the programs of one module read, as long as their first rows are still
    where they were."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, int], Tensor] = {}  # by address and bytes
        self.num_writes = 0

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def size_bytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces.values())

    @property
    def most_bytes(self) -> int:
        """Return the bytes of the largest, which lies beside its parts while it is made."""
        return max((piece.nbytes for piece in self._pieces.values()), default=0)

    def shared_bytes(self, weights: Sequence[Tensor]) -> int:
        """Return how many of the bytes lie where weights do."""
        pieces = [*self._pieces.values()]
        return self.size_bytes - (bytes_of([*pieces, *weights]) - bytes_of(weights))

    def add(self, pieces: Sequence[Tensor]) -> None:
        """Keep these from one binding to the next."""
        found = {(t.data_ptr(), t.nbytes): t for t in pieces}
        self.num_writes += len(found.keys() - self._pieces.keys())
        self._pieces |= found

    def keep_at(self, addresses: Collection[int]) -> None:
        """Let go of those of which no part lies at one of these addresses."""
        kept = self._pieces.items()
        self._pieces = {place: t for place, t in kept if place[0] in addresses}

    def clear(self) -> None:
        self._pieces.clear()


def pieces_of(
    inputs: Sequence[InputSpec], placed: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the pieces among what ``place`` gives: weights merged into one, and weights alone with
    zeros behind them. Matrices in which copies of factors stand are none."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for spec, tensor in zip(inputs, placed, strict=False):
        if tensor is not None and spec.merged and not (spec.corners or spec.made):
            found[len(spec.merged) == 1].append(tensor)
    return found


def place(
    program: Program, tensors: Sequence[Tensor], fixed: Set[int] = frozenset()
) -> list[Tensor | None]:
    """Return state arguments as the program wants them in memory, and re-point Parameters where
    needed, but for those whose numbers are ``fixed``.

    Merged weights are one piece of memory whose row slices are the Parameters. What kernels read
    lies as it was traced; on CUDA other convolution weights become channels-last. Values, shapes
    and identity of the Parameters stay.

    Each piece is there beside the weights that it is made of, and no longer: nothing here holds
    what a Parameter has left, so that there is never more than the weights and one piece.
    """
    read = program.read_by_place
    for index, strides in read.items():
        if index < len(tensors):
            _lay_out(tensors[index], program.inputs[index], strides, is_fixed=index in fixed)
    pieces = _pieces(program, tensors)
    if program.device == "cuda":
        for index in _convolution_weights(program) - read.keys() - fixed:
            weight = tensors[index]
            if not weight.is_contiguous(memory_format=torch.channels_last):
                _GIVEN.setdefault(weight, weight.stride())
                keep_for_readers(weight)
                lie_in(weight, weight.data.contiguous(memory_format=torch.channels_last))
    return [*(t.detach() for t in tensors), *pieces]  # where they lie now


def give_back_order(tensors: Sequence[Tensor]) -> None:
    """Have convolution weights lie as they were given. Eager's results are channels-last where
    weights are, and code that views them as rows would fail."""
    for tensor in tensors:
        strides = _GIVEN.pop(tensor, None)
        if strides is None or tensor.stride() == strides or len(strides) != tensor.dim():
            continue
        given = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        keep_for_readers(tensor)
        lie_in(tensor, given.copy_(tensor.detach()))


def _lay_out(tensor: Tensor, spec: InputSpec, strides: tuple[int, ...], *, is_fixed: bool) -> None:
    """Have a weight lie at the strides that it was traced at. Raises UnsupportedError for one that
    cannot be moved."""
    if tensor.dtype == spec.dtype and tensor.stride() == strides:  # as nearly all do
        return
    seen = read_as(tensor.detach(), spec.dtype)
    if _steps_like(seen, strides):
        return
    if is_fixed:
        raise UnsupportedError(
            f"a weight of shape {tuple(tensor.shape)} lies in another weight's memory, in an order"
            " that kernels do not read: give it memory of its own, or share the Parameter itself"
        )
    new = torch.empty_strided(seen.shape, strides, dtype=seen.dtype, device=seen.device)
    new.copy_(seen)
    keep_for_readers(tensor)
    lie_in(tensor, written_as(new, tensor.dtype))


def _pieces(program: Program, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return what stands for the inputs behind the weights: each is made of some of these."""
    left, found = LeftMemory(), list[Tensor | None]()
    for spec in program.inputs[len(tensors) :]:
        parts = [tensors[i] for i in spec.merged]
        if spec.made:  # ``coded_weights`` fills them in
            found.append(None)
        elif spec.corners:
            found.append(standing([size.value for size in spec.shape], parts, spec.corners))
        else:
            found.append(_merged(parts, _rows(spec, parts), left) if parts else None)
    return found


def _steps_like(tensor: Tensor, strides: Sequence[int]) -> bool:
    steps = zip(tensor.stride(), strides, tensor.shape, strict=True)
    return all(a == b or size <= 1 for a, b, size in steps)


def _convolution_weights(program: Program) -> set[int]:
    places = [(step, OPS[step.op].anchor.weight) for step in program.call_steps]
    refs = [step.inputs[place] for step, place in places if place is not None]
    buffers = [program.buffers[ref.buffer] for ref in refs]
    return {b.index for b in buffers if b.kind == "input" and program.inputs[b.index].is_state}


# convolution weight -> the strides that it had when it was given
_GIVEN: MutableMapping[Tensor, tuple[int, ...]] = WeakIdKeyDictionary()

# address of a piece -> what it is a piece of, as long as somebody reads it in one piece
_WHOLES: WeakValueDictionary[tuple[torch.device, int], Tensor] = WeakValueDictionary()


def wholes_among(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the pieces that these weights are parts of."""
    found = (_WHOLES.get((t.device, t.data_ptr())) for t in tensors)
    return list({id(whole): whole for whole in found if whole is not None}.values())


def note_wholes(wholes: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Say of weights that have been moved together which pieces they are parts of."""
    spans = sorted(((w.data_ptr(), w) for w in wholes), key=lambda span: span[0])
    starts = [start for start, _ in spans]
    for tensor in tensors:
        address = tensor.data_ptr()
        place = bisect_right(starts, address) - 1
        if place >= 0 and address < starts[place] + spans[place][1].nbytes:
            whole = spans[place][1]
            _WHOLES[whole.device, address] = whole


def _rows(spec: InputSpec, parts: Sequence[Tensor]) -> int:
    """Return how many rows a piece has: those of its parts, and zeros behind them."""
    own = sum(part.shape[0] for part in parts)
    return max(own, spec.shape[0].value) if spec.shape[0].is_const else own


def _merged(parts: Sequence[Tensor], rows: int, left: LeftMemory) -> Tensor:
    """Return the parts as one tensor of so many rows, which is made anew only if they do not lie
    behind each other already."""
    found = _lying_together(parts, rows)
    if found is not None:
        return found
    first, start = parts[0].detach(), 0
    behind = first.new_zeros(rows - sum(p.shape[0] for p in parts), *first.shape[1:])
    whole = torch.cat([*(p.detach() for p in parts), behind])
    for part in parts:
        piece = _piece(whole, start, part.shape[0])
        left.note(part)
        lie_in(part, piece)
        start += part.shape[0]
        _WHOLES[whole.device, part.data_ptr()] = whole
    return whole


def _piece(whole: Tensor, start: int, rows: int) -> Tensor:
    """Return some rows, as a tensor with a storage of its own over the same memory, which lives as
    long as one of them does. torch.save writes a tensor's whole storage."""
    view = whole[start : start + rows]
    first = view.storage_offset() * view.itemsize
    storage = whole.untyped_storage()[first : first + view.nbytes]
    return view.new_empty(0).set_(storage, 0, view.shape, view.stride())


def _lying_together(parts: Sequence[Tensor], rows: int) -> Tensor | None:
    first = parts[0]
    whole = _WHOLES.get((first.device, first.data_ptr()))
    if whole is None or not first.shape[0] or first.dtype != whole.dtype:
        return None
    row = whole.stride(0) * whole.itemsize
    start, expected = (first.data_ptr() - whole.data_ptr()) // row, first.data_ptr()
    for part in parts:
        if part.shape[1:] != whole.shape[1:] or part.dtype != whole.dtype:
            return None
        if part.data_ptr() != expected or not part.is_contiguous():
            return None
        expected += part.nbytes
    end = start + rows  # whatever lies in rows behind the parts, nobody reads what comes of it
    if end > whole.shape[0]:
        return None
    return whole if (start, end) == (0, whole.shape[0]) else whole[start:end]

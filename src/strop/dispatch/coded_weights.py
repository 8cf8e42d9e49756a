"""Hold the codes and scales that programs read in the place of weights, where linears are computed
in 8 bits (``ir.eight_bit``).

They are made once, for all shapes, and written anew where they lie when a weight has changed: bound
programs and CUDA graphs go on reading them. A change is noticed in each look at the module, so once
a denoise loop, and in each call elsewhere: by torch's count of writes, by addresses, and by values,
since nobody counts what is written through ``.data``. On a CPU all bits of all weights count; on a
GPU, where that would read all weights in each call, the first row and the first numbers of each
row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from strop.ir.eight_bit import CODES, FORMATS, Format
from strop.ir.program import InputSpec, Program
from strop.runtime.derived.known_sums import KnownSums
from strop.runtime.derived.known_values import KnownValues
from strop.runtime.derived.sources import KnownWrites, Sources, SourceWatch, pointers_of

MOST_BYTES = 64 << 20  # of a weight in fp32, that is quantised at once
EDGE_BYTES = 8  # of each row


def _wait_for_nobody() -> None:
    """Do nothing: nobody reads what is about to be written."""


class CodedWeight:
    """Hold one weight, or several below each other, as codes (N, K) and scales (N,); that of a
    convolution as codes (O, C, KH, KW), channels last, and scales (O,)."""

    def __init__(self, parts: Sequence[Tensor], own: Format) -> None:
        first, rows = parts[0], sum(part.shape[0] for part in parts)
        self.format, self.is_known = own, False
        self.codes = torch.empty(
            (rows, *first.shape[1:]),
            dtype=own.dtype,
            device=first.device,
            memory_format=torch.channels_last if first.dim() == 4 else torch.contiguous_format,
        )
        self.scales = torch.empty(rows, dtype=torch.float32, device=first.device)
        self._parts, self._pointers = [ref(part) for part in parts], pointers_of(parts)

    @property
    def size_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def parts(self) -> list[Tensor]:
        """Return the weights, or none if one of them is gone or lies elsewhere: then no program
        that reads this is bound to the module."""
        found = [part() for part in self._parts]
        there = [part for part in found if part is not None]
        is_there = len(there) == len(found) and pointers_of(there) == self._pointers
        return there if is_there else []

    def write(self, parts: Sequence[Tensor]) -> None:
        """Quantise the weights as they are."""
        start = 0
        for part in parts:
            step = max(1, MOST_BYTES // max(1, 4 * part[:1].numel()))
            for rows in part.detach().split(step):
                codes, scales = self.format.quantised(rows.flatten(1))
                self.codes[start : start + len(rows)].copy_(codes.view(rows.shape))
                self.scales[start : start + len(rows)].copy_(scales)
                start += len(rows)
        self.is_known = True


class CodedWeights:
    """Hold those of one module, each as long as an entry that reads it."""

    def __init__(self) -> None:
        self.num_writes = 0
        self.before_write: Callable[[], object] = _wait_for_nobody
        self._weights: WeakValueDictionary[object, CodedWeight] = WeakValueDictionary()
        self._watch: SourceWatch = Sources()
        self._watched: list[CodedWeight] = []

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def size_bytes(self) -> int:
        held = sum(weight.size_bytes for weight in self._weights.values())
        return held + self._watch.size_bytes

    def fill(
        self, program: Program, tensors: Sequence[Tensor], placed: list[Tensor | None]
    ) -> list[CodedWeight]:
        """Put codes and scales among what stands for the arguments of a program, ``placed``, of
        which the first are its weights. Return what holds them, for whoever runs the program."""
        held = list[CodedWeight]()
        for number, spec in enumerate(program.inputs[: len(placed)]):
            if spec.made:
                weight = self._get([tensors[i] for i in spec.merged], spec)
                placed[number] = weight.codes if spec.made.endswith(CODES) else weight.scales
                held.append(weight)
        if held:
            self.refresh()
        return held

    def begin_look(self) -> None:
        """Begin to compare values, which a GPU does beside what is launched from here on."""
        if self._weights:
            self._watch.begin()

    def refresh(self, *, are_written: bool = False) -> bool:
        """Write anew what has changed, and tell whether something has. ``are_written``: weights
        have been, by whoever asks."""
        if not self._weights:
            self.forget()
            return False
        there = dict(self._there())
        has_changed = are_written or self._watch.differs()
        if not has_changed and [*there] == self._watched and all(w.is_known for w in there):
            return False
        self.before_write()
        self._watched = []  # should writing fail half way
        with torch.inference_mode(False), torch.no_grad():
            for weight, parts in there.items():
                if has_changed or not weight.is_known:
                    weight.write(parts)
            self._watch = _watch_of([part for parts in there.values() for part in parts])
        self.num_writes += 1
        self._watched = list(there)
        return True

    def forget(self) -> None:
        """Hold nothing that refers to weights: they are about to be moved, and all is written anew
        where they come back."""
        self._watch, self._watched = Sources(), []
        for weight in [*self._weights.values()]:
            weight.is_known = False

    def _there(self) -> Iterator[tuple[CodedWeight, list[Tensor]]]:
        for weight in [*self._weights.values()]:
            parts = weight.parts()
            if parts:
                yield weight, parts
            else:
                weight.is_known = False  # nobody watches it until it is bound again

    def _get(self, parts: Sequence[Tensor], spec: InputSpec) -> CodedWeight:
        own = FORMATS[spec.made.split()[0]]
        looks = tuple((id(t), t.data_ptr(), t.dtype, t.shape) for t in parts)
        found = self._weights.get((own.name, looks))
        if found is None or not found.parts():
            found = self._weights[own.name, looks] = CodedWeight(parts, own)
        return found


def _watch_of(parts: Sequence[Tensor]) -> SourceWatch:
    own = [part.detach() for part in parts]
    if not own:
        return Sources()
    if own[0].device.type == "cpu":
        return Sources(KnownWrites(own), _KnownBits(own))
    found = [edge for weight in own for edge in edges(weight)]
    return Sources(KnownWrites(own), KnownValues(found))


def edges(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first row of a weight, and the first numbers of each row, of a convolution at each
    place of its window: as words where they are whole ones, since torch gathers one element after
    the other."""
    count = EDGE_BYTES // weight.itemsize
    dense = weight.movedim(1, -1)
    is_whole = dense.is_contiguous() and dense.shape[-1] % count == 0
    if is_whole and not weight.data_ptr() % EDGE_BYTES and not weight.storage_offset() % count:
        words = dense.view(torch.int64)
        return words[:1], words[..., :1]
    return weight[:1], weight[:, :count]


class _KnownBits(SourceWatch):
    """Remember tensors of a CPU by sums of all their bits."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._sums = tensors, KnownSums(tensors[0].device)
        self._sums.note(tensors)

    def differs(self) -> bool:
        return self._sums.differs(self._tensors, None)

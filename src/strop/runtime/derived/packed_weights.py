"""Hold weights that a library's products read in blocks of their own, once for each content.

Nobody can be trusted to say that a weight was written to: not its address, nor torch's count of
writes, which ``.data`` goes around. So each product compares the bits that its weight has when it
begins, by a fingerprint (``kernels.packed.fingerprint``), with those that were packed; where they
are others, it packs anew. So there is nothing to be told of a LoRA, a checkpoint or a step of
training. A weight is packed once for all sizes, by whoever comes first.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from strop.ir.code_panel import HEAD
from strop.kernels.packed.fingerprint import num_words, source
from strop.runtime.build.loader import KernelLoader

Pack = Callable[[Tensor], Tensor]


class Fingerprint:
    """Tell what one weight holds, where it lies now. It is not thread-safe: each caller has its
    own."""

    def __init__(self, weight: Tensor, kernels: KernelLoader) -> None:
        """``weight`` has no gaps, and stays where it is."""
        kernels.build([source()])
        self._weight = weight  # whose memory must stay
        self._found = (ctypes.c_uint64 * num_words(weight.nbytes))()
        pointers = [weight.data_ptr(), ctypes.addressof(self._found)]
        self._read = kernels.bind(source(), pointers, [weight.nbytes], 0)

    def now(self) -> int:
        self._read()
        return self._found[0]


@dataclass(frozen=True, slots=True)
class _Made:
    """A packed weight, and the fingerprint of what it was made of."""

    content: int
    packed: Tensor


class PackedWeight:
    """Hold one weight, packed in one way. Threads may share it: a product that has begun keeps what
    it reads, whoever packs anew meanwhile."""

    def __init__(self, pack: Pack, note: Callable[[], None]) -> None:
        """``pack`` makes it; ``note`` is told when that has happened."""
        self._pack, self._note = pack, note
        self._made: _Made | None = None
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        made = self._made
        return 0 if made is None else int(torch.ops.mkldnn._nbytes(made.packed))

    def of(self, weight: Tensor, fingerprint: Fingerprint) -> Tensor:
        """Return the weight as it is now, packed."""
        made, content = self._made, fingerprint.now()
        if made is None or made.content != content:
            with self._lock:
                made = self._packed_anew(weight, fingerprint, content)
        return made.packed

    def _packed_anew(self, weight: Tensor, fingerprint: Fingerprint, content: int) -> _Made:
        """Pack what lies there before and after that: somebody may be writing meanwhile."""
        if (made := self._made) is not None and made.content == content:  # by another thread
            return made
        self._made = None  # so that there are never two
        while True:
            with torch.inference_mode(False), torch.no_grad():
                packed = self._pack(weight.detach())
            before, content = content, fingerprint.now()
            if before == content:
                break
        self._made = made = _Made(content, packed)
        self._note()
        return made


class PackedMemory:
    """Hold memory into which generated kernels pack one weight. They look at its bits themselves,
    and say in words in front of it how often they have packed (``codegen/rt/kept_codes.h``)."""

    def __init__(self, numel: int) -> None:
        self.memory = torch.empty(numel, dtype=torch.int32)
        self.memory[:HEAD] = 0  # the rest takes no memory until it is written to

    @property
    def num_made(self) -> int:
        return int(self.memory[2])  # the lower half of the second number of 64 bits

    @property
    def size_bytes(self) -> int:
        return self.memory.nbytes if self.num_made else 0


class PackedWeights:
    """Hold those of one module, each as long as a program that reads it is bound."""

    def __init__(self) -> None:
        self._num_made = 0
        self._weights: WeakValueDictionary[Hashable, PackedWeight] = WeakValueDictionary()
        self._memories: WeakValueDictionary[Hashable, PackedMemory] = WeakValueDictionary()
        self._lock = threading.Lock()

    @property
    def num_made(self) -> int:
        return self._num_made + sum(each.num_made for each in self._all_memories())

    def __len__(self) -> int:
        return sum(1 for size_bytes in self._sizes() if size_bytes)

    @property
    def size_bytes(self) -> int:
        return sum(self._sizes())

    def _sizes(self) -> list[int]:
        weights = [weight.size_bytes for weight in self._all()]
        return weights + [memory.size_bytes for memory in self._all_memories()]

    def get(self, weight: Tensor, way: Hashable, pack: Pack) -> PackedWeight:
        """Return what holds this weight, packed in a way, for everyone who asks for it."""
        key = weight.data_ptr(), weight.dtype, tuple(weight.shape), weight.stride(), way
        with self._lock:
            found = self._weights.get(key)
            if found is None:
                found = self._weights[key] = PackedWeight(pack, self._note)
            return found

    def memory_for(self, weight: Tensor, move: int, numel: int) -> PackedMemory:
        """Return what holds the weight that begins ``move`` bytes into a tensor, packed into
        ``numel`` words by kernels, for all of these."""
        key = weight.data_ptr() + move, tuple(weight.shape), weight.stride(), numel
        with self._lock:
            found = self._memories.get(key)
            if found is None:
                found = self._memories[key] = PackedMemory(numel)
            return found

    def _all_memories(self) -> list[PackedMemory]:
        with self._lock:
            return list(self._memories.values())

    def _all(self) -> list[PackedWeight]:
        with self._lock:
            return list(self._weights.values())

    def _note(self) -> None:
        with self._lock:
            self._num_made += 1


def has_no_gaps(weight: Tensor) -> bool:
    """Tell whether each element of a tensor's memory is one of its own."""
    both = zip(weight.stride(), weight.shape, strict=True)
    steps = sorted((step, size) for step, size in both if size > 1)
    expected = 1
    for step, size in steps:
        if step != expected:
            return False
        expected *= size
    return weight.numel() > 0

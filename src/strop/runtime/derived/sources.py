"""Say what a derived input was made from, and whether that is other now.

A derived input is a value that a program reads in the place of weights or arguments: weights merged
into one, a weight with adapters in it, what is hoisted out of a denoise loop. One rule holds for
all: it is made anew when one of its sources differs from what it was, and at no other time. A
source is watched in each of the ways in which it can change:

- ``KnownSettings`` (in ``dispatch``): which objects stand at places, such as a Parameter in its
  table or the active adapters of a layer.
- ``KnownMemory``: where tensors lie, and in which order: ``w.data = w.data.t()`` moves nothing.
- ``KnownWrites``: how often torch has counted a write.
- ``KnownValues``: all bits, of what may be written without being counted.

What lives within a denoise loop has its arguments as sources too: the same loop has to ask for it,
with the same tensors (``runtime.loop.hoisting``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

_SIZE, _STRIDE = Tensor.size, Tensor.stride
_DATA_PTR, _IS_INFERENCE, _VERSION = Tensor.data_ptr, Tensor.is_inference, attrgetter("_version")
# This says at once whether tensors lie at these addresses, in builds of torch for GPUs.
_lie_at = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


class SourceWatch:
    """This is one way to watch sources."""

    size_bytes = 0  # of what is kept to compare with

    def begin(self) -> None:
        """Begin to compare, where that happens beside other work."""

    def differs(self) -> bool:
        """Tell whether a source is other than when this was made."""
        raise NotImplementedError


class Sources(SourceWatch):
    """Watch sources in several ways, in this order."""

    def __init__(self, *watches: SourceWatch) -> None:
        self._watches = watches

    @property
    def size_bytes(self) -> int:  # type: ignore[override]
        return sum(watch.size_bytes for watch in self._watches)

    def begin(self) -> None:
        for watch in self._watches:
            watch.begin()

    def differs(self) -> bool:
        return any(watch.differs() for watch in self._watches)


class KnownMemory(SourceWatch):
    """Remember where tensors lie, with which sizes and steps. If it ``keeps`` their memory, no
    other tensor gets the address of one meanwhile."""

    def __init__(self, tensors: Iterable[Tensor], *, keeps: bool = False) -> None:
        self.tensors = list(tensors)
        self.pointers = pointers_of(self.tensors)
        self.layouts = KnownLayouts(self.tensors)
        self._numbers = list(range(len(self.tensors)))
        self._kept = [tensor.detach() for tensor in self.tensors] if keeps else []

    def differs(self) -> bool:
        if _lie_at is None:
            if [*map(_DATA_PTR, self.tensors)] != self.pointers:
                return True
        elif not _lie_at(self.tensors, self.pointers, self._numbers):
            return True
        return self.layouts.differs()


class KnownLayouts(SourceWatch):
    """Remember sizes and steps in memory, which may change while the address stays.

    torch's own guard says in a third of the time that nothing has: 45 ns a tensor. It also refuses
    other modes and other wishes for gradients, which are no change here.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._known = self._now()
        self._num_refused, self._guard = 0, self._made()

    def differs(self) -> bool:
        if self._guard is None or self._guard.check(*self._tensors):
            return False
        if self._now() != self._known:
            return True
        self._num_refused += 1
        if self._num_refused.bit_count() == 1:  # seldom: a guard takes a microsecond a tensor
            self._guard = self._made()
        return False

    def _now(self) -> tuple[list[torch.Size], list[tuple[int, ...]]]:
        return [*map(_SIZE, self._tensors)], [*map(_STRIDE, self._tensors)]

    def _made(self) -> TensorGuards | None:
        if not self._tensors:
            return None
        return TensorGuards(*self._tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


class KnownWrites(SourceWatch):
    """Remember how often tensors were written to. None of them may lack a count."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._versions = tensors, versions_of(tensors)

    @property
    def are_counted(self) -> bool:
        return self._versions is not None

    def differs(self) -> bool:
        return self._versions is None or versions_of(self._tensors) != self._versions


def pointers_of(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(_DATA_PTR, tensors))


def versions_of(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Return how often each tensor has been written to; None if one of them does not know."""
    if any(map(_IS_INFERENCE, tensors)):
        return None
    try:
        return tuple(map(_VERSION, tensors))
    except RuntimeError:  # made in inference mode, with ``.data`` of later
        return None

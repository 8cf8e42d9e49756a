"""The sizes of a program at one shape are each worked out once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from strop.ir.dims import Expr
from strop.ir.program import KernelStep, Program, TensorRef

Look = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


class _Known(dict[Expr, int]):
    """Numbers by size; one that is asked for is worked out first."""

    def __init__(self, env: Mapping[str, int]) -> None:
        super().__init__()
        self._env = env

    def __missing__(self, size: Expr) -> int:
        found = self[size] = size.eval(self._env)
        return found


class BufferLooks:
    """Hold the shapes and strides of a program's buffers, each once: ``shapes`` and ``strides`` say
    by buffer which of ``all`` it has."""

    def __init__(self, program: Program) -> None:
        numbers = dict[tuple[Expr, ...], int]()
        self.shapes = [numbers.setdefault(b.shape, len(numbers)) for b in program.buffers]
        self.strides = [numbers.setdefault(b.strides, len(numbers)) for b in program.buffers]
        self.all = tuple(numbers)


class Sizes:
    """``shapes`` and ``strides``, in elements, are those of the program's buffers, by number.
    ``looks`` are the program's, where they are known."""

    def __init__(
        self, program: Program, env: Mapping[str, int], looks: BufferLooks | None = None
    ) -> None:
        self.env = env
        self._known, self._buffers = _Known(env), program.buffers
        looks = BufferLooks(program) if looks is None else looks
        found = [self.all(each) for each in looks.all]
        self.shapes = [found[n] for n in looks.shapes]
        self.strides = [found[n] for n in looks.strides]
        self.dtypes = [b.dtype for b in program.buffers]

    def of(self, size: Expr) -> int:
        return self._known[size]

    def all(self, sizes: Sequence[Expr]) -> tuple[int, ...]:
        return tuple(map(self._known.__getitem__, sizes))

    def concrete(self, value: Any) -> Any:
        """Return an attribute of a call with numbers in the place of its sizes."""
        if isinstance(value, Expr):
            return self.of(value)
        return tuple(self.concrete(v) for v in value) if isinstance(value, tuple) else value

    def numel(self, number: int) -> int:
        return math.prod(self.shapes[number])

    def writes_any(self, step: KernelStep) -> bool:
        """Tell whether a kernel has an element to write."""
        if any(self.of(size) for _, size in step.parts):
            return True
        of_parts = {number for number, _ in step.parts}
        return any(0 not in self.shapes[n] for n in step.writes if n not in of_parts)

    def bytes_of(self, number: int) -> int:
        return self.numel(number) * self.dtypes[number].itemsize

    def look(self, number: int) -> Look:
        return self.shapes[number], self.strides[number], self.dtypes[number]

    def piece(self, ref: TensorRef) -> tuple[tuple[int, ...], tuple[int, ...], int, bool]:
        """Return the shape, the strides and the offset of a piece of a buffer, and whether that is
        all of it, in the same order."""
        number, buffer = ref.buffer, self._buffers[ref.buffer]
        whole = self.shapes[number], self.strides[number]
        offset = self.of(ref.offset) if ref.offset.terms else 0
        if ref.shape == buffer.shape and ref.strides == buffer.strides:
            return *whole, offset, not offset  # of most: their sizes need no evaluation
        shape, strides = self.all(ref.shape), self.all(ref.strides)
        return shape, strides, offset, (shape, strides) == whole and not offset

    def is_whole(self, ref: TensorRef) -> bool:
        """Say whether a piece of a buffer is all of it, in the same order."""
        return self.piece(ref)[-1]

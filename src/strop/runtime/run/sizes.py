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


class Sizes:
    """``shapes`` and ``strides``, in elements, are those of the program's buffers, by number."""

    def __init__(self, program: Program, env: Mapping[str, int]) -> None:
        self.env = env
        self._known = _Known(env)
        self.shapes = [self.all(b.shape) for b in program.buffers]
        self.strides = [self.all(b.strides) for b in program.buffers]
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
        of_parts = {number for number, _ in step.parts}
        return any(self.of(size) for _, size in step.parts) or any(
            self.numel(number) for number in step.writes if number not in of_parts
        )

    def bytes_of(self, number: int) -> int:
        return self.numel(number) * self.dtypes[number].itemsize

    def look(self, number: int) -> Look:
        return self.shapes[number], self.strides[number], self.dtypes[number]

    def is_whole(self, ref: TensorRef) -> bool:
        """Say whether a piece of a buffer is all of it, in the same order."""
        shape, strides = self.all(ref.shape), self.all(ref.strides)
        is_all = (shape, strides) == (self.shapes[ref.buffer], self.strides[ref.buffer])
        return is_all and not self.of(ref.offset)

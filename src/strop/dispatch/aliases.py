"""Results that are arguments of the call, or views of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from strop.ir.program import Program
from strop.runtime.run.layouts import is_laid_out


@dataclass(frozen=True, slots=True)
class AliasOfArgument:
    """Result number ``place`` is argument number ``argument``, or a view of it."""

    place: int
    argument: int
    is_whole: bool
    shape: Sequence[int]
    strides: Sequence[int]
    offset: int
    given: Sequence[int]  # strides of the argument

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the view in the memory of the caller's own tensor; None where a copy of it had to
        do."""
        if self.is_whole:
            return tensor.detach()
        if not is_laid_out(tensor, self.given):
            return None
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


def returned_arguments(program: Program, env: Mapping[str, int]) -> tuple[AliasOfArgument, ...]:
    """The results that lie in the memory of arguments."""
    arguments = [i for i, spec in enumerate(program.inputs) if not spec.is_state]
    found = []
    for place, item in enumerate(program.returned):
        buffer = program.buffers[item.tensor.buffer] if item.tensor is not None else None
        if item.tensor is None or buffer is None or buffer.index not in arguments:
            continue
        shape, strides, given = (
            [s.eval(env) for s in sizes]
            for sizes in (item.tensor.shape, item.tensor.strides, buffer.strides)
        )
        is_whole = (item.tensor.shape, item.tensor.strides) == (buffer.shape, buffer.strides)
        found.append(
            AliasOfArgument(
                place,
                arguments.index(buffer.index),
                is_whole,
                shape,
                strides,
                item.tensor.offset.eval(env),
                given,
            )
        )
    return tuple(found)

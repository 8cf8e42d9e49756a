"""Strop with its kernels interpreted: everything runs but the C++ compiler.

The judge of the code generators (``ir.interpret``, in fp64) stands in for machine code, so that a
program costs milliseconds. The text of the kernels is still made, and thrown away. Or the text is
Triton's, and its interpreter runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from strop import backend
from strop.codegen import cpp
from strop.codegen import triton as triton_text
from strop.codegen.assemble import Target
from strop.codegen.triton_interpreter import interpret
from strop.dispatch import dispatcher as dispatch
from strop.dispatch import variants
from strop.ir.device import CPU
from strop.ir.interpret import run
from strop.ir.loops import Kernel
from strop.ir.program import KernelStep
from strop.ir.source import Emitted, KernelSource, Split
from strop.runtime.build.background import BackgroundBuild, Order
from strop.runtime.run import executor
from tests.lowering.run_plan import with_offsets

_KERNELS: dict[tuple[KernelSource, Any], Kernel] = {}


def _emit(kernel: Kernel) -> Emitted:
    emitted = cpp.emit(kernel)
    _KERNELS[emitted.source, emitted.scalars] = kernel
    return emitted


class InterpretedBound(executor.Bound):
    def _link_kernel(self, position: int, step: KernelStep) -> Any:
        usual = [self._eval(offset) for offset in step.offsets]
        if not any(0 not in self._shapes[number] for number in step.writes):
            return executor._nothing
        kernel = _KERNELS[self.program.sources[step.kernel], step.scalars]
        kernel = with_offsets(kernel, usual)
        return lambda: run(kernel, [self.contents(n) for n in step.buffers], self.env)


class TritonBound(executor.Bound):
    """The kernels that a GPU would run, on this processor."""

    def _link_kernel(self, position: int, step: KernelStep) -> Any:
        if not any(0 not in self._shapes[number] for number in step.writes):
            return executor._nothing
        source, values = self.program.sources[step.kernel], self._scalars(step)
        sizes = {f"s{i}": value for i, value in enumerate(values)} | {"splits": SPLITS}

        def launch() -> None:
            tensors = [
                self._from(n, self._eval(offset))
                for n, offset in zip(step.buffers, step.offsets, strict=True)
            ]
            interpret(source, tensors, sizes)

        return launch

    def _from(self, number: int, offset: int) -> Tensor:
        tensor = self.contents(number)
        start = tensor.storage_offset() + offset
        room = tensor.untyped_storage().nbytes() // tensor.element_size() - max(start, 0)
        flat = tensor.as_strided((max(room, 0),), (1,), max(start, 0))
        # loads under a guard may be counted from a place before the first element
        return torch.cat([flat.new_zeros(-start), flat]) if start < 0 else flat


SPLITS = 2  # programs that share a column reduction


class _NoKernels:
    device = CPU

    counts = (0, 0)

    def splits(self, split: Split, sizes: Mapping[str, int]) -> int:
        return SPLITS

    def warm_up(self, workers: int | None = None) -> None: ...

    def cool_down(self) -> None: ...

    def begin(self, sources: Sequence[KernelSource]) -> None: ...

    def build(self, sources: Sequence[KernelSource]) -> None: ...

    def later(self, sources: Sequence[KernelSource], order: Order | None = None) -> BackgroundBuild:
        return BackgroundBuild(())

    def watch(self, sources: Sequence[KernelSource]) -> Callable[[], int]:
        return int


@contextmanager
def interpreted(*, triton: bool = False) -> Iterator[None]:
    """Modules that are compiled inside run with interpreted kernels, inside."""
    _KERNELS.clear()
    emit = triton_text.emit if triton else _emit
    target = Target("cpu", emit, backend.TARGETS["cpu"].planned, in_place=triton)
    library = lambda *args: _NoKernels()  # noqa: E731
    with (
        patch.dict(backend.TARGETS, cpu=target),
        patch.object(dispatch, "Bound", TritonBound if triton else InterpretedBound),
        patch.object(dispatch, "library_for", library),
        patch.object(variants, "library_for", library),
    ):
        yield

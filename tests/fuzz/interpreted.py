"""Strop with its kernels interpreted: everything runs but the C++ compiler.

The judge of the code generators (``ir.interpret``, in fp64) stands in for machine code, so that a
program costs milliseconds. The text of the kernels is still made, and thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from strop import backend
from strop.codegen import cpp
from strop.codegen.assemble import Target
from strop.ir.interpret import run
from strop.ir.loops import Kernel
from strop.ir.program import KernelStep
from strop.ir.source import Emitted, KernelSource
from strop.runtime import dispatch, executor, variants
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


class _NoKernels:
    counts = (0, 0)

    def warm_up(self, workers: int | None = None) -> None: ...

    def build(self, sources: Sequence[KernelSource]) -> None: ...


@contextmanager
def interpreted() -> Iterator[None]:
    """Modules that are compiled inside run with interpreted kernels, inside."""
    _KERNELS.clear()
    target = Target("cpu", _emit, backend.TARGETS["cpu"].planned)
    library = lambda *args: _NoKernels()  # noqa: E731
    with (
        patch.dict(backend.TARGETS, cpu=target),
        patch.object(dispatch, "Bound", InterpretedBound),
        patch.object(dispatch, "library_for", library),
        patch.object(variants, "library_for", library),
    ):
        yield

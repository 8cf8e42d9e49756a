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

from strop.codegen import cpp
from strop.codegen import triton as triton_text
from strop.codegen.assemble import Target
from strop.codegen.triton_interpreter import interpret
from strop.dispatch import entry_runner, training_steps, variants
from strop.fusion import planner
from strop.fusion.parallelism import Workers
from strop.ir.device import CPU
from strop.ir.interpret import run
from strop.ir.loops import LoopKernel
from strop.ir.program import KernelStep
from strop.ir.source import Emitted, KernelSource, Split
from strop.runtime.build.background import BackgroundBuild, BuildOrder
from strop.runtime.run import link
from strop.stages.targets import TARGETS
from tests.lowering.run_plan import with_offsets

_KERNELS: dict[tuple[KernelSource, Any], LoopKernel] = {}


def _emit(kernel: LoopKernel) -> Emitted:
    emitted = cpp.emit(kernel)
    _KERNELS[emitted.source, emitted.scalars] = kernel
    return emitted


def interpreted_kernel(at: link.Linking, position: int, step: KernelStep) -> link.Run:
    kernel = _KERNELS[at.plan.program.sources[step.kernel], step.scalars]
    kernel = with_offsets(kernel, list(at.plan.sizes.all(step.offsets)))
    env = at.plan.sizes.env
    return lambda: run(kernel, [_held(at, n) for n in step.buffers], env)


def triton_kernel(at: link.Linking, position: int, step: KernelStep) -> link.Run:
    """The kernel that a GPU would run, on this processor."""
    launch, offsets = at.plan.launches[position], at.plan.sizes.all(step.offsets)
    sizes = {f"s{i}": value for i, value in enumerate(launch.scalars)} | {"splits": SPLITS}

    def run() -> None:
        places = zip(step.buffers, offsets, strict=True)
        interpret(launch.source, [_from(_held(at, n), offset) for n, offset in places], sizes)

    return run


def _held(at: link.Linking, number: int) -> Tensor:
    tensor = at.slots[number]
    assert tensor is not None, number
    return tensor


def _from(tensor: Tensor, offset: int) -> Tensor:
    start = tensor.storage_offset() + offset
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - max(start, 0)
    flat = tensor.as_strided((max(room, 0),), (1,), max(start, 0))
    # loads under a guard may be counted from a place before the first element
    return torch.cat([flat.new_zeros(-start), flat]) if start < 0 else flat


SPLITS = 2  # programs that share a column reduction
# Rows are cut into parts at sizes of this fuzzer, as long ones are on a GPU.
CUTTING = Workers(busy=3, wide=2, holds=6, whole=2, cuts_unknown=True, launch=1 << 26)


class _NoKernels:
    device = CPU

    counts = (0, 0)

    def splits(self, split: Split, sizes: Mapping[str, int]) -> int:
        return SPLITS

    def warm_up(self, workers: int | None = None) -> None: ...

    def cool_down(self) -> None: ...

    def begin(self, sources: Sequence[KernelSource]) -> None: ...

    def build(self, sources: Sequence[KernelSource]) -> None: ...

    def later(
        self, sources: Sequence[KernelSource], order: BuildOrder | None = None
    ) -> BackgroundBuild:
        return BackgroundBuild(())

    def watch(self, sources: Sequence[KernelSource]) -> Callable[[], int]:
        return int


@contextmanager
def interpreted(*, triton: bool = False) -> Iterator[None]:
    """Modules that are compiled inside run with interpreted kernels, inside."""
    _KERNELS.clear()
    emit = triton_text.emit if triton else _emit
    target = Target("cpu", emit, TARGETS["cpu"].planned, in_place=triton)
    library = lambda *args: _NoKernels()  # noqa: E731
    with (
        patch.dict(TARGETS, cpu=target),
        patch.object(planner, "workers_of", lambda device: CUTTING),
        patch.dict(link.KINDS, kernel=triton_kernel if triton else interpreted_kernel),
        patch.object(entry_runner, "library_for", library),
        patch.object(variants, "library_for", library),
        patch.object(training_steps, "library_for", library),
    ):
        yield

"""The launches of generated kernels at one shape are known here, but for the addresses that they
get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from strop.ir.program import KernelStep, Program, Step
from strop.ir.source import KernelSource, Split
from strop.runtime.run.limits import needs_wide_indices
from strop.runtime.run.sizes import Sizes

Splits = Callable[[Split, Mapping[str, int]], int]  # programs that share a reduction, on a device


@dataclass(frozen=True, slots=True)
class GeneratedLaunch:
    """``moves`` says where in each of the step's buffers the kernel begins, in bytes.
    ``scratch_numels`` says how many elements each scratch of the source has."""

    source: KernelSource
    scalars: tuple[int, ...]
    moves: tuple[int, ...]
    scratch_numels: tuple[int, ...]

    @property
    def scratch_bytes(self) -> list[int]:
        """Return the sizes of the scratch that need not be zero; zeroed scratch is kept apart."""
        pairs = zip(self.source.scratch, self.scratch_numels, strict=True)
        return [0 if s.zeroed else numel * s.dtype.itemsize for s, numel in pairs]


def launches_of(
    program: Program, steps: Sequence[Step | None], sizes: Sizes, splits: Splits
) -> dict[int, GeneratedLaunch]:
    """Return the launches by step, those of kernels that have no element to write among them."""
    return {
        position: _launch(program, step, sizes, splits)
        for position, step in enumerate(steps)
        if isinstance(step, KernelStep)
    }


def _launch(program: Program, step: KernelStep, sizes: Sizes, splits: Splits) -> GeneratedLaunch:
    source, scalars = program.sources[step.kernel], sizes.all(step.scalars)
    names = dict[str, int]()
    if source.split is not None or source.scratch:
        names = {f"s{i}": value for i, value in enumerate(scalars)}
    if source.split is not None:
        names["splits"] = splits(source.split, names)
        scalars = (*scalars, names["splits"])
    moves = sizes.all(step.offsets)
    if any(moves):  # of few kernels
        units = (sizes.dtypes[number].itemsize for number in step.buffers)
        moves = tuple(offset * unit for offset, unit in zip(moves, units, strict=True))
    numels = tuple(scratch.numel.eval(names) for scratch in source.scratch)
    if program.device == "cuda":
        elements = [sizes.numel(number) for number in step.buffers]
        source = source.widened() if needs_wide_indices(scalars, elements) else source
    return GeneratedLaunch(source, scalars, moves, numels)

"""Sizes of arguments that no plan depends on: how many ids there are in all bags of a batch.

Ids lie in arguments, or are computed from them one by one, and kernels alone look at how many there
are. So a program is bound once for all such sizes: a run makes the memory of what is as long, and
tells the kernels the size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from strop.ir.dims import Expr, const, symbol
from strop.ir.program import CallStep, KernelStep, Program
from strop.ir.source import KernelSource
from strop.runtime.build.native import BoundNativeKernel


@dataclass(frozen=True, slots=True)
class FreeSizes:
    """``roots`` has for each free size the argument, by place, whose only dim it is. ``buffers``
    are values of a program that are as long, each with the name of its size."""

    roots: Mapping[str, int]
    buffers: tuple[tuple[int, str], ...]

    def __bool__(self) -> bool:
        return bool(self.roots)

    def scalars(self, step: KernelStep) -> list[tuple[int, Expr]]:
        """Return the scalars of a kernel that depend on these sizes, by place."""
        names = self.roots.keys()
        return [(n, size) for n, size in enumerate(step.scalars) if size.roots & names]


NONE = FreeSizes({}, ())
Told = tuple[BoundNativeKernel, int, Expr]  # a kernel, which of its scalars, and the size


class ToldSizes:
    """Remember which sizes kernels have been told, and tell them others."""

    def __init__(self, free: FreeSizes, env: Mapping[str, int], told: Sequence[Told]) -> None:
        self._free, self._env = free, dict(env)
        self._now = {name: env[name] for name in free.roots}
        # most scalars are a size as it is, and need no evaluation
        plain = [(kernel.scalars, n, size) for kernel, n, size in told if _is_root(size)]
        self._plain = [(scalars, n, next(iter(size.roots))) for scalars, n, size in plain]
        self._others = [each for each in told if not _is_root(each[2])]

    def tell(self, inputs: Sequence[Tensor]) -> Mapping[str, int]:
        """Tell kernels the sizes of a run, and return them."""
        now = {name: inputs[place].shape[0] for name, place in self._free.roots.items()}
        if now != self._now:
            self._now = now
            self._env.update(now)
            for scalars, place, name in self._plain:
                scalars[place] = now[name]
            for kernel, place, size in self._others:
                kernel.set_scalar(place, size.eval(self._env))
        return now


def free_sizes(program: Program) -> FreeSizes:
    """Find the free sizes of a program, which only one for a CPU has."""
    if program.device != "cpu":
        return NONE
    arguments = [n for n, spec in enumerate(program.inputs) if not spec.is_state]
    roots: dict[str, int] = {}
    for place, number in enumerate(arguments):
        shape = program.inputs[number].shape
        if len(shape) == 1 and len(shape[0].roots) == 1:
            (name,) = shape[0].roots
            if shape[0] == symbol(name):
                roots.setdefault(name, place)
    if not roots:  # of most programs, and the walks over inputs and steps take long
        return NONE
    shared = Counter(name for spec in program.inputs for name in _roots(spec.shape))
    roots = {name: place for name, place in roots.items() if shared[name] == 1}
    if not roots:
        return NONE
    asked = _asked(program)
    roots = {name: place for name, place in roots.items() if name not in asked}
    long = tuple(
        (n, name)
        for n, buffer in enumerate(program.buffers)
        for name in roots
        if buffer.kind == "arena" and buffer.shape == (symbol(name),)
    )
    return FreeSizes(roots, long) if roots else NONE


def _asked(program: Program) -> set[str]:
    """Return the roots of which something but a kernel's loop depends."""
    found: set[str] = set()
    for guard in program.guards:
        found |= _roots((guard.left, guard.right))
    for item in program.returned:
        found |= _roots(item)
    for buffer in program.buffers:
        is_plain = len(buffer.shape) == 1 and buffer.strides == (const(1),)
        if not (is_plain and buffer.kind in ("input", "arena") and _is_root(buffer.shape[0])):
            found |= _roots((buffer.shape, buffer.strides))
    for spec in program.inputs:
        is_plain = len(spec.shape) == 1 and spec.strides == (const(1),)
        if spec.is_state or not (is_plain and _is_root(spec.shape[0])):
            found |= _roots((spec.shape, spec.strides))
    for step in program.steps:
        found |= _asked_by(program, step)
    return found


def _asked_by(program: Program, step: KernelStep | CallStep) -> set[str]:
    if isinstance(step, CallStep):
        return _roots((step.inputs, step.attrs, step.absorbed))
    source = program.sources[step.kernel]
    found = _roots((step.offsets, step.variants, step.absorbed, step.parts))
    if source.split is not None:
        found |= _roots(step.scalars)
    return found | _of_scratch(source, step.scalars)


def _of_scratch(source: KernelSource, scalars: Sequence[Expr]) -> set[str]:
    names = _roots(tuple(scratch.numel for scratch in source.scratch))
    return _roots(tuple(size for n, size in enumerate(scalars) if f"s{n}" in names))


def _is_root(size: Expr) -> bool:
    return len(size.roots) == 1 and size == symbol(next(iter(size.roots)))


def _roots(value: Any) -> set[str]:
    """Return the roots of all sizes in a value of plain data."""
    if isinstance(value, Expr):
        return set(value.roots)
    if isinstance(value, tuple):
        return set[str]().union(*map(_roots, value))
    slots = getattr(type(value), "__dataclass_fields__", None)
    return set[str]().union(*(_roots(getattr(value, name)) for name in slots or ()))

"""The executor of launches: a call by the kernels that the library has chosen for it.

It looks how tensors lie, binds kernels, puts pointers in place and launches. What does not lie in
memory as the kernels want it goes to ``otherwise``, a library's call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.kernels.kernel import (
    RESULT,
    Late,
    Launch,
    Launches,
    Lies,
    Operand,
    Scalar,
    Stride,
    Torch,
)
from strop.runtime.build.driver import NOWHERE, View
from strop.runtime.build.loader import BoundKernel, KernelLoader
from strop.runtime.run.memory import aligned

ALIGNMENT, LIMIT = 16, 2**31  # bytes of an address, elements of a tensor
LINES = {Lies.LINES: 2, Lies.RUNS: 1}  # what strides of rows are multiples of
ANYWHERE = (*LINES, Lies.PIXELS, Lies.UNALIGNED)  # at any address
WIDE = 16  # what a scalar is a multiple of, where a kernel is told so
OutCall = Callable[[Sequence[Tensor], Tensor], None]
Call = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class CallSite:
    """Hold what the program around a call says. ``is_early``: the launch before is a kernel of
    ours, beside whose end this one may begin. ``is_steady``: no launch of the run writes the
    weights."""

    kernels: KernelLoader
    stream: int
    is_early: bool
    is_steady: bool


class Launched:
    """One call on one stream. ``memory``: at least ``scratch_bytes(launches)``, of which nothing
    is kept from one call to the next."""

    def __init__(
        self,
        launches: Launches,
        site: CallSite,
        memory: Tensor | None,
        kept: Sequence[Tensor] = (),
    ) -> None:
        """``kept`` is the memory of each scratch that is kept, in their order."""
        self._result, self._order = launches.result, launches.order
        self._scratch = _cut(launches, memory, kept)
        is_first = site.is_early
        self._parts: list[_Kernel | _Library] = []
        for part in launches.parts:
            if isinstance(part, Launch):
                self._parts.append(_Kernel(part, site, is_early=is_first))
                is_first = False
            else:
                self._parts.append(_Library(part))
                is_first &= part.name == "copy"

    def run(self, inputs: Sequence[Tensor], out: Tensor) -> bool:
        """Run the call, or give False where tensors lie otherwise: then nothing has run."""
        ready = []
        for part in self._parts:
            tensors = [self._tensor(operand, inputs, out) for operand in part.operands]
            launch = part.ready(tensors)
            if launch is None:
                return False
            ready.append((launch, tensors))
        for launch, tensors in ready:
            launch(tensors)
        return True

    def writing(self, otherwise: OutCall) -> OutCall:
        """The call of a step that writes where it is told."""

        def call(inputs: Sequence[Tensor], out: Tensor) -> None:
            if not self.run(inputs, out):
                otherwise(inputs, out)

        return call

    def allocating(self, otherwise: Call) -> Call:
        """The call of a step that allocates its result, as a library does."""
        sizes = [self._result[dim] for dim in self._order]
        back = sorted(range(len(self._order)), key=self._order.__getitem__)

        def call(inputs: Sequence[Tensor]) -> Tensor:
            out = inputs[0].new_empty(sizes).permute(back)
            return out if self.run(inputs, out) else otherwise(inputs)

        return call

    def _tensor(self, operand: Operand, inputs: Sequence[Tensor], out: Tensor) -> Tensor:
        number = operand.number
        if number < RESULT:
            found = self._scratch[RESULT - 1 - number]
            if operand.shape:
                found = found.view(-1)[: math.prod(operand.shape)].view(operand.shape)
            return found
        found = out if number == RESULT else inputs[number]
        for dim, begin, *length in operand.piece:
            found = found.narrow(dim, begin, *length) if length else found.select(dim, begin)
        return found.permute(operand.order) if operand.order else found


Ready = Callable[[Sequence[Tensor]], object]


class _Kernel:
    """One launch, bound once for each way in which its operands lie."""

    def __init__(self, launch: Launch, site: CallSite, *, is_early: bool) -> None:
        self.operands = launch.operands
        self._launch, self._around, self._is_early = launch, site, is_early
        self._bound: dict[tuple[tuple[int, ...], ...], BoundKernel | None] = {}
        self._free = [n for n, o in enumerate(launch.operands) if o.lies is not Lies.DENSE]

    def ready(self, tensors: Sequence[Tensor]) -> Ready | None:
        if not all(map(_lies, self.operands, tensors)):
            return None
        key = tuple(tensors[number].stride() for number in self._free)
        if key not in self._bound:
            self._bound[key] = self._bind(tensors)
        kernel = self._bound[key]
        if kernel is None:
            return None

        def launch(tensors: Sequence[Tensor]) -> None:
            for place, tensor in enumerate(tensors):
                kernel.set_pointer(place, tensor.data_ptr())
            kernel()

        return launch

    def _bind(self, tensors: Sequence[Tensor]) -> BoundKernel | None:
        source, kernels = self._launch.source, self._around.kernels
        scalars = [self._scalar(scalar, tensors) for scalar in self._launch.scalars]
        wide = (given for given, unit in zip(scalars, source.scalars, strict=True) if unit == WIDE)
        if any(value % WIDE for value in wide):
            return None
        kernels.build([source])  # unless the program's first call has done so
        views = [_view(o, t) for o, t in zip(self.operands, tensors, strict=True) if o.view]
        return kernels.bind(
            source,
            [NOWHERE] * len(tensors),
            scalars,
            self._around.stream,
            early=self._is_early,
            views=views,
        )

    def _scalar(self, scalar: Scalar, tensors: Sequence[Tensor]) -> int:
        if isinstance(scalar, Stride):
            return tensors[scalar.operand].stride(scalar.dim) // scalar.unit
        return int(not self._around.is_steady) if isinstance(scalar, Late) else scalar


class _Library:
    """One call of torch between launches."""

    def __init__(self, part: Torch) -> None:
        self.operands, self._call = part.operands, TORCH[part.name]

    def ready(self, tensors: Sequence[Tensor]) -> Ready | None:
        if not all(map(_lies, self.operands, tensors)):
            return None
        return lambda tensors: self._call(*tensors)


def _copy(source: Tensor, out: Tensor) -> None:
    if source.data_ptr() != out.data_ptr():
        out.copy_(source)


# Products of half precision into fp32: neither scores nor sums of weighted values are rounded.
TORCH: Mapping[str, Callable[..., object]] = {
    "copy": _copy,
    "linear": lambda x, weight, out: torch.mm(x, weight.t(), out=out),
    "further linear": lambda x, weight, out: out.addmm_(x, weight.t()),
    "scores": lambda q, k, out: torch.bmm(q, k.transpose(1, 2), out_dtype=torch.float32, out=out),
    "weighted": lambda weights, v, out: torch.bmm(weights, v, out_dtype=torch.float32, out=out),
    "divided": lambda values, sums, out: torch.div(values, sums, out=out),
}


def _lies(operand: Operand, tensor: Tensor) -> bool:
    """Tell whether a tensor lies as the kernel wants it."""
    if not 0 < tensor.numel() < LIMIT:
        return False
    if operand.lies not in ANYWHERE and tensor.data_ptr() % ALIGNMENT:
        return False
    if (unit := LINES.get(operand.lies)) and not has_lines(tensor.shape, tensor.stride(), unit):
        return False
    if operand.lies is Lies.PIXELS and not has_pixels(tensor.shape, tensor.stride()):
        return False
    if operand.lies is Lies.DENSE:
        return tensor.is_contiguous()
    if operand.lies is Lies.ROWS and not _has_rows(tensor, is_mapped=operand.view is not None):
        return False
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return operand.view is not None or reach < LIMIT  # TMA counts in coordinates


def has_lines(shape: Sequence[int], strides: Sequence[int], unit: int) -> bool:
    """Tell whether the last dim is dense, and rows begin at multiples of ``unit`` elements."""
    *rows, _ = [step if size > 1 else 0 for size, step in zip(shape, strides, strict=True)]
    is_dense = shape[-1] <= 1 or strides[-1] == 1  # a number for all is no row of numbers
    return is_dense and not any(step % unit for step in rows)


def has_pixels(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether channels of (B, C, H, W) are dense, and all pixels lie in one step."""
    (_, channels, *_), (_, step, *_) = shape, strides
    expected, found = 0, channels == 1 or step == 1
    for dim in (3, 2, 0):  # from the innermost one on
        if shape[dim] > 1:
            found &= expected in (0, strides[dim])
            expected = strides[dim] * shape[dim]
    return found


def _has_rows(tensor: Tensor, *, is_mapped: bool) -> bool:
    """Tell whether rows can be read 16 bytes at once. A tensor map has no stride of zero."""
    *some, last = strides(tensor)
    least = 1 if is_mapped else 0
    return last == 1 and all(s >= least and s * tensor.itemsize % ALIGNMENT == 0 for s in some)


def strides(tensor: Tensor) -> list[int]:
    """Return its strides. That of a dim of size 1 is never used, but a tensor map wants a good
    one."""
    some = tensor.shape[-1]
    return [s if n > 1 else some for n, s in zip(tensor.shape, tensor.stride(), strict=True)]


def _view(operand: Operand, tensor: Tensor) -> View:
    view = operand.view
    assert view is not None
    sizes, steps = view.sizes, view.strides
    if sizes is None or steps is None:
        seen = tensor[(None,) * view.ones] if view.ones else tensor
        sizes, steps = tuple(seen.shape), tuple(strides(seen))
    return (sizes, steps, view.box) if view.box else (sizes, steps)


def scratch_bytes(launches: Launches) -> int:
    """The working memory that a call wants."""
    return sum(aligned(each.size_bytes) for each in launches.working)


def _cut(launches: Launches, memory: Tensor | None, kept: Sequence[Tensor]) -> list[Tensor]:
    found, begin, left = [], 0, iter(kept)
    for each in launches.scratch:
        if each.packs >= 0:
            found.append(next(left))
            continue
        assert memory is not None
        piece = memory[begin : begin + each.size_bytes]
        found.append(piece.view(each.dtype).view(each.shape))
        begin += aligned(each.size_bytes)
    return found

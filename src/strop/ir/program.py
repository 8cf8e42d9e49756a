"""Define the compiled program: plain data that a small executor runs and the disk cache stores.

No Python is generated for the host. Sizes stay symbolic (``Expr``); binding a program to one
shape evaluates them once. Buffers are numbered; kernels name buffers, library calls read strided
pieces of them (``TensorRef``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from strop.ir.contractions import FACTORS, PAIRED
from strop.ir.dims import Expr
from strop.ir.ops import is_foreign
from strop.ir.pure_calls import is_pure_call
from strop.ir.source import KernelSource, is_within

_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Guard:
    """``left relation right`` must hold for the program to be right at these sizes."""

    left: Expr
    relation: str
    right: Expr

    def holds(self, env: Mapping[str, int]) -> bool:
        return _RELATIONS[self.relation](self.left.eval(env), self.right.eval(env))

    def __str__(self) -> str:
        return f"{self.left} {self.relation} {self.right}"


@dataclass(frozen=True, slots=True)
class NumberGuard:
    """``number relation value`` must hold for a graph to be right. Numbers are counted from 0."""

    number: int
    relation: str
    value: float

    def holds(self, numbers: Sequence[float]) -> bool:
        return _RELATIONS[self.relation](numbers[self.number], self.value)


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Describe one argument. ``merged`` (a merged weight) lists the arguments whose rows it
    holds; with ``corners`` it holds each from this row and column on, and zeros elsewhere.
    ``made``: what it holds of them in 8 bits, "int8 codes" or "fp8 scales" (``ir.eight_bit``)."""

    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    dtype: torch.dtype
    is_state: bool
    merged: tuple[int, ...] = ()
    corners: tuple[tuple[int, int], ...] = ()
    made: str = ""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Describe the memory of one value. ``kind``: "input" (argument ``index``), "arena" (planned),
    "result" (allocated for the caller at each run), "call" (allocated by the library call that
    makes it)."""

    kind: str
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    dtype: torch.dtype
    index: int = -1


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Describe a strided piece of a buffer, in elements."""

    buffer: int
    offset: Expr
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """Describe a buffer of these ``strides``, into which a kernel copies a piece of another one for
    calls. Where the piece lies so already they read it there, and nothing is copied."""

    buffer: int
    piece: TensorRef
    strides: tuple[Expr, ...]

    def lies_so(self, value: Callable[[Expr], int]) -> bool:
        """Tell whether the strides are the same where they are stepped over."""
        dims = zip(self.piece.shape, self.piece.strides, self.strides, strict=True)
        return all(value(size) == 1 or value(old) == value(new) for size, old, new in dims)

    def there(self, ref: TensorRef) -> TensorRef:
        """Return what a piece of the buffer is of the other one."""
        offset = ref.offset + self.piece.offset
        return replace(ref, buffer=self.piece.buffer, offset=offset)


@dataclass(frozen=True, slots=True)
class StepForm:
    """Launch ``sources[kernel]`` instead, where ``size`` is small enough and a multiple.

    It does at least what its step does; what else it does, it takes off other steps.
    """

    kernel: int
    buffers: tuple[int, ...]
    offsets: tuple[Expr, ...]
    writes: tuple[int, ...]
    scalars: tuple[Expr, ...]
    size: Expr
    most: int
    multiple: int
    in_place: tuple[tuple[int, int], ...] = ()  # as in KernelStep

    def fits(self, size: int) -> bool:
        return is_within(size, self.most, self.multiple)


@dataclass(frozen=True, slots=True)
class KernelStep:
    """Launch ``sources[kernel]``, or the first variant that fits, on these buffers and sizes."""

    kernel: int
    buffers: tuple[int, ...]
    offsets: tuple[Expr, ...]  # per buffer, in elements
    writes: tuple[int, ...]
    scalars: tuple[Expr, ...]
    origin: str
    ops: tuple[str, ...]
    variants: tuple[StepForm, ...] = ()
    absorbed: tuple[StepForm, ...] = ()  # of another step, that do this step's work as well
    lookups: tuple[str, ...] = ()  # modules whose indices this kernel checks,
    looked_up: tuple[Expr, ...] = ()  # and the sizes of the dims that they look into
    lookup_sizes: tuple[Expr | None, ...] = ()  # per buffer, how many elements are looked up there
    in_place: tuple[tuple[int, int], ...] = ()  # (written, read): buffers that may be one memory
    parts: tuple[tuple[int, Expr], ...] = ()  # buffers of which it writes so many elements alone
    copied: Copied | None = None  # all that it does

    @property
    def touched(self) -> tuple[int, ...]:
        """Return the buffers that it reads or writes."""
        return self.buffers

    def at(self, value: Callable[[Expr], int]) -> KernelStep | None:
        """Return what runs where sizes have these values; None where another step does this one's
        work, or nobody has to."""
        if any(v.fits(value(v.size)) for v in self.absorbed):
            return None
        if self.copied is not None and self.copied.lies_so(value):
            return None
        form = next((v for v in self.variants if v.fits(value(v.size))), None)
        if form is None:
            return self
        return replace(
            self,
            kernel=form.kernel,
            buffers=form.buffers,
            offsets=form.offsets,
            writes=form.writes,
            scalars=form.scalars,
            in_place=form.in_place,
        )


@dataclass(frozen=True, slots=True)
class CallStep:
    """Run a library call (``run.library_calls``). ``outputs``: a buffer, or -1 for one unused; the
    one result of a call that has a ``place`` is this piece of its buffer.

    Kernels of the library (``kernels.library``) run it instead at sizes where they are faster.
    """

    op: str
    inputs: tuple[TensorRef, ...]
    attrs: tuple[tuple[str, Any], ...]
    outputs: tuple[int, ...]
    origin: str
    absorbed: tuple[StepForm, ...] = ()  # of a kernel's step, that do this call's work as well
    place: TensorRef | None = None
    copies: tuple[Copied, ...] = ()  # buffers that it reads

    def at(self, value: Callable[[Expr], int]) -> CallStep | None:
        """Return the call as it reads its operands at these sizes, or None where a kernel does its
        work."""
        if any(v.fits(value(v.size)) for v in self.absorbed):
            return None
        near = {copied.buffer: copied for copied in self.copies if copied.lies_so(value)}
        if not near:
            return self
        refs = (near[r.buffer].there(r) if r.buffer in near else r for r in self.inputs)
        return replace(self, inputs=tuple(refs))

    @property
    def in_place(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs of KernelStep; a product is not written over what it is made of."""
        if self.op not in ("linear_add", PAIRED["linear_add"]):
            return ()
        *factors, addend = (ref.buffer for ref in self.inputs[: FACTORS[self.op] + 1])
        return () if addend in factors else ((self.outputs[0], addend),)

    @property
    def touched(self) -> tuple[int, ...]:
        """Return the buffers that it reads or writes."""
        return (*[ref.buffer for ref in self.inputs], *[n for n in self.outputs if n >= 0])


Step = KernelStep | CallStep


@dataclass(frozen=True, slots=True)
class Returned:
    """Describe one item of the result: a tensor, a size, or (both None) the literal ``value``.
    ``again``: it is not another tensor in the same memory as the first item with this one, but that
    item itself."""

    tensor: TensorRef | None = None
    size: Expr | None = None
    value: Any = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class HostDraw:
    """Describe a call that draws numbers on the CPU which nobody reads: an overload by name, and
    its arguments, which hold no size of the call."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Program:
    """Hold everything needed to run, for every shape that satisfies ``guards``."""

    device: str  # "cpu" or "cuda"
    inputs: tuple[InputSpec, ...]
    buffers: tuple[Buffer, ...]
    sources: tuple[KernelSource, ...]
    steps: tuple[Step, ...]
    returned: tuple[Returned, ...]
    guards: tuple[Guard, ...]
    hints: tuple[tuple[str, int], ...]
    num_nodes: int = 0  # compute nodes of the graph, and how many generated kernels compute
    num_compiled_nodes: int = 0
    kernels_off: tuple[str, ...] = ()  # rows of the kernel library that may not run
    by_rows: tuple[int, ...] = ()  # buffers (b, ...), row-major, as ``codegen.by_rows`` has them
    exact: tuple[tuple[str, str], ...] = ()  # modules that have no 8 bits though asked, and why
    host_draws: tuple[HostDraw, ...] = ()  # of a program for a GPU, which the caller makes

    def at(self, sizes: Mapping[str, int]) -> tuple[Step | None, ...]:
        """Return what runs at these sizes, by step; None where another step does its work, or
        nobody has to. Sizes alone decide, never which kernels happen to be built."""
        known: dict[Expr, int] = {}

        def value(size: Expr) -> int:
            if size not in known:
                known[size] = size.eval(sizes)
            return known[size]

        return tuple(step.at(value) for step in self.steps)

    def sources_at(self, sizes: Mapping[str, int]) -> tuple[KernelSource, ...]:
        """The generated kernels that run at these sizes."""
        numbers = dict.fromkeys(s.kernel for s in self.at(sizes) if isinstance(s, KernelStep))
        return tuple(self.sources[number] for number in numbers)

    @cached_property
    def kernel_steps(self) -> tuple[KernelStep, ...]:
        return tuple(step for step in self.steps if isinstance(step, KernelStep))

    def is_shared(self, place: int) -> bool:
        """Tell whether a result is the memory of an argument, a weight or an earlier result: a
        tensor of its own all the same."""
        ref = self.returned[place].tensor
        if ref is None:
            return False
        is_input = self.buffers[ref.buffer].kind == "input"
        return is_input or any(item.tensor == ref for item in self.returned[:place])

    @property
    def repeated(self) -> tuple[tuple[int, int], ...]:
        """Return results that are an earlier one itself, each with that one's place."""
        refs = [item.tensor for item in self.returned]
        return tuple((n, refs.index(i.tensor)) for n, i in enumerate(self.returned) if i.again)

    @cached_property
    def foreign_calls(self) -> tuple[str, ...]:
        """Return operators that run in torch although nobody decided so: fallbacks."""
        targets = {dict(s.attrs)["target"] for s in self.call_steps if s.op == "aten"}
        return tuple(sorted(t for t in targets if is_foreign(t)))

    @cached_property
    def foreign_causes(self) -> tuple[str, ...]:
        """Return for each of them why: it has no row, or what its rule has met."""
        calls = [dict(s.attrs) for s in self.call_steps if s.op == "aten"]
        whys = {c["target"]: c.get("why") for c in calls}
        return tuple(
            f"{t} cannot be a kernel here: {whys[t]}"
            if whys[t]
            else f"{t} has no row in the operator table"
            for t in self.foreign_calls
        )

    @cached_property
    def written_arguments(self) -> tuple[int, ...]:
        """Return inputs that a run writes into, by kernels or by copies."""
        numbers = {n for step in self.kernel_steps for n in step.writes}
        numbers |= {step.inputs[0].buffer for step in self.call_steps if step.op == "write"}
        buffers = [self.buffers[n] for n in sorted(numbers)]
        return tuple(b.index for b in buffers if b.kind == "input")

    @cached_property
    def is_pure(self) -> bool:
        """Tell whether a run leaves nothing behind but its results: it writes into no argument, and
        nothing in it may draw numbers, tells other processes or is code that nobody here knows.
        ``host_draws`` are no part of a run: they are made when its results are handed out."""
        return self._keeps_to_itself(is_pure_call)

    @cached_property
    def is_ours(self) -> bool:
        """Tell whether a run writes into no argument, tells other processes nothing, and is no code
        of a user's. It may draw numbers."""
        calls_torch = self._keeps_to_itself(lambda a: str(a.get("target")).startswith("aten."))
        return calls_torch and not self.host_draws

    def _keeps_to_itself(self, is_known: Callable[[Mapping[str, Any]], bool]) -> bool:
        """Tell whether a run writes into no argument, tells other processes nothing, and calls of
        torch's and of users only what ``is_known`` by its target and arguments."""
        calls = [step for step in self.call_steps if step.op in ("aten", "pattern")]
        are_known = all(is_known(dict(step.attrs)) for step in calls)
        return are_known and not (self.written_arguments or self.has_exchanges)

    @cached_property
    def has_exchanges(self) -> bool:
        """Tell whether other processes have to make the same run at the same time."""
        return any(step.op == "exchange" for step in self.call_steps)

    @cached_property
    def read_by_place(self) -> Mapping[int, tuple[int, ...]]:
        """Return the state, by number of the input, that somebody reads at strides known since the
        trace, with these: kernels, and calls on pieces."""
        numbers = {n for step in self.kernel_steps for n in step.buffers}
        refs = [ref for step in self.call_steps for ref in step.inputs]
        refs += [item.tensor for item in self.returned if item.tensor is not None]
        for ref in refs:
            buffer = self.buffers[ref.buffer]
            if ref.shape != buffer.shape or ref.strides != buffer.strides:
                numbers.add(ref.buffer)
        buffers = [self.buffers[n] for n in numbers]
        found = sorted({b.index for b in buffers if b.kind == "input"})
        specs = {n: self.inputs[n] for n in found if self.inputs[n].is_state}
        return {
            n: tuple(stride.value for stride in spec.strides)
            for n, spec in specs.items()
            if not spec.merged
        }

    @cached_property
    def call_steps(self) -> tuple[CallStep, ...]:
        return tuple(step for step in self.steps if isinstance(step, CallStep))

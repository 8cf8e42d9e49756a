"""Define what a code generator hands to the runtime: text, argument list, launch rule. Plain
data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from strop.ir.dims import Expr, const


@dataclass(frozen=True, slots=True)
class Scratch:
    """Describe working memory that a kernel wants beside its params: ``numel`` is over its scalar
    names.

    ``zeroed`` memory is zero at the first launch and kept from launch to launch (counters, which
    the kernel leaves zero).
    ``faults`` is such memory on the host: one number, which a kernel that is asked to look outside
    of a tensor sets to 1.
    ``packs``, where it is not negative, is the param of a weight that the kernel packs into such
    memory, which says of what bits that was made. Kernels that pack the same weight share it.
    """

    dtype: torch.dtype
    numel: Expr
    zeroed: bool = False
    faults: bool = False
    packs: int = -1


# A kernel with at most so many programs may start before the one before has ended. With more
# programs that is a loss: LayerNorm 16384x768, a program a row, takes 21 us, not 15; 512x320 takes
# 1.42 us, not 1.80.
MOST_EARLY_PROGRAMS = 640

BOUNDS_CHECK = Scratch(torch.int64, const(1), zeroed=True, faults=True)


# A split reduction runs one program a multiprocessor while slabs are short, up to four for long
# ones: measured best at 2x4096, 1x16384 and 16x16384 rows on 132 of them.
ROWS_PER_PROGRAM, MAX_PROGRAMS_PER_SM = 256, 4


@dataclass(frozen=True, slots=True)
class Split:
    """Describe a reduction spread over several programs; the runtime picks ``splits`` for each
    shape.

    splits = clamp(programs wanted on this device / parallel, 1, ceil(rows / min_rows)).
    """

    rows: Expr  # length of the reduction, over the scalar names
    parallel: Expr  # independent reductions, over the scalar names
    min_rows: int
    most_rows: int = 0  # of a program alone on its multiprocessor; above, two share one (0: never)

    def count(self, sizes: Mapping[str, int], sms: int) -> int:
        """Return the programs that share each reduction on a device of so many multiprocessors."""
        rows, parallel = self.rows.eval(sizes), self.parallel.eval(sizes)
        is_long = 0 < self.most_rows * sms <= rows * parallel
        programs = max(rows * parallel // ROWS_PER_PROGRAM, (1 + is_long) * sms)
        programs = min(programs, MAX_PROGRAMS_PER_SM * sms)
        wanted = programs // max(parallel, 1)
        return max(1, min(wanted, -(-rows // self.min_rows)))


@dataclass(frozen=True, slots=True)
class Effort:
    """Say what a program does, for estimates: ``instructions`` for each of the ``elements`` of a
    step, and ``trips`` to memory of a step that wait for each other.

    A ``sweep``, over the scalar names, is walked by ``stride``, and shared by programs where the
    kernel is split. The loads of ``ahead`` steps are on their way at once.
    """

    instructions: int
    elements: int
    trips: int
    sweep: Expr
    stride: int
    ahead: int

    def steps(self, sizes: Mapping[str, int]) -> int:
        """Return the steps of one program."""
        own = -(-self.sweep.eval(sizes) // sizes.get("splits", 1))
        return max(1, -(-own // self.stride))


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Hold one generated kernel: equal kernels of a model have equal KernelSources.

    Arguments at a launch, in order: one pointer per param, one per scratch, then one integer per
    scalar. Scalars are called ``s0, s1, ...`` and, when ``split`` is set, a last one ``splits``.
    ``grid`` is over the scalar names and is empty for C++, whose functions loop on their own.
    A param with a box is no pointer but a Triton tensor descriptor: the tensor memory accelerator
    of sm_90 and later moves boxes of that size, zeros where they leave the tensor; of every second
    element, say, where ``steps`` says so. In PTX a size of 0 is told at the launch.

    PTX declares what Triton would: behind a descriptor the tensor's sizes (u32) and strides (u64),
    at the end two pointers that are not used. Its constants are SHARED, the bytes of shared memory
    of a program, and EARLY, 1 if it waits for the kernel before it by itself.
    """

    name: str
    language: str  # "triton", "cpp" or "ptx", as text of one entry of that name
    text: str
    params: tuple[torch.dtype, ...]
    scalars: tuple[int, ...]  # per scalar: 16 if provably divisible by 16, else 1
    grid: tuple[Expr, ...] = ()
    scratch: tuple[Scratch, ...] = ()
    split: Split | None = None
    constants: tuple[tuple[str, int], ...] = ()  # Triton constexprs
    num_warps: int = 4
    max_registers: int | None = None  # of a thread; None leaves it to ptxas
    wide: bool = False  # integers have 64 bits; those in C++ always have
    boxes: tuple[tuple[int, ...], ...] = ()  # per param, () for pointers; or no param has one
    steps: tuple[int, ...] = ()  # in PTX, of the first box, by dim: () where it has all elements
    effort: Effort | None = field(default=None, compare=False)  # None where nobody has counted

    def box(self, param: int) -> tuple[int, ...]:
        return self.boxes[param] if self.boxes else ()

    def with_constants(self, **values: int) -> KernelSource:
        """Return the same kernel with other values of constants that it has; others are left
        out."""
        constants = tuple((name, values.get(name, value)) for name, value in self.constants)
        return replace(self, constants=constants)

    def widened(self) -> KernelSource:
        """Return the same Triton kernel for tensors of 2^31 elements or more: all its ids come from
        the number of the program and from scalars, so these decide their width."""
        text = self.text
        for narrow, wide in _WIDER:
            text = text.replace(narrow, wide)
        return replace(self, text=text, wide=True)


_WIDER = (
    ("tl.program_id(0)", "tl.program_id(0).to(tl.int64)"),
    ("tl.full([1, KEPT], 0, tl.int32)", "tl.full([1, KEPT], 0, tl.int64)"),  # a count of elements
)


def is_within(size: int, most: int, multiple: int) -> bool:
    """Tell whether a form of a kernel serves this size: one rule for printing, building and
    running."""
    return size <= most and size % multiple == 0


@dataclass(frozen=True, slots=True)
class KernelForm:
    """Describe a faster form of a kernel, right where ``size`` is at most ``most`` and a multiple
    of ``multiple``."""

    source: KernelSource
    scalars: tuple[Expr, ...]
    size: Expr
    most: int
    multiple: int = 1

    def fits(self, sizes: Mapping[str, int]) -> bool:
        return is_within(self.size.eval(sizes), self.most, self.multiple)


@dataclass(frozen=True, slots=True)
class Emitted:
    """Hold a kernel source and the sizes that this use of it passes as ``s0, s1, ...``.

    ``source`` is right for every size; the first of the ``variants`` that fits is faster.
    """

    source: KernelSource
    scalars: tuple[Expr, ...]
    variants: tuple[KernelForm, ...] = ()

    def at(self, sizes: Mapping[str, int]) -> KernelSource:
        """Return the form that runs at these sizes."""
        return next((v.source for v in self.variants if v.fits(sizes)), self.source)

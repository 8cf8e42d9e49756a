"""The library knows this about a kernel: a row of facts, and its launches as plain data.

A row never touches a tensor. It says what it computes, whether it can, how long that takes, and
what is launched; ``runtime.run.launched_calls`` is the one place that looks at memory and launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import torch

from strop.ir.device import Device
from strop.ir.dims import Expr, const
from strop.ir.graph import Node
from strop.ir.source import KernelSource

CHANNELS_LAST = (0, 2, 3, 1)  # the order in which kernels read (B, C, H, W)
NEVER = math.inf  # the cost of a kernel that cannot serve these sizes, or was never the fastest
FASTEST = 0.0  # its cost where a measurement, and no model, says that nothing is faster


def mask_dtype(op: str, dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    """Return the type of an attention's mask, its fourth operand; None where there is none."""
    return dtypes[3] if op == "attention" and len(dtypes) > 3 else None


@dataclass(frozen=True)
class Call:
    """This is a call of an operator, whose sizes may be symbolic. ``mask`` is the type of an
    attention's mask, which may be another than that of the other operands. ``by_columns``: the
    weights (N, K) of a linear lie as (K, N), as those of GPT-2 do."""

    op: str
    attrs: tuple[tuple[str, Any], ...]
    shapes: tuple[tuple[Expr, ...], ...]
    dtype: torch.dtype  # of its result; operands of int8 and int32 have others
    mask: torch.dtype | None = None
    by_columns: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash once: a choice is looked up by it."""
        return hash((self.op, self.attrs, self.shapes, self.dtype, self.mask, self.by_columns))

    @staticmethod
    def of(node: Node) -> Call:
        attrs = tuple(sorted(node.attrs.items()))
        mask = mask_dtype(node.op, [x.dtype for x in node.inputs])
        return Call(node.op, attrs, tuple(x.shape for x in node.inputs), node.dtype, mask)

    def at(self, sizes: Mapping[str, int]) -> Problem:
        """Return the call at these sizes."""
        return self.of_shapes(tuple(tuple(n.eval(sizes) for n in shape) for shape in self.shapes))

    def of_shapes(self, shapes: tuple[tuple[int, ...], ...]) -> Problem:
        """Return the call with operands of these sizes."""
        return Problem(self.op, self.attrs, shapes, self.dtype, self.mask, self.by_columns)

    def known(self, operand: int) -> tuple[int, ...] | None:
        """Return the sizes of an operand, or None where one of them is symbolic or the operand
        missing."""
        if operand >= len(self.shapes) or not all(s.is_const for s in self.shapes[operand]):
            return None
        return tuple(size.value for size in self.shapes[operand])

    def attr(self, name: str) -> Any:
        return dict(self.attrs)[name]


@dataclass(frozen=True)
class Problem:
    """This is a call at sizes that are known."""

    op: str
    attrs: tuple[tuple[str, Any], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    mask: torch.dtype | None = None
    by_columns: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash once: a choice is looked up by it."""
        return hash((self.op, self.attrs, self.shapes, self.dtype, self.mask, self.by_columns))

    @property
    def call(self) -> Call:
        """Return the call of a program that has these sizes alone."""
        shapes = tuple(tuple(map(const, shape)) for shape in self.shapes)
        return Call(self.op, self.attrs, shapes, self.dtype, self.mask, self.by_columns)

    def attr(self, name: str) -> Any:
        return dict(self.attrs)[name]


class Lies(Enum):
    """An operand must lie in memory in one of these ways. All kinds but the last four want an
    address that is a multiple of 16 bytes, and all fewer than 2^31 elements."""

    DENSE = "dense in the order of its dims"
    ROWS = "its last dim is dense, and other strides are multiples of 16 bytes"
    ANYHOW = "any strides"
    LINES = "its last dim is dense, and other strides are even, at any address"
    RUNS = "its last dim is dense, and other strides are any, at any address"
    PIXELS = "the channels of (B, C, H, W) are dense, and pixels in one step, at any address"
    UNALIGNED = "any strides, at any address"


@dataclass(frozen=True, slots=True)
class View:
    """The tensor memory accelerator sees this of an operand: sizes and strides, and the box it
    moves where the launch tells it. None stands for those that the operand has, behind ``ones``
    dims of 1."""

    sizes: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    box: tuple[int, ...] = ()
    ones: int = 0


@dataclass(frozen=True, slots=True)
class Operand:
    """This is one tensor of a launch: input ``number`` of the call, its result (RESULT), or a piece
    of scratch (``scratch(n)``).

    ``piece`` picks, for each pair (dim, index) or triple (dim, begin, length), a part of it;
    ``order`` then permutes its dims to how the kernel reads them. ``shape`` has the sizes that the
    first numbers of scratch are seen as, where these are not its own.
    """

    number: int
    lies: Lies = Lies.DENSE
    order: tuple[int, ...] = ()
    piece: tuple[tuple[int, ...], ...] = ()
    shape: tuple[int, ...] = ()
    view: View | None = None

    @property
    def is_a_piece(self) -> bool:
        """Tell whether the kernel sees anything but the tensor as it is."""
        return bool(self.piece or self.order or self.shape or self.view)


RESULT = -1


def scratch(number: int) -> int:
    """Return the ``number`` of an Operand that is a piece of scratch."""
    return RESULT - 1 - number


@dataclass(frozen=True, slots=True)
class Stride:
    """The launch takes this scalar from an operand, in units of so many elements."""

    operand: int  # its place among the launch's operands
    dim: int
    unit: int = 1


class Late(Enum):
    """The launch takes this scalar from the program around it: 1 where a kernel that may still run
    writes the weights, which are the call's second input, and its fourth where it multiplies two
    pairs (``ir.contractions.FACTORS``), else 0."""

    WEIGHTS = "weights"


Scalar = int | Stride | Late


@dataclass(frozen=True, slots=True)
class Fetched:
    """A launch on a CPU reads this first: of an operand, by its place among the launch's, so many
    ``rows`` of ``length`` elements each, where the other ``dims`` than the first are dense.

    Whoever runs before it may fetch that: the launch's last NUM_FETCHED scalars, which are 0 at
    first, tell of what the next such launch reads: its address, and bytes from row to row and of a
    row, and rows.
    """

    operand: int
    rows: int
    length: int
    dims: tuple[int, ...]


NUM_FETCHED = 4


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch gets a pointer for each operand, then the scalars."""

    source: KernelSource
    operands: tuple[Operand, ...]
    scalars: tuple[Scalar, ...]
    fetched: Fetched | None = None


@dataclass(frozen=True, slots=True)
class Torch:
    """A library is called between launches: ``name`` is a row of
    ``runtime.run.launched_calls.TORCH``."""

    name: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class PartScratch:
    """This is working memory that parts share.

    ``packs``, where it is not negative, is the input of the call whose weight the kernel packs into
    such memory, which says of what bits that was made: it is kept, zero at first, and shared by all
    kernels that pack the same weight so.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    packs: int = -1

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Launches:
    """A kernel runs all of this for one call, in order.

    ``result`` and ``order`` say, where the call allocates its result, its sizes, and the order of
    its dims in memory, outermost first.
    """

    parts: tuple[Launch | Torch, ...]
    scratch: tuple[PartScratch, ...] = ()
    result: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    @cached_property
    def only(self) -> Launch | None:
        """Return the launch of a call that is nothing but one kernel over whole operands, whose
        scalars are known or strides."""
        (part, *more) = self.parts
        if more or not isinstance(part, Launch) or any(each.is_a_piece for each in part.operands):
            return None
        return part if all(isinstance(each, int | Stride) for each in part.scalars) else None

    @cached_property
    def working(self) -> tuple[PartScratch, ...]:
        """Return the memory of which nothing is kept from one call to the next."""
        return tuple(each for each in self.scratch if each.packs < 0)

    @property
    def ends_ours(self) -> bool:
        """Say whether a hand-written kernel is the last, beside whose end the next one may
        begin."""
        return isinstance(self.parts[-1], Launch)

    @property
    def sources(self) -> tuple[KernelSource, ...]:
        found = (part.source for part in self.parts if isinstance(part, Launch))
        return tuple(dict.fromkeys(found))


def _no_launches(problem: Problem, device: Device) -> Launches | None:
    return None


def _no_forms(call: Call, device: Device) -> Iterable[KernelSource]:
    return ()


@dataclass(frozen=True, slots=True)
class Kernel:
    """This is a row of the library.

    ``supports`` gives "" where the kernel can do such a call on such a device at some sizes, else
    the reason for the no, a clause that goes on from "it". ``cost_us`` gives microseconds, FASTEST
    or NEVER. ``launch`` gives None where a library is called, which looks at memory itself.
    ``forms`` gives what the row may launch at any sizes, for builds in the background, and
    ``beside`` what runs beside each call of the library.
    """

    name: str
    ops: tuple[str, ...]
    supports: Callable[[Call, Device], str]
    cost_us: Callable[[Problem, Device], float]
    launch: Callable[[Problem, Device], Launches | None] = _no_launches
    forms: Callable[[Call, Device], Iterable[KernelSource]] = _no_forms
    beside: tuple[KernelSource, ...] = ()

"""Attention with heads wider than any library's fast kernel: two products and rows between them.

The VAE of Stable Diffusion has one head of 512. cuDNN and flash end at 256; what torch runs instead
took 348 us at 64 x 64 latents on an H100, a tenth of what its tensor cores can do. The scores are
fp32 and exist for a few queries at a time. Weights are rounded to half precision before the second
product, as every fused kernel does, and divided by the sum of the rounded ones after it. All of it
lies in the program's working memory, 392 MiB at 128 x 128 latents: a decoder has more than that for
its largest pictures, which are not there yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.ir.dims import Expr
from strop.ir.functions import HALVES
from strop.ir.program import CallStep, Program, Step
from strop.ir.source import KernelSource
from strop.kernels.attention.exp_rows import MULTIPLE, exp_rows
from strop.runtime.build.loader import BoundKernel, KernelLoader
from strop.runtime.run.memory import aligned

WIDEST_OF_LIBRARIES = 256
SCORES_BYTES = 256 << 20  # of the fp32 scores that exist at once
QUERIES_MULTIPLE = 128  # a tile of the library's products
Sizes = Callable[[tuple[Expr, ...]], Sequence[int]]


def is_wide(attrs: Mapping[str, Any], shapes: Sequence[Sequence[Expr]], dtype: torch.dtype) -> bool:
    """Whether these operands of an attention call, (B, H, S, D) each, are for this module."""
    widths = [shape[-1] for shape in shapes]
    return (
        len(shapes) == 3  # no mask
        and not attrs["causal"]
        and (attrs["scale"] is None or attrs["scale"] > 0)
        and dtype in HALVES
        and all(w.is_const and w.value % 8 == 0 for w in widths)
        and widths[0].value > WIDEST_OF_LIBRARIES
    )


@dataclass(frozen=True, slots=True)
class Part:
    """Working memory for some queries: where scores (BH, Q, S) and sums (BH, Q, 1) in fp32, weights
    in half precision, and the result (BH, Q, E) in fp32 lie, and ``size_bytes`` of them all."""

    shapes: tuple[tuple[int, int, int], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, heads: int, queries: int, keys: int, width: int, dtype: torch.dtype) -> Part:
        """``heads``: of all in the batch."""
        scores = (heads, queries, keys)
        shapes = (scores, scores, (heads, queries, 1), (heads, queries, width))
        return cls(shapes, (torch.float32, dtype, torch.float32, torch.float32))

    @classmethod
    def most(cls, q: Sequence[int], k: Sequence[int], v: Sequence[int], dtype: torch.dtype) -> Part:
        """For as many queries as there are at once, of operands (B, H, S, D) of these sizes."""
        heads, queries, keys = q[0] * q[1], q[2], k[2]
        return cls.of(heads, chunk_of(queries, heads * keys), keys, v[3], dtype)

    @property
    def sizes(self) -> list[int]:
        """In bytes, each to where the next may begin."""
        sizes = (math.prod(s) * d.itemsize for s, d in zip(self.shapes, self.dtypes, strict=True))
        return [aligned(size) for size in sizes]

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes)

    def within(self, memory: Tensor) -> list[Tensor]:
        """Scores, weights, sums and result in these bytes."""
        pieces = memory[: self.size_bytes].split(self.sizes)
        return [
            piece[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for piece, shape, dtype in zip(pieces, self.shapes, self.dtypes, strict=True)
        ]


def wide_steps(
    program: Program, steps: Sequence[Step | None], others: Collection[int]
) -> Iterator[tuple[int, CallStep, torch.dtype]]:
    """The attentions that may be for this module, their positions, and the type of their operands.
    ``others``: steps that somebody else does."""
    for position, step in enumerate(steps if program.device == "cuda" else ()):
        if not isinstance(step, CallStep) or step.op != "attention" or position in others:
            continue
        dtype = program.buffers[step.inputs[0].buffer].dtype
        if is_wide(dict(step.attrs), [ref.shape for ref in step.inputs], dtype):
            yield position, step, dtype


def working_bytes(
    program: Program, steps: Sequence[Step | None], others: Collection[int], sizes: Sizes
) -> dict[int, int]:
    """By step, what the attentions that are for this module want at these sizes. Operands that are
    broadcast, or empty, are left to the library."""
    found = dict[int, int]()
    for position, step, dtype in wide_steps(program, steps, others):
        q, k, v = (sizes(ref.shape) for ref in step.inputs)
        if q[:2] == k[:2] and k[:3] == v[:3] and math.prod(q) * math.prod(k):
            found[position] = Part.most(q, k, v, dtype).size_bytes
    return found


def sources_at(
    program: Program, steps: Sequence[Step | None], others: Collection[int], sizes: Sizes
) -> list[KernelSource]:
    """The kernels that these attentions launch at these sizes, between their products."""
    return [
        _rows_of(step, dtype, sizes(step.inputs[1].shape)[2])
        for _, step, dtype in wide_steps(program, steps, others)
    ]


def sources_anywhere(program: Program) -> list[KernelSource]:
    """The same at any sizes."""
    return [
        _rows_of(step, dtype, length)
        for length in (MULTIPLE, 1)
        for _, step, dtype in wide_steps(program, program.steps, ())
    ]


def _rows_of(step: CallStep, dtype: torch.dtype, keys: int) -> KernelSource:
    given = dict(step.attrs)["scale"]
    return exp_rows(dtype, scale_of(given, step.inputs[0].shape[-1].value), keys)


def scale_of(given: float | None, width: int) -> float:
    """Of scores: torch's own, where none is given."""
    return width**-0.5 if given is None else given


class WideAttention:
    """One attention step on one stream. Its result is allocated, as a library's is; ``memory``:
    its ``working_bytes`` at least, of which nothing is kept."""

    def __init__(
        self, scale: float | None, kernels: KernelLoader, stream: int, memory: Tensor
    ) -> None:
        self._scale, self._memory = scale, memory
        self._kernels, self._stream = kernels, stream
        self._bound: dict[tuple[int, int], BoundKernel] = {}

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        q, k, v = inputs
        b, heads, queries, _ = q.shape
        out = q.new_empty(b, queries, heads, v.shape[-1]).transpose(1, 2)
        flat = [x.reshape(b * heads, *x.shape[2:]) for x in (q, k, v)]
        step = chunk_of(queries, b * heads * k.shape[2])
        for begin in range(0, queries, step):
            part = self._part(flat[0][:, begin : begin + step], flat[1], flat[2])
            out[:, :, begin : begin + step] = part.view(b, heads, *part.shape[1:])
        return out

    def _part(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(BH, Q, D), (BH, S, D), (BH, S, E) -> (BH, Q, E) in fp32, until the next one."""
        (heads, queries, _), (_, keys, width) = q.shape, v.shape
        part = Part.of(heads, queries, keys, width, q.dtype)
        scores, weights, sums, result = part.within(self._memory)
        product(q, k.transpose(1, 2), scores)
        self._exp_rows(scores, weights, sums, scale_of(self._scale, q.shape[-1]))
        product(weights, v, result)
        return result.div_(sums)

    def _exp_rows(self, scores: Tensor, weights: Tensor, sums: Tensor, scale: float) -> None:
        rows, length = sums.numel(), scores.shape[-1]
        kernel = self._bound.get((rows, length))
        if kernel is None:
            source = exp_rows(weights.dtype, scale, length)
            self._kernels.build([source])
            kernel = self._kernels.bind(source, [0, 0, 0], [length, rows], self._stream)
            self._bound[rows, length] = kernel
        for place, tensor in enumerate((scores, weights, sums)):
            kernel.set_pointer(place, tensor.data_ptr())
        kernel()


def chunk_of(queries: int, scores_a_query: int) -> int:
    """How many queries at a time."""
    most = SCORES_BYTES // (4 * scores_a_query) // QUERIES_MULTIPLE * QUERIES_MULTIPLE
    return min(max(most, QUERIES_MULTIPLE), queries)


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Half precision to fp32: scores and sums of weighted values are not rounded."""
    torch.bmm(a, b, out_dtype=torch.float32, out=out)

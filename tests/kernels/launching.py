"""Calls that the kernel library is asked about, and their launches by kernels that stand in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from strop.ir.device import Device
from strop.ir.dims import Expr, const, symbol
from strop.kernels import library
from strop.kernels import tuned as tuning
from strop.kernels.attention import rows as attention
from strop.kernels.attention.cases import MeasuredCase
from strop.kernels.attention.times import AnyTile
from strop.kernels.gemm import rows as gemm
from strop.kernels.gemm.implicit import ConvShape
from strop.kernels.gemm.rows import GemmForm
from strop.kernels.kernel import Call, Launches, Problem, mask_dtype
from strop.runtime.run.launched_calls import CallSite, Launched, scratch_bytes
from tests.gpus import H100

HALF = torch.float16
PLAIN: Mapping[str, Any] = {"causal": False, "scale": None}  # an attention
SAME: Mapping[str, Any] = {  # a convolution of 3x3 pixels that keeps height and width
    "stride": (1, 1),
    "padding": (1, 1),
    "dilation": (1, 1),
    "groups": 1,
}


def call(
    op: str, *shapes: Sequence[int | str | Expr], dtype: torch.dtype = HALF, **attrs: Any
) -> Call:
    """A call of a program. Text is a symbolic size."""
    sizes = tuple(tuple(map(_size, shape)) for shape in shapes)
    return Call(op, tuple(sorted(attrs.items())), sizes, dtype, _mask_of(op, shapes, dtype))


def _mask_of(op: str, shapes: Sequence[Any], dtype: torch.dtype) -> torch.dtype | None:
    """The type of a mask that is one of numbers."""
    return mask_dtype(op, [dtype] * len(shapes))


def _size(size: int | str | Expr) -> Expr:
    if isinstance(size, str):
        return symbol(size)
    return const(size) if isinstance(size, int) else size


def problem(op: str, *shapes: Sequence[int], dtype: torch.dtype = HALF, **attrs: Any) -> Problem:
    """A call at sizes that are known."""
    mask = _mask_of(op, shapes, dtype)
    return Problem(op, tuple(sorted(attrs.items())), tuple(map(tuple, shapes)), dtype, mask)


@contextmanager
def measured(*cases: MeasuredCase) -> Iterator[None]:
    """Let these be all that was measured of attention on the H100."""
    found = replace(tuning.FILES[0], cases=cases)
    caches = (tuning.tuned, library.select, library._known)
    try:
        with patch.object(tuning, "FILES", (found,)):
            for cache in caches:
                cache.cache_clear()
            yield
    finally:
        for cache in caches:
            cache.cache_clear()


def attends(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Problem:
    """The attention of these operands."""
    shapes = (tuple(x.shape) for x in (q, k, v))
    return problem("attention", *shapes, dtype=q.dtype, causal=False, scale=scale)


def by_tile(tile: AnyTile | None, asked: Problem, device: Device = H100) -> Launches | None:
    """What attention launches where this tile is the fastest; None where no row can."""
    rows = (attention.WGMMA, attention.CROSS, attention.TMA)
    with (
        patch.object(attention, "tile_of", lambda *sizes: tile),
        patch.object(attention, "nearest", lambda *case: None),
    ):
        found = (row.launch(asked, device) for row in rows)
        return next((launches for launches in found if launches is not None), None)


def by_form(form: GemmForm | None, asked: Problem, device: Device = H100) -> Launches | None:
    """What the WGMMA GEMM launches where this form is the fastest."""

    def found(of: ConvShape, end: str, device: Device) -> tuple[GemmForm | None, float]:
        return form, 0.0

    with patch.object(gemm, "form_of", found):
        return gemm.ROW.launch(asked, device)


def launched(
    launches: Launches | None,
    kernels: Any,
    stream: int = 0,
    *,
    is_early: bool = False,
    is_steady: bool = True,
    device: str = "cpu",
) -> Launched:
    """The launches of a call, ready to run, with working memory that is full of NaN."""
    assert launches is not None
    memory = None
    if launches.scratch:
        memory = torch.full((scratch_bytes(launches),), 0xFF, dtype=torch.uint8, device=device)
        if hasattr(kernels, "known"):
            kernels.known(memory)
    site = CallSite(kernels, stream, is_early=is_early, is_steady=is_steady)
    return Launched(launches, site, memory)


def refuse(inputs: Sequence[Tensor], *out: Tensor) -> Any:
    """Stands where a library is called that must not be."""
    raise AssertionError("left to the library")

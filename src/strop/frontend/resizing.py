"""Keep resized images whole while a module is traced.

``F.interpolate`` becomes ``strop.resize``, with a shape rule in arithmetic and ATen's own gradient.
``resize`` makes kernels of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.frontend.differentiated import define, is_transformed
from strop.frontend.formats import pictures
from strop.frontend.layouts import as_pictures, call_reshape

aten = torch.ops.aten
_library = torch.library.Library("strop", "FRAGMENT")
_CUDNN_CHANNELS, _CUDNN_PIXELS = 1024, 2**31  # at most; fewer than
_CUDNNS = (0, 0, True)  # bilinear, zeros outside, corners aligned
_MOST_PARTS = 64  # of a factor by which sizes stay polynomials

# Each mode has the name of ATen's operators, and the numbers of dims that they resize.
RESIZING = {
    "nearest": ("upsample_nearest{}d", (1, 2, 3)),
    "nearest-exact": ("_upsample_nearest_exact{}d", (1, 2, 3)),
    "linear": ("upsample_linear{}d", (1,)),
    "bilinear": ("upsample_bilinear{}d", (2,)),
    "trilinear": ("upsample_trilinear{}d", (3,)),
    "bicubic": ("upsample_bicubic{}d", (2,)),
}


def _resize(
    x: Tensor, size: Sequence[int], mode: str, align_corners: bool, scales: Sequence[float]
) -> Tensor:
    """Resize. ``scales`` are the factors that the call gives; none where sizes decide."""
    return _in_aten("", x, [size], mode, align_corners, scales)


def _resize_backward(
    grad: Tensor,
    size: Sequence[int],
    shape: Sequence[int],
    mode: str,
    align_corners: bool,
    scales: Sequence[float],
) -> Tensor:
    """Compute the gradient of images of ``shape`` that have been resized to ``size``."""
    return _in_aten("_backward", grad, [size, shape], mode, align_corners, scales)


def _in_aten(
    suffix: str,
    x: Tensor,
    sizes: Sequence[Sequence[int]],
    mode: str,
    align_corners: bool,
    scales: Sequence[float],
) -> Tensor:
    rank = len(sizes[0])
    overload = getattr(torch.ops.aten, RESIZING[mode][0].format(rank) + suffix).default
    align = () if mode.startswith("nearest") else (align_corners,)
    factors: Sequence[float | None] = scales or [None] * rank
    result: Tensor = overload(x, *sizes, *align, *factors)
    return result


_library.define(
    "resize(Tensor x, SymInt[] size, str mode, bool align_corners, float[] scales) -> Tensor"
)
_library.define(
    "resize_backward(Tensor grad, SymInt[] size, SymInt[] shape, str mode, bool align_corners,"
    " float[] scales) -> Tensor"
)


def _resize_shape(
    x: Tensor, size: Sequence[int], mode: str, align_corners: bool, scales: Sequence[float]
) -> Tensor:
    return pictures(x, (*x.shape[:2], *size))


def _resize_backward_shape(
    grad: Tensor, size: Sequence[int], shape: Sequence[int], *how: Any
) -> Tensor:
    return pictures(grad, shape) if len(shape) == 4 else grad.new_empty(shape)


class _Resized(torch.autograd.Function):
    """Resize with ATen's own gradient, as one call: torch would take the operator apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: Sequence[int], *how: Any) -> Tensor:
        ctx.shape, ctx.size, ctx.how = x.shape, size, how
        result: Tensor = torch.ops.strop.resize(x, size, *how)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (grad,) = gradients
        found = torch.ops.strop.resize_backward(grad, ctx.size, ctx.shape, *ctx.how)
        return found, None, None, None, None


def _differentiated(x: Tensor, *how: Any) -> Tensor:
    """Send transforms of ``torch.func`` and tangents through torch's own operator."""
    return _resize(x, *how) if is_transformed() else _Resized.apply(x, *how)  # type: ignore


define(_library, "resize", _resize, _resize_shape, _differentiated)
define(_library, "resize_backward", _resize_backward, _resize_backward_shape)


def call_interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Make nearest by a whole factor a broadcast: each pixel is read several times, none
    computed."""
    rank = input.dim() - 2
    factors = [float(factor) for factor in _each(scale_factor, rank)]
    if mode == "nearest" and rank == 2 and len(set(factors)) == 1 and is_repeat(factors[0]):
        factor = int(factors[0])
        n, c, h, w = input.shape
        tall = input.unsqueeze(3).unsqueeze(5).expand(n, c, h, factor, w, factor)
        return as_pictures(call_reshape(tall, n, c, h * factor, w * factor), input)
    is_known = mode in RESIZING and rank in RESIZING[mode][1]
    if not is_known or antialias or (size is None) == (scale_factor is None):
        return F.interpolate(
            input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        )
    sizes = _each(size, rank) or [
        _scaled(n, factor) for n, factor in zip(input.shape[2:], factors, strict=True)
    ]
    for length, scale in zip(input.shape[2:], factors, strict=False):
        torch._check(length >= math.ceil(1 / scale))  # torch refuses to make no pixels
    scales = [] if recompute_scale_factor else factors
    resized: Tensor = torch.ops.strop.resize(input, sizes, mode, bool(align_corners), scales)
    return resized


def is_repeat(factor: float) -> bool:
    """Tell whether eager reads each pixel so many times. It multiplies a place by the reciprocal in
    fp32, and where that is too small, as of 25, may arrive at the pixel before."""
    if not factor.is_integer() or factor < 1:
        return False
    return Fraction(torch.tensor(1 / factor, dtype=torch.float32).item()) * int(factor) >= 1


def _each(value: Any, rank: int) -> list[Any]:
    """Return one number for every dim; none for None."""
    if value is None:
        return []
    return list(value) if isinstance(value, tuple | list) else [value] * rank


def _scaled(size: int, factor: float) -> int:
    """Compute floor(size * factor), which for a binary fraction is arithmetic on integers."""
    ratio = Fraction(factor)
    if ratio.denominator <= _MOST_PARTS:
        return size * ratio.numerator // ratio.denominator
    return math.floor(float(size) * factor)


def call_grid_sampler(x: Tensor, grid: Tensor, mode: int, padding: int, align: bool) -> Tensor:
    """Choose among torch's samplers as ATen does (GridSampler.cpp), which asks on a GPU whether 32
    bits can count the pixels, by quotients of sizes: here it is asked where cuDNN's may run, by
    their number."""
    torch._check(x.shape[0] == grid.shape[0], lambda: "grid_sampler: batches differ")
    torch._check(x.dim() == grid.dim() in (4, 5), lambda: "grid_sampler: other dims")
    torch._check(grid.shape[-1] == x.dim() - 2, lambda: "grid_sampler: not a place for each dim")
    if x.dim() == 5:
        return aten.grid_sampler_3d(x, grid, mode, padding, align)  # type: ignore[no-any-return]
    if (mode, padding, align) == _CUDNNS and _may_be_cudnns(x, grid):
        return aten.cudnn_grid_sampler(x, grid)  # type: ignore[no-any-return]
    return aten.grid_sampler_2d(x, grid, mode, padding, align)  # type: ignore[no-any-return]


def _may_be_cudnns(x: Tensor, grid: Tensor) -> bool:
    each = (x, grid)
    return (
        all(t.is_cuda and torch.backends.cudnn.is_acceptable(t) for t in each)
        and x.shape[1] <= _CUDNN_CHANNELS
        and all(t.numel() < _CUDNN_PIXELS for t in each)
    )

"""Kernels of the sizes that models have, with the divisibility that a compiled graph proves."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from strop.ir.dims import const, symbol
from strop.ir.loops import LoopKernel, Schedule
from strop.ir.ops import compute_dtype
from tests.codegen import kernels
from tests.codegen.kernels import Sample, Writer, axis, envs, index, reads, writes

GROUPS = 32


def geglu(dtype: torch.dtype, channels: int) -> Sample:
    m = symbol("b") * symbol("h") * 64
    w = Writer(compute_dtype(dtype))
    value = w.load(0, index(r=2 * channels, c=1))
    gate = w.load(0, index(channels, r=2 * channels, c=1))
    w.store(1, index(r=channels, c=1), w.apply("mul", value, w.apply("gelu", gate)))
    axes = (axis("r", m),), (axis("c", channels),)
    params = reads(dtype) + writes(dtype)
    kernel = LoopKernel("geglu", Schedule.POINTWISE, *axes, params, w.take())
    return Sample(kernel, (m * (2 * channels), m * channels), envs("b h", [2, 8]))


def layer_norm(dtype: torch.dtype, channels: int) -> Sample:
    return kernels.layer_norm(dtype, channels)


def group_norm_stats(dtype: torch.dtype, channels: int) -> Sample:
    n, hw = symbol("n"), symbol("h") * symbol("w") * 64
    width, stats = channels // GROUPS, compute_dtype(dtype)
    w = Writer(stats)
    mean, var = w.reduce("moments", w.load(0, index(n=hw * channels, hw=channels, g=width, cg=1)))
    body = w.take()
    rstd = w.apply("rsqrt", w.apply("add", var, w.literal(1e-5)))
    w.store(1, index(n=GROUPS, g=1), mean)
    w.store(2, index(n=GROUPS, g=1), rstd)
    kernel = LoopKernel(
        "group_norm_stats",
        Schedule.COLUMN,
        (axis("n", n), axis("hw", hw, reduced=True)),
        (axis("g", GROUPS), axis("cg", width, reduced=True)),
        reads(dtype) + writes(stats, stats),
        body,
        w.take(),
    )
    numels = (n * hw * channels, n * GROUPS, n * GROUPS)
    return Sample(kernel, numels, envs("n h w", [2, 4, 8], [1, 1, 1]))


def group_norm_silu(dtype: torch.dtype, channels: int) -> Sample:
    n, hw = symbol("n"), symbol("h") * symbol("w") * 64
    width, stats = channels // GROUPS, compute_dtype(dtype)
    w = Writer(stats)
    at, lane = index(n=hw * channels, hw=channels, g=width, cg=1), index(g=width, cg=1)
    group = index(n=GROUPS, g=1)
    x = w.apply("mul", w.apply("sub", w.load(0, at), w.load(1, group)), w.load(2, group))
    x = w.apply("add", w.apply("mul", x, w.load(3, lane)), w.load(4, lane))
    w.store(5, at, w.apply("silu", x))
    kernel = LoopKernel(
        "group_norm_silu",
        Schedule.POINTWISE,
        (axis("n", n), axis("hw", hw)),
        (axis("g", GROUPS), axis("cg", width)),
        reads(dtype, stats, stats, dtype, dtype) + writes(dtype),
        w.take(),
    )
    size, row = n * hw * channels, const(channels)
    return Sample(kernel, (size, n * GROUPS, n * GROUPS, row, row, size), envs("n h w", [2, 4, 8]))


def nchw_to_nhwc(dtype: torch.dtype, channels: int) -> Sample:
    n, hw = symbol("n"), symbol("h") * symbol("w") * 64
    w = Writer(compute_dtype(dtype))
    x = w.load(0, index(n=hw * channels, c=hw, hw=1))
    w.store(1, index(n=hw * channels, hw=channels, c=1), x)
    axes = (axis("n", n), axis("hw", hw)), (axis("c", channels),)
    params = reads(dtype) + writes(dtype)
    kernel = LoopKernel("nchw_to_nhwc", Schedule.POINTWISE, *axes, params, w.take())
    return Sample(kernel, (n * hw * channels,) * 2, envs("n h w", [2, 4, 8]))


def silu_flat(dtype: torch.dtype, channels: int) -> Sample:
    n = symbol("n") * (64 * channels)
    w = Writer(compute_dtype(dtype))
    w.store(1, index(i=1), w.apply("silu", w.load(0, index(i=1))))
    params = reads(dtype) + writes(dtype)
    kernel = LoopKernel("silu_flat", Schedule.POINTWISE, (), (axis("i", n),), params, w.take())
    return Sample(kernel, (n, n), envs("n", [8]))


CONTIGUOUS: Mapping[str, Callable[[torch.dtype, int], Sample]] = {
    build.__name__: build
    for build in (
        geglu,
        layer_norm,
        group_norm_stats,
        group_norm_silu,
        nchw_to_nhwc,
        silu_flat,
    )
}

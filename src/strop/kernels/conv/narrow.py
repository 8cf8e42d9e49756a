"""These kernels convolve with few channels on one side: the first layer of a network, or its last.

Each is an implicit GEMM (https://arxiv.org/abs/1410.0759) of pixels x output channels, whose depth
is the window's places times the input channels. Libraries pad 3 or 4 channels to 8 with kernels of
their own, and compute 64 or more columns where a picture has 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from strop.ir.device import Device
from strop.ir.dims import symbol
from strop.ir.functions import HALVES
from strop.ir.source import KernelSource
from strop.kernels.kernel import (
    CHANNELS_LAST,
    FASTEST,
    RESULT,
    Call,
    Kernel,
    Launch,
    Launches,
    Lies,
    Operand,
    Problem,
    Stride,
)

MULTIPLE = 16  # of strides whose accesses are 16 bytes wide

_HEAD = """\
import triton
import triton.language as tl


@triton.jit
def narrow_conv(p0, p1, p2, s0, s1, s2, s3, s4, s5, s6, s7, s8, CI: tl.constexpr,
                CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, DOWN: tl.constexpr,
                RIGHT: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, PIXELS: tl.constexpr,
                COLS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr):
    tiles: tl.constexpr = (CO + COLS - 1) // COLS
    pixel = tl.program_id(0) // tiles * PIXELS + tl.arange(0, PIXELS)
    col = tl.program_id(0) % tiles * COLS + tl.arange(0, COLS)
    depth = tl.arange(0, DEPTH)
    line = pixel % s1 // s2 * DOWN - TOP
    column = pixel % s2 * RIGHT - LEFT
    place = pixel // s1 * s5 + line * s7 + column * s8
    weights = p1 + col[None, :] * (KH * KW * CI) + depth[:, None]
    acc = tl.full([PIXELS, COLS], 0.0, tl.float32)
"""
# Input channels are few: a step reads several places of the window, each a few numbers long.
_FEW_IN = """\
    for first in tl.static_range(0, KH * KW * CI, DEPTH):
        at = first + depth
        y = at // (KW * CI)
        x = at // CI % KW
        inside = (line[:, None] + y[None, :] >= 0) & (line[:, None] + y[None, :] < s3)
        inside = inside & (column[:, None] + x[None, :] >= 0) & (column[:, None] + x[None, :] < s4)
        inside = inside & (pixel < s0)[:, None] & (at < KH * KW * CI)[None, :]
        step = y * s7 + x * s8 + at % CI * s6
        a = tl.load(p0 + place[:, None] + step[None, :], mask=inside, other=0.0)
        known = (at < KH * KW * CI)[:, None] & (col < CO)[None, :]
        acc = tl.dot(a, tl.load(weights + first, mask=known, other=0.0), acc)
"""
# They are many: a step reads a part of one place's channels, which lie behind each other.
_MANY_IN = """\
    for step in tl.range(0, KH * KW * CI // DEPTH, num_stages=STAGES):
        y = step // (CI // DEPTH * KW)
        x = step // (CI // DEPTH) % KW
        inside = (line + y >= 0) & (line + y < s3) & (column + x >= 0) & (column + x < s4)
        inside = inside & (pixel < s0)
        at = place + y * s7 + x * s8 + step % (CI // DEPTH) * DEPTH
        a = tl.load(p0 + at[:, None] + depth[None, :], mask=inside[:, None], other=0.0)
        b = tl.load(weights + step * DEPTH, mask=(col < CO)[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
"""
_TAIL = """\
    known = (pixel < s0)[:, None] & (col < CO)[None, :]
    tl.store(p2 + pixel[:, None] * CO + col[None, :], acc.to(HALF), mask=known)
"""


@dataclass(frozen=True, slots=True)
class Window:
    """This says what a convolution is beside its tensors; pairs are (down, right)."""

    ins: int
    outs: int
    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]


@dataclass(frozen=True, slots=True)
class NarrowTile:
    """``depth`` divides the input channels if there are many of them."""

    pixels: int
    cols: int
    depth: int
    num_warps: int
    stages: int = 1


def narrow_conv(
    window: Window, tile: NarrowTile, dtype: torch.dtype, multiple: int
) -> KernelSource:
    """Return the kernel of a convolution with few channels on one side.

    out[b, y, x, o] = sum of w[o, i, j, c] * in[b, y * down + i - top, x * right + j - left, c].

    Params: the input at any strides, or if ``tile.depth`` divides its channels with these behind
    each other; weights (CO, KH, KW, CI) and result (B, OH, OW, CO), both dense. Sums are fp32.
    Scalars: B * OH * OW, OH * OW, OW, H, W and the input's strides of batch, channel, height and
    width, all multiples of ``multiple`` but that of the channel.
    """
    (kh, kw), (down, right), (top, left) = window.size, window.stride, window.padding
    constants = {
        "CI": window.ins,
        "CO": window.outs,
        "KH": kh,
        "KW": kw,
        "DOWN": down,
        "RIGHT": right,
        "TOP": top,
        "LEFT": left,
        "PIXELS": tile.pixels,
        "COLS": tile.cols,
        "DEPTH": tile.depth,
        "STAGES": tile.stages,
    }
    loop = _FEW_IN if window.ins % tile.depth else _MANY_IN
    pixel_tiles = (symbol("s0") + (tile.pixels - 1)) // tile.pixels
    return KernelSource(
        "narrow_conv",
        "triton",
        _HEAD + loop + _TAIL.replace("HALF", HALVES[dtype]),
        (dtype,) * 3,
        (1,) * 5 + (multiple, 1, multiple, multiple),
        (pixel_tiles * -(-window.outs // tile.cols),),
        constants=tuple(constants.items()),
        num_warps=tile.num_warps,
    )


# Measured on an H100 in fp16 (fit_kernels.py conv_narrow), us of cuDNN and ours: ResNet's
# first layer 12.7 and 5.1, with 33 pictures 83 and 56; UNet 4 -> 320 at 64x64 6.2 and 4.4; 3 -> 128
# at 512x512 69 and 27; UNet 320 -> 4 at 64x64 16.9 and 11.4; VAE 128 -> 3 at 512x512 105 and 87.
FEW = 4  # channels
DEEPEST = 160  # places of the window times few input channels: all steps are unrolled
FEW_IN = NarrowTile(pixels=128, cols=64, depth=32, num_warps=4)
FEW_OUT = NarrowTile(pixels=128, cols=16, depth=64, num_warps=4, stages=4)


def supports(call: Call, device: Device) -> str:
    if not device.arch:
        return "runs on GPUs"
    if len(call.shapes) != 2 or call.dtype not in HALVES:
        return "computes a convolution without bias in fp16 or bf16"
    weight = call.known(1)
    if weight is None or call.attr("groups") != 1 or tuple(call.attr("dilation")) != (1, 1):
        return "wants known weights, one group and no dilation"
    if _source(call.attrs, weight, call.dtype) is None:
        return f"is for up to {FEW} channels in or out"
    return ""


def _source(
    attrs: tuple[tuple[str, object], ...], weight: Sequence[int], dtype: torch.dtype
) -> KernelSource | None:
    """Return the kernel for such weights (CO, CI, KH, KW), or None where channels are many on both
    sides."""
    given: Mapping[str, Any] = dict(attrs)
    outs, ins, *size = weight
    window = Window(ins, outs, _pair(size), _pair(given["stride"]), _pair(given["padding"]))
    if ins <= FEW < outs and ins * size[0] * size[1] <= DEEPEST:
        cols = min(FEW_IN.cols, max(16, 1 << (outs - 1).bit_length()))
        return narrow_conv(window, replace(FEW_IN, cols=cols), dtype, 1)
    if outs <= FEW and ins % FEW_OUT.depth == 0:
        return narrow_conv(window, FEW_OUT, dtype, MULTIPLE)
    return None


def cost_us(problem: Problem, device: Device) -> float:
    return FASTEST


def launch(problem: Problem, device: Device) -> Launches | None:
    (batch, ins, *sides), weight = problem.shapes[:2]
    source = _source(problem.attrs, weight, problem.dtype)
    if source is None:
        return None
    window = zip(sides, weight[2:], problem.attr("stride"), problem.attr("padding"), strict=True)
    height, width = ((side + 2 * pad - size) // step + 1 for side, size, step, pad in window)
    steps = tuple(Stride(0, dim) for dim in (0, 3, 1, 2))  # batch, channel, height, width
    scalars = (batch * height * width, height * width, width, *sides, *steps)
    # channels that lie behind each other are read 16 bytes at once
    lies = Lies.ANYHOW if ins % dict(source.constants)["DEPTH"] else Lies.ROWS
    operands = (
        Operand(0, lies, CHANNELS_LAST),
        Operand(1, order=CHANNELS_LAST),
        Operand(RESULT, order=CHANNELS_LAST),
    )
    return Launches((Launch(source, operands, scalars),))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    weight = call.known(1)
    found = weight and _source(call.attrs, weight, call.dtype)
    return [found] if found else []


def _pair(numbers: Sequence[int]) -> tuple[int, int]:
    down, right = numbers
    return int(down), int(right)


ROW = Kernel("narrow_conv", ("conv2d",), supports, cost_us, launch, forms)

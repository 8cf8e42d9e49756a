"""Define what products and convolutions of codes stand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strop.ir.e4m3 import as_e4m3


def code_sums(x: Tensor, weight: Tensor, zeros: Tensor | None = None, *, zero: int = 0) -> Tensor:
    """Return the sums (M, N) of (x - zero) (weight - zeros) in fp64, all of them whole numbers and
    exact. ``x`` (M, K) and ``weight`` (N, K) hold int8 codes; ``zeros`` (N,) are whole numbers,
    None for 0."""
    own = weight.double()
    if zeros is not None:
        own = own - zeros.double()[:, None]
    return torch.matmul(x.double() - zero, own.t())


def code_conv2d(
    x: Tensor,
    weight: Tensor,
    zeros: Tensor | None = None,
    *,
    zero: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return the sums (N, O, HO, WO) of (x - zero) (weight - zeros) in fp64, all of them whole
    numbers and exact.

    ``x`` (N, C, H, W) and ``weight`` (O, C, KH, KW) hold int8 codes; ``zeros`` (O,) are whole
    numbers, None for 0. What lies outside of a picture counts as ``zero``, and so nothing.
    """
    own = weight.double()
    if zeros is not None:
        own = own - zeros.double()[:, None, None, None]
    return torch.conv2d(x.double() - zero, own, None, stride, padding, dilation, groups)


def scaled_conv2d(
    x: Tensor,
    weight: Tensor,
    pixels: Tensor,
    columns: Tensor,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return the convolution (N, O, HO, WO) in fp64 of ``x`` (N, C, H, W) times ``pixels`` (N, 1,
    H, W) with ``weight`` (O, C, KH, KW) times ``columns`` (O,).

    ``x`` and ``weight`` are e4m3 codes, or bytes that stand for them. Outside of a picture lie
    zeros.
    """
    values, own = as_e4m3(x).double() * pixels.double(), as_e4m3(weight).double()
    own = own * columns.double()[:, None, None, None]
    return torch.conv2d(values, own, None, stride, padding, dilation, groups)

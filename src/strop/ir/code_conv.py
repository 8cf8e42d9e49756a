"""Define what a convolution of int8 codes stands for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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

"""A convolution that is left to torch on a CPU goes to the one of its libraries that is quickest.

Torch itself chooses by other rules. It gives transposed convolutions to oneDNN, which needs 40 us
and a copy of the weight to begin: as long as twenty small products. A 3d one of one clip in one
thread it does by loops of its own, which take up to 4 times as long as oneDNN (docs/log/cpu.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Of 2 operations for each product, one thread of a Zen 5.
SMALL_FLOPS = 1 << 22  # in all, and half of it for a picture: more is quicker by oneDNN
FEW_PIXELS, MOST_OF_FEW = 16, 8  # products of so few pixels are slow, and each picture has its own
LEAST_FLOPS = 1 << 20  # of a 3d one: less is quicker by torch's own loops

_usual = torch.ops.aten.convolution.default
_by_products = torch._C._nn.slow_conv_transpose2d  # type: ignore[attr-defined]
_by_onednn = torch.mkldnn_convolution


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolve as ``aten.convolution`` does: sums may be added in another order, as between its
    libraries."""
    if groups == 1 and x.dtype is torch.float32 and weight.dtype is torch.float32 and x.numel():
        if transposed and x.dim() == 4:
            if _is_one_pixel(x, padding, dilation, output_padding):
                return _spread(x, weight, bias)
            if _is_small(x, weight):
                sizes = list(weight.shape[2:])
                made: Tensor = _by_products(
                    x, weight, sizes, bias, stride, padding, output_padding, dilation
                )
                return made
        elif not transposed and x.dim() == 5 and _is_for_onednn(x, weight, stride):
            clip: Tensor = _by_onednn(x, weight, bias, padding, stride, dilation, 1)
            return clip
    result: Tensor = _usual(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )
    return result


def _is_one_pixel(x: Tensor, *settings: Sequence[int]) -> bool:
    padding, dilation, output_padding = settings
    is_plain = not any(padding) and not any(output_padding) and all(n == 1 for n in dilation)
    return is_plain and x.shape[2] == x.shape[3] == 1


def _spread(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply (N, C, 1, 1) by (C, O, H, W) to (N, O, H, W): windows do not overlap."""
    rows = torch.mm(x.reshape(x.shape[:2]), weight.reshape(len(weight), -1))
    found = rows.view(len(x), *weight.shape[1:])
    return found if bias is None else found.add_(bias[:, None, None])


def _is_small(x: Tensor, weight: Tensor) -> bool:
    batch, _, height, width = x.shape
    flops = 2 * height * width * weight.numel()
    is_few = height * width < FEW_PIXELS and batch > MOST_OF_FEW
    return flops * 2 <= SMALL_FLOPS and flops * batch <= SMALL_FLOPS and not is_few


def _is_for_onednn(x: Tensor, weight: Tensor, stride: Sequence[int]) -> bool:
    """Tell whether this is a 3d convolution of one clip that is long. About strides nothing was
    found out, where torch takes oneDNN itself."""
    if len(x) > 1 or any(n > 1 for n in stride) or not torch.backends.mkldnn.is_available():
        return False
    if not torch._C._get_mkldnn_enabled() or math.prod(weight.shape[2:]) == 1:
        return False
    return 2 * math.prod(x.shape[2:]) * weight.numel() >= LEAST_FLOPS

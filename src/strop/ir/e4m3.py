"""Round fp32 to floats of 8 bits (e4m3) in every kernel, as torch rounds."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from strop.ir.graph import Builder, Node

I32, F32, BYTES = torch.int32, torch.float32, torch.uint8
_NAN = 0x7F
_LARGEST = 464.0  # that rounds to 448: half way to 480, which e4m3 lacks, and 448 is even


@lru_cache(maxsize=1)
def _saturates() -> bool:
    """Tell whether this torch rounds what is too large to the largest number, and not to NaN."""
    return bool(torch.tensor(1e9).to(torch.float8_e4m3fn).float().isfinite())


def encoded(b: Builder, x: Node, *, is_bounded: bool = False) -> Node:
    """Return fp32 rounded to e4m3, to even, as bytes, as torch does
    (``c10/util/Float8_e4m3fn.h``). ``is_bounded``: no number is larger than 464."""
    code = b.pointwise("e4m3_code", x, dtype=I32)
    if not is_bounded and not _saturates():
        size = b.pointwise("abs", x, dtype=F32)
        limit = b.constant(_LARGEST, F32)
        too_large = b.pointwise("gt", size, limit, dtype=torch.bool)
        nan = b.pointwise("bitwise_or", code, b.constant(_NAN, I32), dtype=I32)
        code = b.pointwise("where", too_large, nan, code, dtype=I32)
    return b.cast(code, BYTES)


def as_e4m3(codes: Tensor) -> Tensor:
    """View bytes, which kernels store, as the codes that they stand for; codes stay as they are."""
    return codes.view(torch.float8_e4m3fn) if codes.dtype is torch.uint8 else codes

"""Multiply e4m3 codes by torch's ``_scaled_mm``, into memory of ours.

Codes that kernels have stored are bytes, and seen as e4m3 here. cuBLAS adds the bias to sums that
are scaled, in fp32, and rounds once to bf16, fp16 or fp32. By rows torch calls it on Hopper, in
builds for CUDA 12.9 and newer (``aten/src/ATen/native/cuda/ScaledBlas.cpp``), and CUTLASS
elsewhere, whose results are in bf16: what is wanted in another type is rounded to bf16 first then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from strop.ir.e4m3 import as_e4m3

OutCall = Callable[[Sequence[Tensor], Tensor], Any]
CUBLAS_BY_ROWS = (12, 9)  # the first CUDA whose cuBLAS scales by rows
HOPPER = 9


def on_cpu(attrs: Mapping[str, Any]) -> OutCall:
    """Return the call: codes (M, K) and (N, K), their scales[, a bias (N,)], to (M, N)."""
    is_fast = attrs["is_fast"]

    def call(inputs: Sequence[Tensor], out: Tensor) -> None:
        _write(inputs, out, is_fast)

    return call


def on_gpu(attrs: Mapping[str, Any]) -> OutCall:
    """Return the same call for a GPU."""
    is_fast = attrs["is_fast"]

    def call(inputs: Sequence[Tensor], out: Tensor) -> None:
        by_rows = inputs[2].numel() > 1 or inputs[3].numel() > 1
        if out.dtype is torch.bfloat16 or not by_rows or _is_cublas(out.device):
            _write(inputs, out, is_fast)
        else:
            product = torch.empty_like(out, dtype=torch.bfloat16)
            _write(inputs[:4], product, is_fast)
            _add(product, inputs[4:], out)

    return call


def _write(inputs: Sequence[Tensor], out: Tensor, is_fast: bool) -> None:
    codes, weight, rows, columns, *bias = inputs
    turned, added = as_e4m3(weight).t(), bias[0] if bias else None
    torch._scaled_mm(
        as_e4m3(codes), turned, rows, columns, added, None, out.dtype, is_fast, out=out
    )


def _add(product: Tensor, bias: Sequence[Tensor], out: Tensor) -> None:
    """Write a product and its bias, which are added in fp32, to another type."""
    if bias:
        torch.add(product, bias[0], out=out)
    else:
        out.copy_(product)


@lru_cache
def _is_cublas(device: torch.device) -> bool:
    """Tell whether torch gives products that are scaled by rows to cuBLAS on this GPU."""
    version = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    return torch.cuda.get_device_capability(device)[0] == HOPPER and version >= CUBLAS_BY_ROWS

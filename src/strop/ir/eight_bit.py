"""Define linears that are computed in 8 bits: y = s_x s_w (codes of x) (codes of W)^T + b.

Rows of values and rows of the weight (one for each column of the result) have a scale each: their
largest number over the largest code. A code is the number over the scale, rounded to the format, to
even. Products of int8 codes are summed up in int32, exactly; those of e4m3 codes in fp32, which the
library promotes from the tensor cores' shorter sums every few steps. Scales and bias are applied in
fp32, and the result is rounded once (but fp16 twice, to bf16 first, where torch has another library
than cuBLAS for e4m3 codes: ``runtime.run.scaled_calls``). Scales, codes and sums of e4m3 are those
that torchao's dynamic quantisation by rows has; its int8 divides by 127, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# The least largest number of a row that has a scale: rows of zeros have codes of 0.
LEAST = 2.0**-100
NAMED = "Options.exact_layers names it"  # why a linear is exact that could be in 8 bits
MARK = "format"  # the attribute of a call that is to be computed in 8 bits: in which
CODES, SCALES = "codes", "scales"  # what an argument that is made of weights holds


@dataclass(frozen=True, slots=True)
class Format:
    """Describe codes. ``most`` is the largest; ``multiple``: libraries multiply on a GPU if depth
    and columns are multiples of it. ``device.EIGHT_BIT`` says which GPUs multiply them."""

    name: str
    dtype: torch.dtype
    most: float
    multiple: int

    def quantised(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of rows (M, K) and their scales (M,) in fp32. A row that holds NaN or
        inf has no finite scale, so that nothing finite comes of it."""
        wide = rows.float()
        most = wide.abs().amax(1).clamp_min(LEAST)
        codes = wide * (self.most / most)[:, None]
        if not self.dtype.is_floating_point:
            codes = codes.round()
        return codes.to(self.dtype), most / self.most


FORMATS: Mapping[str, Format] = {
    one.name: one
    for one in (
        Format("int8", torch.int8, 127.0, 8),
        Format("fp8", torch.float8_e4m3fn, 448.0, 16),
    )
}


def eight_bit_linear(x: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """Return y (..., N) of x's type for x (..., K), weight (N, K) and bias (N,), by the rule above
    in plain torch: what compiled code is held against. Sums of codes are exact for int8, and in
    fp64 for fp8."""
    own = FORMATS[name]
    codes, scales = own.quantised(x.reshape(-1, x.shape[-1]))
    others, columns = own.quantised(weight)
    sums = (codes.double() @ others.double().t()).float()
    y = sums * (scales[:, None] * columns)
    y = y if bias is None else y + bias.float()
    return y.to(x.dtype).reshape(*x.shape[:-1], len(weight))

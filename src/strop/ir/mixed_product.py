"""Define what a product of int8 codes stands for, with columns that it leaves out (LLM.int8)."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = 1 / 127  # a code is so much of the largest number of its row


def mixed_product(
    sums: Tensor,
    most: Tensor,
    x: Tensor,
    columns: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Return y (M, N) of x's type: ``sums`` scaled, plus bias, plus x W^T over the ``columns``.

    ``sums`` (M, N) int32 are those of the codes; ``most`` (M, 1) fp32 is the largest number of each
    row of x (M, K) that has a code, ``columns`` (K,) bool says which columns have none. ``codes``
    (N, K) int8 and ``scales`` (N,) fp32, the largest number of each row, are the weight's. It is
    all computed in fp32, or in x's type if that is wider, and rounded once.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = sums.to(wide) * (most * scales) * UNIT**2
    y = y if bias is None else y + bias
    if columns.device.type == "cpu":
        (places,) = columns.nonzero(as_tuple=True)
        if not len(places):
            return y.to(x.dtype)
        x, codes = x[:, places], codes[:, places]
    else:  # the host cannot look at them without a wait
        x = torch.where(columns, x, 0)
    weight = codes.to(wide) * (scales * UNIT)[:, None]
    return torch.addmm(y, x.to(wide), weight.t()).to(x.dtype)

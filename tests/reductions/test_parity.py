"""Every reduction and normalisation on the CPU against eager and fp64: types, dims and strides.

One module holds all rows of the table for one layout of its input, so that one run of the compiler
serves all. Sizes are symbols; each module runs at several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom")

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I32, I64, U8, BOOL = torch.int32, torch.int64, torch.uint8, torch.bool
FLOATS, EXACT = (F16, BF16, F32, F64), (I32, I64, U8, BOOL)
Function = Callable[..., Any]


def over_dims(function: Function, *, whole: bool = True, pairs: bool = True) -> Function:
    """All dims of a (3-d) input, singly, in pairs and all together."""

    def call(x: Tensor) -> list[Any]:
        found = [function(x, 0), function(x, -2, keepdim=True), function(x, 2)]
        found += [function(x, (0, -1)), function(x, (1, 2), keepdim=True)] if pairs else []
        return [*found, function(x)] if whole else found

    return call


def norm(x: Tensor, p: float) -> list[Tensor]:
    n = torch.linalg.vector_norm
    return [n(x, p), n(x, p, dim=1), n(x, p, dim=(0, 2), keepdim=True)]


def _near_one(x: Tensor) -> Tensor:
    """Exact, and the product of many is neither 0 nor inf."""
    return (x > 0).to(x.dtype) * 0.25 + 0.875 if x.dtype.is_floating_point else x > 0


ANY: Mapping[str, Function] = {
    "sum": over_dims(torch.sum),
    "amax": over_dims(torch.amax),
    "amin": over_dims(torch.amin),
    "any": over_dims(torch.any),
    "all": over_dims(torch.all),
    "prod": over_dims(lambda x, *a, **k: torch.prod(_near_one(x), *a, **k), pairs=False),
    "count_nonzero": lambda x: [(x > 0).count_nonzero(), (x > 0).count_nonzero(1)],
    "max": lambda x: [x.max(), *x.max(1), *x.max(-1, keepdim=True)],
    "min": lambda x: [x.min(), *x.min(0), *x.min(2)],
    "argmax": over_dims(torch.argmax, pairs=False),
    "argmin": over_dims(torch.argmin, pairs=False),
}
FLOAT: Mapping[str, Function] = {
    "mean": over_dims(torch.mean),
    "sum_in_fp64": lambda x: [x.sum(dtype=F64), x.mean(1, dtype=F64)],
    "var": over_dims(torch.var),
    "var_corrected": lambda x: [x.var(1, correction=0), x.var((0, 1), correction=2)],
    "std": over_dims(torch.std),
    "var_mean": lambda x: [*torch.var_mean(x), *torch.var_mean(x, (0, 2), keepdim=True)],
    "std_mean": lambda x: [*torch.std_mean(x, -1), *torch.std_mean(x, (1, 2), correction=0)],
    "aminmax": lambda x: [*torch.aminmax(x), *torch.aminmax(x, dim=1, keepdim=True)],
    "logsumexp": over_dims(torch.logsumexp, whole=False),
    "norm_1": lambda x: norm(x, 1),
    "norm_2": lambda x: norm(x, 2),
    "norm_inf": lambda x: norm(x, float("inf")),
    "softmax": lambda x: [x.softmax(d) for d in (0, 1, -1)],
    "log_softmax": lambda x: [x.log_softmax(d) for d in (0, 1, -1)],
    "layer_norm": lambda x: [F.layer_norm(x, x.shape[-1:]), F.layer_norm(x, x.shape[1:])],
    "rms_norm": lambda x: [x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)],
    "group_norm": lambda x: [F.group_norm(x, 1)],
    "instance_norm": lambda x: [F.instance_norm(x)] if x.shape[2] > 1 else [],
}
INTEGER: Mapping[str, Function] = {
    "sum_as_fp32": lambda x: [x.sum(dtype=F32), x.sum(1, dtype=F32)],
    "mean_as_fp32": lambda x: [x.mean(dtype=F32), x.mean((0, 2), dtype=F32)],
}
# how the operand lies in memory
LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "permuted": lambda x: x.permute(1, 2, 0),
    "sliced": lambda x: x.narrow(1, 1, 5),
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


class Table(nn.Module):
    """All rows of a table for one layout, one after another."""

    def __init__(self, table: Mapping[str, Function], layout: str) -> None:
        super().__init__()
        self.table, self.layout = table, LAYOUTS[layout]

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        return {name: function(self.layout(x)) for name, function in self.table.items()}


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=F64).to(dtype)
    return torch.randint(0, 2 if dtype == BOOL else 9, shape, generator=generator).to(dtype)


def check(module: nn.Module, x: Tensor) -> None:
    eager = type(module).forward(module, x)
    wide = x.double() if x.dtype.is_floating_point else x
    exact = type(module).forward(module, wide)
    for name, found in module(x).items():
        for i, (ours, theirs, reference) in enumerate(
            zip(found, eager[name], exact[name], strict=True)
        ):
            assert ours.shape == theirs.shape, (name, i)
            try:
                if ours.dtype in (F64, *EXACT) or ours.numel() < 8:
                    _close(
                        ours, reference.to(theirs.dtype)
                    )  # fp64 has no judge, and the error of few is luck
                else:
                    assert_as_accurate_as_eager(ours, theirs, reference.double())
            except AssertionError as error:
                raise AssertionError(f"{name}[{i}] of {tuple(x.shape)}: {error}") from error


def _close(ours: Tensor, theirs: Tensor) -> None:
    eps = torch.finfo(theirs.dtype).eps if theirs.dtype.is_floating_point else 0.0
    torch.testing.assert_close(ours, theirs, rtol=8 * eps, atol=64 * eps, equal_nan=True)


def rows(dtype: torch.dtype) -> Mapping[str, Function]:
    table = {**ANY, **(FLOAT if dtype.is_floating_point else INTEGER)}
    if dtype == BOOL:  # torch has no argmax of bools
        table = {n: f for n, f in table.items() if not n.startswith("arg")}
    return table


LAYOUT_AND_DTYPE = [
    *(("contiguous", dtype) for dtype in FLOATS + EXACT),
    *((layout, F32) for layout in LAYOUTS if layout != "contiguous"),
]


@pytest.mark.parametrize(("layout", "dtype"), LAYOUT_AND_DTYPE, ids=str)
def test_parity(layout: str, dtype: torch.dtype):
    module = Table(rows(dtype), layout).eval()
    with torch.no_grad():
        strop.optimize(module, options=Options(strict=True))
        for shape in ((5, 7, 11), (3, 33, 11), (1, 9, 65))[: 3 if dtype in (F16, I64) else 2]:
            check(module, values(shape, dtype))
    assert not [call for v in module.forward.variants.all for call in v.program.call_steps]

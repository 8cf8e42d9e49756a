"""Convolutions that are left to torch on a CPU, by whichever of its libraries is quickest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from strop.runtime.run import cpu_convolutions
from strop.runtime.run.cpu_convolutions import convolve

USUAL = torch.ops.aten.convolution.default
ONE, TWO, NONE = (1, 1), (2, 2), (0, 0)

# x, weight, stride, padding, dilation, output padding, groups
TRANSPOSED = {
    "one pixel": ((3, 6, 1, 1), (6, 5, 4, 3), TWO, NONE, ONE, NONE, 1),
    "one pixel apart": ((3, 6, 1, 1), (6, 5, 4, 3), TWO, NONE, TWO, NONE, 1),
    "one pixel cut": ((3, 6, 1, 1), (6, 5, 4, 3), TWO, ONE, ONE, NONE, 1),
    "one pixel and more": ((3, 6, 1, 1), (6, 5, 4, 4), TWO, NONE, ONE, ONE, 1),
    "overlapping": ((2, 6, 5, 4), (6, 3, 4, 4), TWO, ONE, ONE, NONE, 1),
    "apart": ((2, 6, 5, 4), (6, 3, 2, 2), TWO, NONE, ONE, NONE, 1),
    "padded": ((2, 6, 5, 4), (6, 3, 3, 2), (2, 3), (1, 0), TWO, (1, 1), 1),
    "groups": ((2, 6, 5, 4), (6, 3, 3, 3), TWO, ONE, ONE, NONE, 2),
    "few pixels": ((20, 6, 2, 2), (6, 3, 3, 3), TWO, ONE, ONE, NONE, 1),
    "large": ((2, 64, 24, 24), (64, 40, 4, 4), TWO, ONE, ONE, NONE, 1),
}
BY_PRODUCTS = {"overlapping", "apart", "padded", "one pixel apart", "one pixel cut"} | {
    "one pixel and more"
}


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _assert_as_close_as_torch(args: tuple[Any, ...], rest: tuple[Any, ...]) -> None:
    """By the root mean square beside fp64: a rounding is not shared by two orders of sums."""
    wide = USUAL(*(arg if arg is None else arg.double() for arg in args), *rest)
    found, usual = convolve(*args, *rest), USUAL(*args, *rest)
    assert found.shape == usual.shape
    assert found.dtype is usual.dtype
    errors = [(t.double() - wide).square().mean().sqrt().item() for t in (found, usual)]
    assert errors[0] <= errors[1] * 1.5 + 1e-7


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed(name: str, has_bias: bool, monkeypatch: pytest.MonkeyPatch):
    shape, weight_shape, stride, padding, dilation, more, groups = TRANSPOSED[name]
    bias = _random((weight_shape[1] * groups,), 2) if has_bias else None
    args = (_random(shape, 0), _random(weight_shape, 1), bias)
    rest = (stride, padding, dilation, True, more, groups)
    _assert_as_close_as_torch(args, rest)
    x, weight = args[0].to(memory_format=torch.channels_last), args[1].transpose(2, 3).contiguous()
    _assert_as_close_as_torch((x, weight.transpose(2, 3), bias), rest)
    taken = list[str]()
    for way in ("_usual", "_by_products", "_spread"):
        monkeypatch.setattr(cpu_convolutions, way, lambda *_, way=way: taken.append(way))
    convolve(*args, *rest)
    one = "_spread" if name == "one pixel" else "_usual"
    assert taken == ["_by_products" if name in BY_PRODUCTS else one]


@pytest.mark.parametrize(
    ("shape", "weight_shape", "stride", "takes"),
    [
        ((1, 8, 4, 8, 8), (16, 8, 3, 3, 3), 1, True),
        ((1, 8, 2, 3, 4), (4, 8, 3, 3, 3), 1, False),  # small
        ((2, 8, 4, 8, 8), (16, 8, 3, 3, 3), 1, False),  # torch takes oneDNN itself
        ((1, 64, 4, 8, 8), (64, 64, 1, 1, 1), 1, False),  # a product
        ((1, 8, 4, 8, 8), (16, 8, 3, 3, 3), 2, False),
    ],
)
def test_over_time(
    shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    stride: int,
    takes: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    args = (_random(shape, 0), _random(weight_shape, 1), _random(weight_shape[:1], 2))
    rest = ((stride,) * 3, (1, 0, 1), (1, 1, 1), False, (0, 0, 0), 1)
    _assert_as_close_as_torch(args, rest)
    taken = list[str]()
    for way in ("_usual", "_by_onednn"):
        monkeypatch.setattr(cpu_convolutions, way, lambda *_, way=way: taken.append(way))
    convolve(*args, *rest)
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    convolve(*args, *rest)
    assert taken == ["_by_onednn" if takes else "_usual", "_usual"]


def test_others_are_torchs_own(monkeypatch: pytest.MonkeyPatch):
    taken = list[int]()
    monkeypatch.setattr(cpu_convolutions, "_usual", lambda *args: taken.append(len(args)))
    x, weight = _random((2, 6, 5, 4), 0), _random((6, 3, 3, 3), 1)
    rest = (TWO, ONE, ONE, True, NONE, 1)
    convolve(x.bfloat16(), weight.bfloat16(), None, *rest)
    convolve(x[:0], weight, None, *rest)
    convolve(x[:, :, 0], weight[:, :, 0], None, (2,), (1,), (1,), True, (0,), 1)
    assert taken == [9, 9, 9]

"""Shifts by any count: eager's values for every integer type, in every spelling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import strop
from strop.codegen.triton import emit
from strop.codegen.triton_interpreter import interpret
from tests.codegen import kernels
from tests.views.running import Function

DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSUPPORTED = (torch.uint16, torch.uint32, torch.uint64)  # by eager on a CPU
COUNTS = (-255, -1, 0, 1, 7, 8, 15, 16, 31, 32, 63, 64, 100, 257)
DIRECTIONS = ("left", "right")
right = torch.bitwise_right_shift


def _in_place(name: str) -> Callable[[Tensor, int | Tensor], Tensor]:
    return lambda x, count: getattr(x.clone(), name)(count)


SPELLINGS: dict[str, dict[str, Callable[[Tensor, int | Tensor], Tensor]]] = {
    direction: {
        "operator": (lambda x, n: x << n) if sign == "l" else (lambda x, n: x >> n),
        "function": getattr(torch, f"bitwise_{direction}_shift"),
        "method": lambda x, n, name=f"bitwise_{direction}_shift": getattr(x, name)(n),
        "method in place": _in_place(f"bitwise_{direction}_shift_"),
        "operator in place": _in_place(f"__i{sign}shift__"),
    }
    for direction, sign in zip(DIRECTIONS, ("l", "r"), strict=True)
}


def extremes(dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.tensor([limits.min, limits.max, 1, 0, 5, limits.max // 2 + 1], dtype=dtype)


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Every extreme with every count, a column and a row."""
    return extremes(dtype)[:, None], torch.tensor(COUNTS).to(dtype)


def all_shifts(x: Tensor, counts: Tensor) -> list[Tensor]:
    """By numbers, by tensors, and of a number."""
    whole = x.expand(-1, len(counts)).contiguous()
    return [
        result
        for spellings in SPELLINGS.values()
        for spelling in spellings.values()
        for result in (spelling(whole, counts), spelling(x, 8), spelling(x, 257))
    ] + [
        *(shift(number, counts) for number, shift in ((5, torch.bitwise_left_shift), (-5, right))),
        *(right(x, count) for count in COUNTS),
    ]


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "optimize": lambda f: strop.optimize(Function(f).eval(), options=strop.Options(strict=True)),
    "compile": lambda f: torch.compile(f, backend="strop", options={"strict": True}),
}


@pytest.mark.parametrize(
    ("way", "dtype"),
    [*(("optimize", dtype) for dtype in DTYPES), ("compile", torch.uint8)],
    ids=str,
)
def test_shifts_equal_eager(way: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        results = WAYS[way](all_shifts)(*pairs(dtype))
    for number, (got, want) in enumerate(zip(results, all_shifts(*pairs(dtype)), strict=True)):
        assert got.dtype == want.dtype
        assert torch.equal(got, want), number


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_results_that_are_given(direction: str) -> None:
    """Optimised modules run ``out=`` in eager."""
    function = getattr(torch, f"bitwise_{direction}_shift")
    x, counts = pairs(torch.uint8)
    wanted = function(x, counts)

    def into(x: Tensor, counts: Tensor) -> Tensor:
        result: Tensor = function(x, counts, out=torch.empty_like(wanted))
        return result

    torch._dynamo.reset()
    for way in (strop.optimize(Function(into).eval()), torch.compile(into, backend="strop")):
        with torch.no_grad():
            assert torch.equal(way(x, counts), wanted)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shifts_of_the_triton_kernel(dtype: torch.dtype, direction: str) -> None:
    x, counts = (t.contiguous().view(-1) for t in torch.broadcast_tensors(*pairs(dtype)))
    sample = kernels.pointwise(f"shift_{direction}", [dtype] * 2, dtype, {})
    out, emitted = torch.empty_like(x), emit(sample.kernel)
    sizes = {f"s{i}": size.eval({"n": x.numel()}) for i, size in enumerate(emitted.scalars)}
    interpret(emitted.source, [x, counts, out], sizes | {"splits": 1})
    assert torch.equal(out, getattr(torch, f"bitwise_{direction}_shift")(x, counts))


@pytest.mark.parametrize("dtype", UNSUPPORTED, ids=str)
def test_types_that_eager_refuses(dtype: torch.dtype) -> None:
    x = torch.tensor([1, 2]).to(dtype)
    with pytest.raises(NotImplementedError):
        x >> 1
    module = strop.optimize(Function(lambda x: x >> 1).eval())
    with torch.no_grad(), pytest.raises(NotImplementedError):
        module(x)

"""What C++ kernels make of difficult numbers: NaN and infinity anywhere, outliers, the smallest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import strop
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import Function

ROWS = (1, 7, 8, 9, 32, 33, 100)  # around the rows that are taken together, and a chunk
COLS = (1, 15, 16, 17, 320, 511, 512, 513, 1300)  # around vectors, and the runs of softmax


def optimized(function) -> Function:
    module = Function(function).eval()
    strop.optimize(module, options=Options(strict=True))
    return module


def assert_good(module: Function, *args: Tensor) -> None:
    with torch.no_grad():
        exact = Function.forward(module, *(a.double() for a in args))
        eager, ours = Function.forward(module, *args), module(*args)
    for result, theirs, reference in zip(ours, eager, exact, strict=True):
        assert_as_accurate_as_eager(result, theirs, reference)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_softmax_of_any_length():
    """Also with one element that outweighs all, and with elements that underflow."""
    module = optimized(lambda x: (F.softmax(x, -1), F.softmax(x * 200, -1), F.softmax(x, 0)))
    for cols in (*COLS, 40_960):
        assert_good(module, uniform(3, cols, seed=cols) * 4 - 2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_extremes_and_softmax_of_nan_and_infinity(bad: float):
    module = optimized(
        lambda x: (
            x.amax(-1),
            x.amin(-1),
            x.amax(0),
            x.amin(0),
            x.amax(),
            x.amin(),
            F.softmax(x, -1),
        )
    )
    for cols in (1, 17, 40):
        for place in range(cols):
            x = uniform(3, cols) - 0.5
            x[1, place] = bad
            assert_good(module, x)
        assert_good(module, torch.full((2, cols), bad))
    assert_good(module, torch.tensor([[-torch.inf, torch.nan, torch.inf], [0.0, -0.0, 1e-45]]))


def _softmax_in_place(x: Tensor) -> tuple[Tensor, ...]:
    y = x + 0
    y.copy_(F.softmax(y, -1))
    return (y,)


SOFTMAXES = {
    "alone": lambda x: (F.softmax(x, -1),),
    "shifted": lambda x: (F.softmax(x * 3 + 1, -1),),
    "of columns in rows": lambda x: (F.softmax(x.unflatten(-1, (-1, 1)), -2),),
    "log": lambda x: (F.log_softmax(x, -1),),
    "powers": lambda x: ((p := torch.exp(x - x.amax(-1, True))), p / p.sum(-1, True)),
    "twice": lambda x: (F.softmax(F.softmax(x, -1), -1),),
    "weighed": lambda x: (F.softmax(x, -1) * x, F.softmax(x, -1)),
    "in place": _softmax_in_place,
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_forms_of_softmax(name: str):
    """A short one of its own for rows in memory; NaN fills its row; what is masked is 0."""
    module = optimized(SOFTMAXES[name])
    for cols in (1, 7, 8, 9, 15, 16, 31, 32, 33, 63, 64, 65, 130, 600):
        x = uniform(3, cols, seed=cols) * 20 - 10
        assert_good(module, x)
        for bad in (torch.nan, torch.inf, -torch.inf):
            for place in {0, cols // 2, cols - 1}:
                y = x.clone()
                y[1, place] = bad
                assert_good(module, y)
                if bad == -torch.inf and cols > 1 and name == "alone":
                    assert module(y)[0][1, place] == 0


def _summed(x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    y = x + r
    return F.layer_norm(y, y.shape[-1:]), y


def _summed_in_place(x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    x.add_(r)
    return (F.layer_norm(x, x.shape[-1:]),)


def _read_later(x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    y = x + r
    result = F.layer_norm(y, y.shape[-1:]) * x
    x.copy_(y)
    return (result,)


def _of_sums(x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    y = x + r
    return y, y.sum(-1)


@pytest.mark.parametrize(
    "function",
    [_summed, _summed_in_place, _read_later, _of_sums],
    ids=lambda f: f.__name__.strip("_"),
)
def test_a_kept_value_lies_in_the_row_of_a_result(function: Callable[..., tuple[Tensor, ...]]):
    """Of an argument only if it is not read any more."""
    torch._dynamo.reset()
    fast = torch.compile(function, backend="strop", options={"strict": True}, dynamic=True)
    for cols in (15, 320, 5000):
        given = uniform(3, cols, seed=cols), uniform(3, cols, seed=cols + 1)
        ours, eager, exact = (
            [t.clone() for t in given],
            [t.clone() for t in given],
            [t.double() for t in given],
        )
        found = [*fast(*ours), *ours]
        theirs, wanted = [*function(*eager), *eager], [*function(*exact), *exact]
        for result, peer, reference in zip(found, theirs, wanted, strict=True):
            assert_as_accurate_as_eager(result, peer, reference)


def test_extremes_of_fp64_see_nan():
    module = optimized(lambda x: (x.amax(-1), x.amin(-1)))
    x = uniform(3, 40).double()
    x[0, 39] = x[2, 0] = torch.nan
    largest, smallest = module(x)
    assert torch.equal(largest.isnan(), torch.tensor([True, False, True]))
    assert torch.equal(smallest[1], x[1].min())


def test_variances_down_the_columns_with_an_outlier_first():
    """The first row, from which deviations are taken, is far from all others."""
    module = optimized(lambda x, b: torch.var_mean(x + b, 0, correction=0))
    for rows in ROWS:
        for outlier in (0.0, 1e3):
            x = uniform(rows, 70, seed=rows)
            x[0] += outlier
            assert_good(module, x, uniform(70))


def test_group_norm_channels_last_as_eager():
    """The layout too. Images of 1 to 100 pixels: whole chunks and rests, in one graph."""

    def normed(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (F.silu(F.group_norm(x, 8, weight, weight)),)

    torch._dynamo.reset()
    fast = torch.compile(normed, backend="strop", options={"strict": True}, dynamic=False)
    for side in (2, 3, 7, 10):
        x = uniform(2, 48, side, side, seed=side).contiguous(memory_format=torch.channels_last)
        weight = uniform(48)
        with torch.no_grad():
            (ours,), (eager,) = fast(x, weight), normed(x, weight)
            (exact,) = normed(x.double(), weight.double())
        assert ours.stride() == eager.stride()
        assert_as_accurate_as_eager(ours, eager, exact)


def test_exp_is_within_one_ulp_down_to_the_smallest_number():
    module = optimized(lambda x: (torch.exp(x), torch.exp2(x)))
    x = torch.linspace(-105, 90, 400_001)
    with torch.no_grad():
        found = module(x)
    for ours, function in zip(found, (torch.exp, torch.exp2), strict=True):
        exact = function(x.double())
        smallest = 2.0**-149
        ulp = (torch.frexp(exact).exponent - 24).double().exp2().clamp_min(smallest)
        is_finite = exact < torch.finfo(torch.float32).max
        error = (ours.double() - exact).abs() / ulp
        assert error[is_finite].max() <= 1.01
        assert ours[~is_finite].isinf().all()
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e30, -1e30])
    for ours, function in zip(module(special), (torch.exp, torch.exp2), strict=True):
        torch.testing.assert_close(ours, function(special), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integers_wrap(dtype: torch.dtype):
    module = optimized(lambda x: (x + x, x * x, -x, x.sum(-1), x.sum(0), x.sum(), x.prod(-1)))
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.max, limits.min, limits.max - 1, 3], dtype=dtype).repeat(5, 9)
    with torch.no_grad():
        for ours, eager in zip(module(x), Function.forward(module, x), strict=True):
            assert ours.dtype == eager.dtype
            assert torch.equal(ours, eager)

"""Operands beside the large ones: views, one number for all, and sizes that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.runtime.run.launched_calls import has_lines
from tests.badinput.nets import optimized

Call = Callable[..., Tensor]
X, W, PICTURE = (2, 5, 32), (16, 32), (2, 8, 6, 6)

# What is computed, and the shapes of its arguments.
CALLS: dict[str, tuple[Call, tuple[tuple[int, ...], ...]]] = {
    "a bias with gaps": (lambda x, w, b: F.linear(x, w, b[:, 1]), (X, W, (16, 4))),
    "a bias backwards": (lambda x, w, b: F.linear(x, w, b[:, 1].flip(0)), (X, W, (16, 4))),
    "one bias, repeated": (lambda x, w, b: F.linear(x, w, b.expand(16)), (X, W, (1,))),
    "one bias": (F.linear, (X, W, (1,))),
    "a number": (lambda x, w, b: F.linear(x, w, b[0]), (X, W, (1,))),
    "one column": (F.linear, (X, (1, 32), (1,))),
    "a bias for each row": (lambda x, w, b: F.linear(x[0], w, b), (X, W, (5, 16))),
    "one row of biases": (lambda x, w, b: F.linear(x[0], w, b), (X, W, (1, 16))),
    "a row of one number": (lambda x, w: F.linear(x.expand(4, 32), w), ((1,), W)),
    "weights with gaps": (lambda x, w, b: F.linear(x, w[..., 1], b), (X, (*W, 3), (16,))),
    "addmm, a view": (lambda x, w, b: torch.addmm(b[:, 1], x[0], w.t()), (X, W, (16, 4))),
    "addmm, one": (lambda x, w, b: torch.addmm(b, x[0], w.t()), (X, W, (1,))),
    "addmm, a column": (lambda x, w, b: torch.addmm(b, x[0], w.t()), (X, W, (5, 1))),
    "addmm, half of it": (
        lambda x, w, b: torch.addmm(b[:, 1], x[0], w.t(), beta=0.5, alpha=2),
        (X, W, (16, 4)),
    ),
    "a convolution's bias": (
        lambda x, w, b: F.conv2d(x, w, b[:, 1], padding=1),
        (PICTURE, (4, 8, 3, 3), (4, 3)),
    ),
    "one of a convolution": (
        lambda x, w, b: F.conv2d(x, w, b.expand(4), padding=1),
        (PICTURE, (4, 8, 3, 3), (1,)),
    ),
    "of a group norm": (
        lambda x, g: F.group_norm(x, 2, g[:, 1], g[:, 2]),
        (PICTURE, (8, 3)),
    ),
    "of a layer norm": (lambda x, g: F.layer_norm(x, (32,), g[:, 1], g[:, 2]), (X, (32, 3))),
    "a sum and GELU behind": (
        lambda x, w, b: x[..., :16] + F.gelu(F.linear(x, w, b[:, 1]), approximate="tanh"),
        (X, W, (16, 4)),
    ),
}
Q, K = (3, 2, 5, 8), (3, 2, 6, 8)


class Calls(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call, self.weight = call, nn.Parameter(torch.ones(()))

    def forward(self, *given: Tensor) -> Tensor:
        return self.call(*given) * self.weight


@pytest.mark.parametrize("name", CALLS)
def test_values_are_eagers(name: str) -> None:
    call, shapes = CALLS[name]
    module: Any = optimized(Calls(call))
    for seed in range(2):
        torch.manual_seed(seed)
        given = [torch.randn(shape) for shape in shapes]
        torch.testing.assert_close(module(*given), call(*given), rtol=1e-5, atol=1e-5)
    assert module.forward.counters.eager_calls == 0


@pytest.mark.parametrize("sizes", [(16, 15), (16, 2), (2, 16)])
@pytest.mark.parametrize("call", [F.linear, lambda x, w, b: torch.addmm(b, x[0], w.t())])
def test_a_bias_of_another_size_is_an_error(call: Call, sizes: tuple[int, int]) -> None:
    module: Any = optimized(Calls(call))
    columns, count = sizes
    module(torch.randn(X), torch.randn(16, 32), torch.randn(16))
    with pytest.raises(RuntimeError):
        call(torch.randn(X), torch.randn(columns, 32), torch.randn(count))
    with pytest.raises(RuntimeError):
        module(torch.randn(X), torch.randn(columns, 32), torch.randn(count))


@pytest.mark.parametrize("call", [F.conv2d, F.conv_transpose2d, F.conv1d, F.conv3d])
def test_a_convolutions_bias_of_another_size_is_an_error(call: Call) -> None:
    module: Any = optimized(Calls(call))
    dims = {F.conv1d: 1, F.conv3d: 3}.get(call, 2)
    x, weight = torch.randn(2, 8, *[6] * dims), torch.randn(8, 8, *[3] * dims)
    torch.testing.assert_close(
        module(x, weight, bias := torch.randn(8)), call(x, weight, bias), rtol=1e-4, atol=1e-4
    )
    for each in (call, module):
        with pytest.raises(RuntimeError):
            each(x, weight, torch.randn(4))


@pytest.mark.parametrize(
    "shapes",
    [
        *((Q, K, K), ((1, *Q[1:]), K, K), (Q, (1, *K[1:]), (1, *K[1:]))),
        *((Q, (3, 1, 6, 8), (3, 1, 6, 8)), ((3, 1, 5, 8), K, K), (Q, K, (1, *K[1:]))),
    ],
)
def test_pictures_and_heads_are_repeated_as_in_eager(shapes: Any) -> None:
    module: Any = optimized(Calls(F.scaled_dot_product_attention))
    for _ in range(2):
        given = [torch.randn(shape) for shape in shapes]
        wanted = F.scaled_dot_product_attention(*given)
        torch.testing.assert_close(module(*given), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shapes",
    [
        *((Q, (2, *K[1:]), (2, *K[1:])), ((3, 4, 5, 8), K, K)),  # heads are no groups unasked
        *((Q, (3, 2, 6, 4), K), (Q, K, (3, 4, 6, 8))),
    ],
)
def test_operands_that_do_not_fit_are_an_error(shapes: Any) -> None:
    module: Any = optimized(Calls(F.scaled_dot_product_attention))
    module(*map(torch.randn, (Q, K, K)))
    given = [torch.randn(shape) for shape in shapes]
    for call in (F.scaled_dot_product_attention, module):
        with pytest.raises(RuntimeError):
            call(*given)


def test_one_number_for_all_is_no_row() -> None:
    assert has_lines((4, 8), (8, 1), 1)
    assert has_lines((4, 1), (8, 0), 1)
    assert not has_lines((4, 8), (8, 0), 1)
    assert not has_lines((8,), (0,), 1)
    assert not has_lines((8,), (2,), 1)


ROLLS: dict[str, Call] = {
    "forth": lambda x: torch.roll(x, 2, 1),
    "back": lambda x: torch.roll(x, -3, 1),
    "along two": lambda x: torch.roll(x, (2, -1), (1, 2)),
    "twice along one": lambda x: torch.roll(x, (1, 2), (1, 1)),
    "as a row": lambda x: torch.roll(x, 5),
}


@pytest.mark.parametrize("name", ROLLS)
def test_a_roll_may_be_longer_than_what_it_moves(name: str) -> None:
    """A program that was traced with many rows is asked whether it serves one."""
    module: Any = optimized(Calls(ROLLS[name]))
    for shape in ((4, 7, 8), (4, 1, 8), (4, 2, 8), (4, 3, 8), (4, 7, 1), (1, 1, 2), (1, 2, 3)):
        x = torch.randn(shape)
        assert torch.equal(module(x), ROLLS[name](x)), shape
    assert module.forward.counters.eager_calls == 0


@pytest.mark.parametrize(
    ("call", "good", "bad"),
    [
        (lambda x: F.pad(x, (1, 2), mode="reflect"), ((2, 3, 5),), ((2, 3, 2),)),
        (lambda x: F.pad(x, (0, 0, 2, 1), mode="reflect"), ((2, 3, 5, 4),), ((2, 3, 1, 4),)),
        (lambda x: F.interpolate(x, scale_factor=0.5), ((2, 3, 4, 5),), ((2, 3, 1, 5),)),
        (lambda x: F.interpolate(x, scale_factor=0.3), ((2, 3, 4, 5),), ((2, 3, 3, 5),)),
        (lambda x: F.affine_grid(x, (2, 4, 5, 6), align_corners=False), ((2, 2, 3),), ((1, 2, 3),)),
        (lambda x: x.select(1, 3) * 2, ((2, 5),), ((2, 3),)),
        (lambda x: x.select(1, -4) * 2, ((2, 5),), ((2, 3),)),
        (lambda x: torch.select_scatter(x, x[:, 0], 1, 3), ((2, 5),), ((2, 3),)),
        (torch.addmm, ((5, 16), (5, 8), (8, 16)), ((5, 16), (1, 8), (8, 16))),
        (torch.addmm, ((5, 16), (5, 8), (8, 16)), ((5, 16), (5, 8), (8, 1))),
        (torch.baddbmm, ((2, 5, 6), (2, 5, 8), (2, 8, 6)), ((2, 5, 6), (2, 1, 8), (2, 8, 6))),
    ],
)
def test_what_eager_refuses_is_refused(call: Call, good: Any, bad: Any) -> None:
    module: Any = optimized(Calls(call))
    given = [torch.randn(shape) for shape in good]
    torch.testing.assert_close(module(*given), call(*given), rtol=1e-5, atol=1e-5)
    for each in (call, module):
        with pytest.raises((RuntimeError, IndexError)):
            each(*map(torch.randn, bad))

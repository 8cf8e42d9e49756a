"""What replacements get, return and raise, and declarations that can never match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.errors import PatternError
from strop.patterns import registry
from tests.frontend.tracing import Function
from tests.patterns.searches import (
    declare,
    norm_silu,
    optimized,
    statistics,
    swiglu,
)

# what a replacement returns and raises

WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "shape": (
        lambda gate, up: gate[:1],
        r"result 0 of replace is float32\[1, 8\] on cpu, search gives float32\[2, 8\] on cpu for"
        r" \(float32\[2, 8\], float32\[2, 8\]\)",
    ),
    "dtype": (
        lambda gate, up: gate.half(),
        r"float16\[2, 8\] on cpu, search gives float32\[2, 8\]",
    ),
    "kind": (lambda gate, up: 3, "a int, not a tensor"),
    "count": (lambda gate, up: (gate, up), "a tuple, not a tensor"),
    "mutation": (lambda gate, up: gate.mul_(up) + 0, "replace wrote into an argument"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_result(case: str, cache: str) -> None:
    replace, message = WRONG[case]
    declare(swiglu, replace, name="mine")
    module = optimized(Function(swiglu), cache)
    with pytest.raises(PatternError, match=message) as caught:
        module(torch.randn(2, 8), torch.randn(2, 8))
    assert "'mine'" in str(caught.value)


def test_its_own_exception(cache: str) -> None:
    def broken(gate: Tensor, up: Tensor) -> Tensor:
        if gate.shape[0] == 3:
            raise ZeroDivisionError("three")
        return swiglu(gate, up)

    declare(swiglu, broken, name="broken")
    module = optimized(Function(swiglu), cache)
    for rows in (2, 3, 2):
        given = torch.randn(rows, 8), torch.randn(rows, 8)
        if rows == 3:
            with pytest.raises(ZeroDivisionError, match="three") as caught:
                module(*given)
            assert "pattern 'broken'" in caught.value.__notes__[0]
        else:
            torch.testing.assert_close(module(*given), swiglu(*given))


def test_a_returned_argument_is_copied(cache: str) -> None:
    strop.pattern(F.relu, lambda x: x, example=[torch.empty(2)], name="identity")
    module = optimized(Function(lambda x: F.relu(x + 1)), cache)
    x = torch.rand(3, 4)
    first, second = module(x), module(-x)
    torch.testing.assert_close((first, second), (x + 1, 1 - x))


def test_arguments_are_dense_unless_told(cache: str) -> None:
    seen: list[tuple[int, ...]] = []

    def noted(x: Tensor) -> Tensor:
        seen.append(x.stride())
        return F.silu(x)

    for contiguous in (True, False):
        example = [torch.empty(2)]
        with strop.pattern(F.silu, noted, example=example, contiguous=contiguous):
            module = optimized(Function(lambda x: F.silu(x.t())), cache)
            x = torch.randn(3, 5)
            torch.testing.assert_close(module(x), F.silu(x.t()))
    assert seen == [(3, 1), (1, 5)]


def test_images_stay_as_they_lie(cache: str) -> None:
    """Between convolutions in channels-last order, if the kernel can take it."""
    _, kernel = declare(norm_silu, contiguous=False)
    seen = []
    kernel.function = lambda x, w, b, eps: (seen.append(x.stride()), norm_silu(x, w, b, eps=eps))[1]
    layers = nn.Sequential(nn.Conv2d(4, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 4, 3))
    x = torch.randn(2, 4, 8, 8)
    expected = layers(x).detach()
    module = optimized(layers, cache, check=True)
    torch.testing.assert_close(module(x), expected)
    assert seen == [(16 * 36, 1, 16 * 6, 16)]
    kernels = module.forward.variants.all[0].program.kernel_steps
    assert [step.ops for step in kernels].count(("copy",)) == 1, "the argument's alone"
    assert module.forward.counters.findings == []


def test_inference_mode(cache: str) -> None:
    _, kernel = declare(swiglu)
    module = optimized(Function(swiglu), cache)
    with torch.inference_mode():
        given = torch.randn(2, 8), torch.randn(2, 8)
        torch.testing.assert_close(module(*given), swiglu(*given))
    assert len(kernel.calls) == 1


def test_the_same_declared_twice(cache: str) -> None:
    """As a notebook does: the first one runs until it is removed."""
    (first, mine), (second, other) = declare(swiglu), declare(swiglu)
    assert first.key == second.key
    module = optimized(Function(swiglu), cache)
    given = torch.randn(2, 8), torch.randn(2, 8)
    for removed, kernel in ((None, mine), (first, other)):
        if removed:
            removed.remove()
        module(*given)
        assert len(kernel.calls) == 1


def test_results_without_elements(cache: str) -> None:
    _, kernel = declare(statistics)
    module = optimized(Function(lambda x: [r * 2 for r in statistics(x.relu())]), cache)
    module(torch.randn(2, 3, 8))
    assert [tuple(r.shape) for r in module(torch.randn(0, 3, 8))] == [(0, 3, 8), (0, 3)]
    assert len(kernel.calls) == 1


# declarations that can never match

EMPTY, MANY = torch.empty(2, 8), torch.zeros(4, 2, 8)
BAD: dict[str, tuple[Callable[..., Any], Any, dict[str, Any], str]] = {
    "untraceable": (
        lambda x: x * float(x.sum()),
        None,
        {},
        r"cannot be traced with the example \(x\[2, 8\]\)",
    ),
    "nothing computed": (lambda x: x.t(), None, {}, "result 0 of search is a view or a cast"),
    "no tensor": (lambda x: 3, None, {}, "has to return a tensor"),
    "a dictionary": (lambda x: {"a": x + 1}, None, {}, "has to return a tensor"),
    "an argument unread": (lambda x, y: x + 1, None, {}, "search does not read y"),
    "apart": (lambda x, y: (x + 1, y + 1), None, {}, "no result of search depends on all"),
    "writes": (lambda x: x.mul_(2) + 1, None, {}, "writes into an argument"),
    "random": (lambda x: x + torch.randn(2, 8), None, {}, "search draws random numbers"),
    "a tensor of its own": (lambda x: x + MANY, None, {}, "pass it as an argument"),
    "few examples": (
        lambda x, y: x + y,
        None,
        {"example": [EMPTY]},
        r"takes 2 tensors \(x, y\).* not \(Tensor\)",
    ),
    "no example": (lambda x: x + 1, None, {"example": EMPTY}, "not a Tensor"),
    "sizes for tensors": (lambda x: x + 1, None, {"example": (2, 8)}, r"not \(int, int\)"),
    "stars": (lambda *xs: xs[0] + 1, None, {}, "name each tensor"),
    "a keyword": (lambda x, *, how="a": x + 1, None, {}, "numbers with a default: how"),
    "other arguments": (lambda x: x + 1, lambda: None, {}, r"replace has to take \(x\)"),
    "built in": (torch.sigmoid, None, {"example": [EMPTY]}, "give a Python function"),
    "no function": (lambda x: x + 1, 3, {}, "replace is 3, whose arguments cannot be told"),
    "numerics": (lambda x: x + 1, None, {"numerics": "a b"}, "numerics='a b'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_declaration(case: str) -> None:
    search, replace, more, message = BAD[case]
    count = search.__code__.co_argcount if hasattr(search, "__code__") else 0
    more = {"example": [EMPTY] * count, "name": "mine"} | more
    with pytest.raises(PatternError, match=message) as caught:
        strop.pattern(search, replace or search, **more)
    assert "'mine'" in str(caught.value)
    assert not registry.active()

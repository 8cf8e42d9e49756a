"""Floats that a user turns: eager's values, and one further graph for all values."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from tests.e2e import tiny

X = torch.linspace(-2, 3, 12).reshape(2, 6)
VALUES = (0.7, 0.3, -0.5, 0.0, 1.7, 1.0)


class Scaled(nn.Module):
    def __init__(self, act: Callable[..., Any]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor, scale: Any, **more: Any) -> Any:
        return self.act(x, scale, **more)


def optimized(act: Callable[..., Any], **options: Any) -> Any:
    return strop.optimize(Scaled(act).eval(), options=tiny.options(**options))


def guards(module: Any) -> set[tuple[str, float]]:
    found = [guard for v in module.forward.variants.all for guard in v.number_guards]
    return {(guard.relation, guard.value) for guard in found}


@torch.no_grad()
def assert_as_eager(module: Any, x: Tensor, values: Any = VALUES) -> None:
    for value in values:
        found, wanted = module(x, value), module.forward.eager(x, value)
        # fp32 sums and products in another order
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert module.forward.counters.eager_calls == 0


def computes(x: Tensor, s: float) -> list[Tensor]:
    return [
        x * s,
        s * x,
        x + s,
        s - x,
        x / (s * s + 1),
        x * (1 - s) + x * s,
        x * -s,
        x * abs(s - 0.1),
        x * (0.1 * s * 0.2),
        torch.where(x > s, x, 0.5),
        (x <= s) * x,
        x.clamp(min=s),
        x.masked_fill(x > 0, s),
        torch.lerp(x, x + 1, s),
        torch.full((3,), s),
        x.new_full((2,), s),
        torch.full_like(x, s),
        x.clone().mul_(s),
        x.clone().fill_(s),
        sum(x * v for v in (s, s * 2)),
    ]


def test_what_is_computed_of_a_float_is_one_graph_for_all_values() -> None:
    module = optimized(computes)
    assert_as_eager(module, X)
    assert len(module.forward.variants.all) == 2  # the first value as a constant, and any value
    assert not guards(module)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.bfloat16], ids=str)
def test_types_are_those_of_python_numbers(dtype: torch.dtype) -> None:
    """A float beside a tensor decides between integers and floats, not between their sizes."""
    module = optimized(lambda x, s: (x * s, x * (3 * s), x.to(torch.float16) * s))
    x = torch.arange(6).to(dtype)
    with torch.no_grad():
        for value in (0.1, 0.3, -1.7):
            for found, wanted in zip(module(x, value), module.forward.eager(x, value), strict=True):
                assert found.dtype == wanted.dtype
                assert torch.equal(found, wanted)
    assert len(module.forward.variants.all) == 2


BRANCHES: dict[str, tuple[Callable[..., Any], set[tuple[str, float]], int]] = {
    # act, the guards of its graphs, how many graphs
    "if": (lambda x, s: x * s if s else x + 9, {("!=", 0.0), ("==", 0.0)}, 3),
    "== 0": (lambda x, s: x if s == 0 else x * s, {("!=", 0.0), ("==", 0.0)}, 3),
    "> 1": (lambda x, s: x * s if s > 1 else x - s, {("<=", 1.0), (">", 1.0)}, 3),
    "in": (
        lambda x, s: x + 9 if s in (0.0, 1.0) else x * s,
        {("!=", 0.0), ("!=", 1.0), ("==", 0.0), ("==", 1.0)},
        4,
    ),
    "max": (lambda x, s: x * max(s, 0.5), {(">=", 0.5), ("<", 0.5), (">", 0.5), ("<=", 0.5)}, 3),
    "isinstance": (lambda x, s: x * s if isinstance(s, float) else x + 9, set(), 2),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_is_a_guard(name: str) -> None:
    act, wanted, count = BRANCHES[name]
    module = optimized(act)
    assert_as_eager(module, X)
    assert len(module.forward.variants.all) == count
    assert guards(module) <= wanted
    assert bool(guards(module)) == bool(wanted)
    assert_as_eager(module, X, reversed(VALUES))  # all are known by now
    assert len(module.forward.variants.all) == count


NEEDED: dict[str, Callable[..., Any]] = {
    "text": lambda x, s: x * len(f"{s}{s!r}{s:.1f}"),
    "percent": lambda x, s: x * len("%.3g" % s),  # noqa: UP031
    "key": lambda x, s: x * {0.7: 2.0, 0.25: 3.0}[s],
    "integer": lambda x, s: x * int(s * 10),
    "size": lambda x, s: x[:, : int(s * 5)],
    "math": lambda x, s: x * math.exp(s),
    "power": lambda x, s: x * s**0.5,
    "tensor": lambda x, s: x * torch.tensor(s),
    "settings": lambda x, s: torch.nn.functional.leaky_relu(x, s),
    "compared with another": lambda x, s: x * s if s * 2 > s * s + 0.5 else x,
    "place": lambda x, s: [x, x * 2][s > 0.5],
    "result": lambda x, s: (x * 2, s * 3),
    "caught": lambda x, s: _caught(x, s),
}


def _caught(x: Tensor, s: float) -> Tensor:
    try:
        return x * math.exp(s)
    except Exception:
        return x * 100


@pytest.mark.parametrize("name", NEEDED)
def test_code_that_needs_the_number_has_a_graph_for_each(name: str) -> None:
    module = optimized(NEEDED[name])
    assert_as_eager(module, X, (0.7, 0.25, 0.7))
    assert len(module.forward.variants.all) == 2


def test_one_of_two_floats_is_needed() -> None:
    module = optimized(lambda x, s, other: x * s + len(f"{other}"))
    with torch.no_grad():
        for s, other in ((0.1, 0.25), (0.2, 0.5), (0.3, 0.5), (0.4, 0.5), (0.4, 0.25)):
            torch.testing.assert_close(module(X, s, other=other), X * s + len(f"{other}"))
    # the constants of the first call; any ``s`` with either of the others
    assert len(module.forward.variants.all) == 3


def test_floats_anywhere_in_the_arguments() -> None:
    module = optimized(lambda x, s: x * s[0] + s[1]["a"] * s[1]["b"])
    with torch.no_grad():
        for n in range(4):
            given = [0.5 * n, {"a": 0.25, "b": torch.full((6,), n + 1.0)}]
            torch.testing.assert_close(module(X, given), X * 0.5 * n + 0.25 * (n + 1))
        given = [0.5, {"a": math.nan, "b": torch.ones(6)}]
        assert module(X, given).isnan().all()  # no relation tells of it: a constant
    assert len(module.forward.variants.all) == 3


def test_a_float_and_a_tensor_without_dims_are_two_things() -> None:
    module = optimized(lambda x, s: x.half() * s)
    wide = torch.tensor(0.3, dtype=torch.float64)
    with torch.no_grad():
        for s in (0.1, 0.3, wide, wide[None], 0.5):
            found = module(X, s)
            assert torch.equal(found, module.forward.eager(X, s))
            assert found.dtype == module.forward.eager(X, s).dtype


def test_one_graph_for_all_sizes_and_values() -> None:
    module = optimized(lambda x, s: torch.softmax(x * s, -1))
    with torch.no_grad():
        for n, value in enumerate(VALUES):
            x = torch.randn(n + 2, 5 + n)
            torch.testing.assert_close(module(x, value), torch.softmax(x * value, -1))
    assert len(module.forward.variants.all) == 2


def test_a_stored_graph_is_for_the_same_side_of_a_branch(tmp_path: Path) -> None:
    act = BRANCHES["== 0"][0]
    for captures in (3, 0):
        module = optimized(act, cache_dir=str(tmp_path))
        assert_as_eager(module, X, (0.5, 0.25, 0.0, 2.0))
        assert module.forward.variants.num_captures == captures
    module = optimized(act, cache_dir=str(tmp_path))
    assert_as_eager(module, X, (0.5, 0.0, 2.0))  # another side first
    assert module.forward.variants.num_captures == 0


def test_nothing_changes_for_a_float_that_stays() -> None:
    module = optimized(lambda x, s: x * s)
    with torch.no_grad():
        for n in range(3):
            module(torch.randn(2 + n, 3), 0.5)
    (variant,) = module.forward.variants.all
    assert len(variant.specs) == 1


@pytest.mark.parametrize("numbers", [(1, 2, 3, 4, 5), (0.1, 0.2, 0.3, 0.4, 0.5)])
def test_a_trace_that_fails_for_two_numbers_is_not_tried_for_others(numbers: Any) -> None:
    module = optimized(lambda x, s: x * s if x.sum() > 0 else x - s)
    with torch.no_grad():
        for n in numbers:
            assert torch.equal(module(X, n), module.forward.eager(X, n))
    assert module.forward.counters.eager_calls == 5
    assert module.forward.variants.num_captures <= 3  # of a float also as an input
    ((reason, count),) = module.forward.counters.fallbacks.items()
    assert "the values of a tensor decide" in reason
    assert count == 5


def test_a_failure_says_nothing_of_other_ways_to_call() -> None:
    module = optimized(lambda x, s, is_quick: x * s if is_quick or x.sum() > 0 else x - s)
    with torch.no_grad():
        for n in (1, 2, 3):
            module(X, n, is_quick=False)
        assert torch.equal(module(X, 4, is_quick=True), X * 4)
    assert module.forward.counters.eager_calls == 3

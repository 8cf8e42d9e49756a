"""Odd arguments, weights laid out anew where they lie, objects that give something else each time,
checks of values, and modules that nobody has registered: calls give what eager gives, leave what it
leaves, and raise what it raises."""

from __future__ import annotations

import copy
import enum
import itertools
import random
from collections import namedtuple
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import strop

X, Y = (torch.randn(n, 8, generator=torch.manual_seed(n)) for n in (3, 5))


class Given(nn.Module):
    def __init__(self, given: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.last, self.given = nn.Linear(8, 8), given
        self.register_buffer("table", Y[0].clone())
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.given(self, *args)


def agree(make: Callable[[], nn.Module], *steps: Any) -> nn.Module:
    """Take edits and calls with arguments in this order, and return what was compiled."""
    pair = []
    for _ in range(2):
        torch.manual_seed(2)
        pair.append(make().eval().requires_grad_(False))
    strop.optimize(pair[0])
    for step in steps:
        given = [copy.deepcopy(step) for _ in pair]
        results = [
            step(m) if callable(step) else m(*args) for m, args in zip(pair, given, strict=True)
        ]
        if not callable(step):
            assert same(results, results[::-1])
            assert same(*given)
    return pair[0]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.shape == b.shape and torch.allclose(a, b, 1e-3, 1e-4)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return same([*vars(a).values()], [*vars(b).values()]) if isinstance(a, Plain) else a == b


@dataclass
class Plain:
    a: Any
    k: Any = 2.0


@dataclass
class Computed(Plain):
    by: InitVar[int] = 3

    def __post_init__(self, by: int) -> None:
        self.k, self.extra = self.k * by, by


class Tripled(namedtuple("Tripled", "a k")):
    def __new__(cls, a: Any, k: Any = 2.0) -> Any:
        return super().__new__(cls, a, k * 3)


class Number(enum.IntEnum):
    TWO = 2


class Tenfold(float):
    __rmul__ = lambda self, other: other * (10 * float(self))  # noqa: E731


class AnyWord(str):
    __eq__ = lambda self, other: True  # noqa: E731
    __hash__ = str.__hash__


def put(*names: Any) -> Callable[..., Any]:
    """Set an attribute (or an item) of what is behind the other names to the last one."""

    def edit(m: Any) -> None:
        *path, name, value = names
        for each in path:
            m = getattr(m, each)
        value = value(getattr(m, name)) if callable(value) and name == "data" else value
        m.__setitem__(name, value) if isinstance(m, list) else setattr(m, name, value)

    return edit


def written(self: Any, x: Any, y: Any) -> Any:
    x.k = 9.0
    x.a = self.last(x.a)
    return x.a * y.k


def scaled(self: Any, x: Any) -> Any:
    return self.last(x.a) * x.k * getattr(x, "extra", 1.0)


def appended(self: Any, x: Any, y: Any) -> Any:
    x[0].a.append(1)
    return y * len(x[0].a)


twice = Plain(X)
ARGUMENTS = {
    "dataclass": (scaled, [(Computed(X),), (Computed(Y, by=5),), (Plain(X),)]),
    "tuple": (scaled, [(Tripled(X),), (Tripled(Y, 3.0),)]),
    "written": (written, [(Plain(X), Plain(X)), (twice, twice)]),
    "within": (appended, [((Plain([]),), X), ((Plain([2]),), Y)]),
    "member": (lambda s, x, k: isinstance(k, Number), [(X, Number.TWO), (X, 2), (X, Number.TWO)]),
    "number": (lambda s, x, k: x * k, [(X, 2.0), (X, Tenfold(2)), (X, np.float64(2))]),
    "text": (lambda s, x, k: x * (k == "a"), [(X, "b"), (X, AnyWord("b"))]),
    "shape": (lambda s, x, k: (x, type(k) is tuple), [(X, X.shape), (X, (3, 8))]),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    forward, calls = ARGUMENTS[name]
    agree(lambda: Given(forward), *calls, *calls)


@pytest.mark.parametrize(
    "edit",
    [
        put("last", "weight", "data", lambda w: w.t()),
        put("last", "weight", "data", lambda w: w[:1].expand(8, 8)),
        put("table", "data", lambda b: b[:1]),
        lambda m: m.last.weight.t_(),
        lambda m: m.table.resize_(1),
    ],
)
def test_weights_that_are_laid_out_anew_where_they_lie(edit: Any) -> None:
    agree(lambda: Given(lambda s, x: s.last(x).relu() + s.table), (X,), edit, (X,), (X,), (Y,))


def made(self: Any, x: Tensor) -> Tensor:
    self.register_buffer("made", x * 2)
    return self.made


def kept(self: Any, x: Tensor) -> Tensor:
    self._own = x * 2
    return x + 1


EAGER: dict[str, tuple[Any, Any]] = {
    "iterator": (lambda s, x: x * next(s.own[0]), lambda: [iter([1, 2, 3])]),
    "count": (lambda s, x: x * next(s._own), lambda: itertools.count(1)),
    "random": (lambda s, x: x * s._own.random(), lambda: random.Random(1)),
    "numpy": (lambda s, x: x * float(s.own.random()), lambda: np.random.default_rng(1)),
    "older": (lambda s, x: x * float(s.own.rand()), lambda: np.random.RandomState(1)),
    "buffer": (made, int),
    "kept": (kept, lambda: Y),
}


@pytest.mark.parametrize("name", EAGER)
def test_what_compiled_code_would_not_do_again(name: str) -> None:
    forward, own = EAGER[name]
    found = agree(lambda: Given(forward, own=own(), _own=own()), (X,), (Y,), (X,))
    assert sum(found.forward.counters.fallbacks.values()) == 3
    assert name != "buffer" or same(found.made, X * 2)
    assert name != "kept" or same(found._own, X * 2)


@pytest.mark.parametrize(
    "check", [torch.linalg.inv, torch.linalg.cholesky, lambda x: torch._assert_async(x[0, 0])]
)
def test_checks_of_values_raise(check: Any) -> None:
    found = agree(lambda: Given(lambda s, x: (check(x), x * 2)), (torch.eye(3),))
    with pytest.raises(RuntimeError):
        found(torch.zeros(3, 3))


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.items, self.inner = 2.0, [1.0], nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.k * self.items[0]


@pytest.mark.parametrize(
    "edit",
    [
        put("k", 5.0),
        put("items", 0, 4.0),
        put("inner", nn.Identity()),
        put("inner", "approximate", "tanh"),
        put("forward", torch.tanh),
        put("__class__", nn.Tanh),
        lambda m: m.register_forward_hook(lambda part, args, result: result * 2),
    ],
)
@pytest.mark.parametrize("hold", [lambda m: [m], lambda m: [lambda x: m(x)]])
def test_a_module_that_is_not_registered(hold: Any, edit: Any) -> None:
    hidden = Hidden()
    once = iter([edit])
    change = lambda m: [each(hidden) for each in once]  # noqa: E731
    agree(lambda: Given(lambda s, x: s.own[0](x), own=hold(hidden)), (X,), change, (X,), (Y,))


def test_a_parameter_more_in_a_list() -> None:
    more = lambda m: m.own.append(nn.Parameter(Y[2], requires_grad=False))  # noqa: E731
    agree(
        lambda: Given(lambda s, x: x * len(s.own), own=nn.ParameterList([Y[0]])), (X,), more, (X,)
    )


def test_a_private_attribute_that_a_given_function_reads() -> None:
    agree(lambda: Given(lambda s, x: x * s._k, _k=2.0), (X,), put("_k", 3.0), (X,))

"""Arguments of classes of their own, weights that are laid out anew where they lie, objects that
give something else each time, checks of values, and modules that nobody has registered: calls give
what eager gives, leave what it leaves, and raise what it raises."""

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
from torch.nn.functional import gelu

import strop

X = torch.randn(3, 8, generator=torch.manual_seed(0))
Y = torch.randn(5, 8, generator=torch.manual_seed(1))


class Small(nn.Module):
    def __init__(self, forward: Callable[..., Any] | None = None, **attributes: Any) -> None:
        super().__init__()
        self.last, self.given = nn.Linear(8, 8), forward
        self.register_buffer("table", Y[0].clone())
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.given(self, *args)


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return a module that is optimised, and its twin that is not."""
    found = []
    for _ in range(2):
        torch.manual_seed(2)
        found.append(make().eval().requires_grad_(False))
    return strop.optimize(found[0]), found[1]


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    elif hasattr(expected, "__dict__") and not isinstance(expected, enum.Enum | int | float | str):
        same(vars(found), vars(expected))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        same(list(found.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, Slotted):
        same([found.a, found.k], [expected.a, expected.k])
    else:
        assert found == expected
        assert type(found) is type(expected)


@dataclass
class Plain:
    a: Any
    k: Any = 2.0


@dataclass
class Doubled(Plain):
    def __post_init__(self) -> None:
        self.k = self.k * 2


@dataclass
class Scaled(Plain):
    by: InitVar[int] = 3

    def __post_init__(self, by: int) -> None:
        self.k = self.k * by


@dataclass(slots=True)
class Slotted:
    a: Any
    k: Any = 2.0


class Tripled(namedtuple("Tripled", "a k")):
    def __new__(cls, a: Any, k: Any = 2.0) -> Any:
        return super().__new__(cls, a, k * 3)


class Number(enum.IntEnum):
    TWO = 2


class Word(enum.StrEnum):
    TWO = "two"


class Tenfold(float):
    def __rmul__(self, other: Any) -> Any:
        return other * (10 * float(self))


class AnyWord(str):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


def scaled(self: Any, x: Any) -> Any:
    return self.last(x.a) * x.k


def with_extra(x: Plain, extra: float) -> Plain:
    vars(x)["extra"] = extra
    return x


def written(self: Any, x: Any) -> Any:
    x.k += 1
    x.a = self.last(x.a)
    return x.a * x.k


def written_in(self: Any, x: Any) -> Any:
    x[0].k = 5.0
    x[0].a.append(x[1])
    return x[1] * len(x[0].a)


def written_twice(self: Any, x: Any, y: Any) -> Any:
    x.k = 9.0
    return self.last(x.a) * y.k


def twice(given: Any) -> tuple[Any, Any]:
    return given, given


ARGUMENTS: dict[str, tuple[Callable[..., Any], list[Callable[[], tuple[Any, ...]]]]] = {
    "__post_init__": (scaled, [lambda: (Doubled(X),), lambda: (Doubled(Y, 3.0),)]),
    "InitVar": (scaled, [lambda: (Scaled(X, by=5),), lambda: (Scaled(Y, 3.0),)]),
    "__new__": (scaled, [lambda: (Tripled(X),), lambda: (Tripled(Y, 3.0),)]),
    "an attribute that is no field": (
        lambda self, x: self.last(x.a) * getattr(x, "extra", 1.0),
        [lambda: (Plain(X),), lambda: (with_extra(Plain(X), 4.0),)],
    ),
    "written": (written, [lambda: (Plain(X),), lambda: (Plain(X, 4),), lambda: (Plain(Y),)]),
    "written in slots": (written, [lambda: (Slotted(X),), lambda: (Slotted(Y, 4),)]),
    "written within": (written_in, [lambda: ((Plain([]), X),), lambda: ((Plain([1]), Y),)]),
    "given twice": (
        written_twice,
        [lambda: twice(Plain(X)), lambda: (Plain(X), Plain(X)), lambda: twice(Plain(X))],
    ),
    "members": (
        lambda self, x, k: x * 2 if isinstance(k, enum.Enum) else x - 1,
        [lambda k=k: (X, k) for k in (Number.TWO, 2, Word.TWO, "two", Number.TWO)],
    ),
    "classes of numbers": (
        lambda self, x, k: x * k if type(k) is not float else x - k,
        [lambda k=k: (X, k) for k in (2.0, Tenfold(2), np.float64(2), 2.0)],
    ),
    "classes of texts": (
        lambda self, x, k: x * 2 if k == "a" else x,
        [lambda k=k: (X, k) for k in ("b", AnyWord("b"), "a")],
    ),
    "shapes": (
        lambda self, x, k: (x * k[0], type(k) is torch.Size),
        [lambda: (X, X.shape), lambda: (X, (3, 8)), lambda: (X, [3, 8])],
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    forward, calls = ARGUMENTS[name]
    found, eager = pair(lambda: Small(forward))
    with torch.no_grad():
        for call in calls:
            given, others = copy.deepcopy(call()), copy.deepcopy(call())
            same(found(*given), eager(*others))
            same(given, others)


EDITS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda m: setattr(m.last.weight, "data", m.last.weight.data.t()),
    "t_": lambda m: m.last.weight.t_(),
    "expanded": lambda m: setattr(m.last.weight, "data", m.last.weight.data[:1].expand(8, 8)),
    "shorter": lambda m: setattr(m.table, "data", m.table.data[:1]),
    "resized": lambda m: m.table.resize_(1),
    "unsqueezed": lambda m: m.table.unsqueeze_(0),
}


@pytest.mark.parametrize("name", EDITS)
def test_weights_that_are_laid_out_anew_where_they_lie(name: str) -> None:
    found, eager = pair(lambda: Small(lambda self, x: gelu(self.last(x)) + self.table))
    with torch.no_grad():
        for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
            with mode():
                same(found(X).clone(), eager(X).clone())
        for module in (found, eager):
            address = module.last.weight.data_ptr(), module.table.data_ptr()
            EDITS[name](module)
            assert address == (module.last.weight.data_ptr(), module.table.data_ptr())
        for x in (X, X, Y):
            same(found(x), eager(x))


def by_closure() -> nn.Module:
    drawn = itertools.count(1)
    return Small(lambda self, x: x * next(drawn))


def by_default() -> nn.Module:
    def forward(self: Any, x: Tensor, drawn: Any) -> Tensor:
        return x * next(drawn)

    forward.__defaults__ = (itertools.cycle([1.0, 2.0, 3.0]),)
    return Small(forward)


DRAWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "iterator": (lambda: Small(lambda s, x: x * next(s.own), own=iter([1, 2, 3])), "iterator"),
    "in a list": (
        lambda: Small(lambda s, x: x * next(s.own[0]), own=[iter([1, 2, 3])]),
        "iterator",
    ),
    "closure": (by_closure, "iterator"),
    "default": (by_default, "iterator"),
    "random": (lambda: Small(lambda s, x: x * s.own.random(), own=random.Random(1)), "writes"),
    "a cache by its name": (
        lambda: Small(lambda s, x: x * s._own.random(), _own=random.Random(1)),
        "writes",
    ),
    "numpy": (
        lambda: Small(lambda s, x: x * float(s.own.random()), own=np.random.default_rng(1)),
        "writes",
    ),
    "numpy's older": (
        lambda: Small(lambda s, x: x * float(s.own.rand()), own=np.random.RandomState(1)),
        "writes",
    ),
    "a buffer": (lambda: Small(lambda s, x: x + registered(s, x)), "sets made"),
}


def registered(module: nn.Module, x: Tensor) -> Tensor:
    module.register_buffer("made", x * 2)
    return module.made


@pytest.mark.parametrize("name", DRAWN)
def test_what_gives_something_else_each_time(name: str) -> None:
    make, why = DRAWN[name]
    found, eager = pair(make)
    with torch.no_grad():
        for _ in range(3):
            same(found(X), eager(X))
    assert found.state_dict().keys() == eager.state_dict().keys()
    assert all(why in reason for reason in found.forward.counters.fallbacks)
    assert found.forward.counters.fallbacks


def test_a_generator_that_nobody_draws_from_is_no_reason() -> None:
    found, eager = pair(
        lambda: Small(lambda s, x: x * s.own.random() if s.training else x, own=random.Random(1))
    )
    same(found(X), eager(X))
    assert not found.forward.counters.fallbacks


CHECKS: dict[str, tuple[Callable[..., Any], Tensor, Tensor]] = {
    "inv": (lambda s, x: torch.linalg.inv(x) * 2, torch.eye(3), torch.zeros(3, 3)),
    "cholesky": (lambda s, x: torch.linalg.cholesky(x) * 2, torch.eye(3), -torch.eye(3)),
    "_assert_async": (lambda s, x: (torch._assert_async(x.max() < 9), x * 2)[1], X, X * 100),
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_of_values_raise(name: str) -> None:
    forward, right, wrong = CHECKS[name]
    found, eager = pair(lambda: Small(forward))
    same(found(right), eager(right))
    for module in (found, eager):
        with pytest.raises(RuntimeError):
            module(wrong)
    same(found(right), eager(right))


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.table, self.inner = 2.0, [1.0], nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.k * self.table[0]


class Other(Hidden):
    def forward(self, x: Tensor) -> Tensor:
        return x * 17


OF_HIDDEN: dict[str, Callable[[Any], Any]] = {
    "number": lambda m: setattr(m, "k", 5.0),
    "list": lambda m: m.table.__setitem__(0, 4.0),
    "part": lambda m: setattr(m, "inner", nn.Identity()),
    "setting": lambda m: setattr(m.inner, "approximate", "tanh"),
    "forward": lambda m: setattr(m, "forward", lambda x: x * 13),
    "hook": lambda m: m.register_forward_hook(lambda part, args, result: result * 2),
    "class": lambda m: setattr(m, "__class__", Other),
}
HELD: dict[str, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    "list": (lambda m: [m], lambda s, x: s.own[0](x) + s.last(x)),
    "function": (lambda m: lambda x: m(x), lambda s, x: s.own(x) + s.last(x)),
    "object": (Plain, lambda s, x: s.own.a(x) + s.last(x)),
}


@pytest.mark.parametrize("name", OF_HIDDEN)
@pytest.mark.parametrize("how", HELD)
def test_a_module_that_is_not_registered(how: str, name: str) -> None:
    hold, forward = HELD[how]
    hidden = Hidden()
    found, eager = pair(lambda: Small(forward, own=hold(hidden)))
    same(found(X), eager(X))
    OF_HIDDEN[name](hidden)
    same(found(X), eager(X))
    same(found(Y), eager(Y))


def test_a_parameter_more_in_a_list() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.last(x) * len(self.own) + sum(self.own)

    found, eager = pair(lambda: Small(forward, own=nn.ParameterList([Y[0], Y[1]])))
    same(found(X), eager(X))
    for module in (found, eager):
        module.own.append(nn.Parameter(Y[2], requires_grad=False))
    same(found(X), eager(X))


def test_a_private_attribute_that_a_given_function_reads() -> None:
    found, eager = pair(lambda: Small(lambda self, x: x * self._scale, _scale=2.0))
    for scale in (2.0, 3.0, 2.0):
        found._scale = eager._scale = scale
        same(found(X), eager(X))

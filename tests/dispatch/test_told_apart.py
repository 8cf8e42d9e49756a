"""What code asks about a tensor, a size or a mode has the answer of eager, or the call runs there.

Each case is a forward that gives ``x * 2`` or ``x + y`` by the answer, and the calls at which the
answers differ. A call that cannot be served says why.
"""

from __future__ import annotations

import contextlib
import copy
import numbers
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.dispatch.told_apart import ToldApart, compares_identity
from tests.e2e import tiny

Asked = Callable[[Any, Any, Any], Any]
P = nn.Parameter
ANY = [contextlib.nullcontext, torch.no_grad, torch.inference_mode]


def drawn(seed: int = 0) -> Tensor:
    return torch.randn(3, 8, generator=torch.manual_seed(seed))


def with_attributes(**attributes: Any) -> Tensor:
    found = drawn(2)
    vars(found).update(attributes)
    return found


def with_gradient() -> Tensor:
    found = drawn(3).requires_grad_()
    (found * 2).sum().backward()
    return found


class Asking(nn.Module):
    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self.last, self.asked = nn.Linear(8, 8), asked
        self.register_buffer("table", drawn(4))

    def forward(self, x: Tensor, y: Any) -> Any:
        return self.last(x) * 2 if self.asked(self, x, y) else self.last(x) + y


def has_scale(self: Any, x: Any, y: Any) -> bool:
    try:
        return bool(x.scale)
    except AttributeError:
        return False


def matched(self: Any, x: Any, y: Any) -> bool:
    match x.shape[0]:
        case int():
            return True
    return False


X, Y = drawn(), drawn(1)
SAME: list[tuple[Any, ...]] = [(X, Y), (X, X), (Y, X), (Y, Y)]
SIZES: list[tuple[Any, ...]] = [(X, Y), (torch.ones(5, 8), torch.ones(5, 8)), (X, Y)]
SCALED = [(X, Y), (with_attributes(scale=2.0), Y), (X, Y)]
GRADIENTS = [(X, Y), (drawn().requires_grad_(), Y), (drawn().requires_grad_() * 2, Y)]
PARAMETERS = [(X, Y), (P(drawn(), requires_grad=False), Y), (X, Y)]

# name -> the question, and the calls
SERVED: dict[str, tuple[Asked, list[tuple[Any, ...]]]] = {
    "is": (lambda self, x, y: x is y, SAME),
    "is not": (lambda self, x, y: not x is not y, SAME),
    "id": (lambda self, x, y: id(x) == id(y), SAME),
    "any": (lambda self, x, y: any(each is x for each in [y]), SAME),
    "Parameter": (lambda self, x, y: isinstance(x, P), PARAMETERS),
    "type of a Parameter": (lambda self, x, y: type(x) is P, PARAMETERS),
    "a weight": (lambda self, x, y: isinstance(self.last.weight, P), [(X, Y)]),
    "a buffer": (lambda self, x, y: isinstance(self.table, P), [(X, Y)]),
    "type of a tensor": (lambda self, x, y: type(x) is Tensor, [(X, Y)]),
    "type of a result": (lambda self, x, y: type(x * 2) == Tensor, [(X, Y)]),  # noqa: E721
    "class of a tensor": (lambda self, x, y: x.__class__ is Tensor, [(X, Y)]),
    "class of a size": (lambda self, x, y: x.shape[0].__class__ is int, SIZES),
    "class of a number": (lambda self, x, y: (5).__class__ is int, SIZES),
    "instance": (lambda self, x, y: isinstance(x.shape[0], int), SIZES),
    "instance of one of several": (lambda self, x, y: isinstance(x.size(0), (str, int)), SIZES),
    "abstract class": (lambda self, x, y: isinstance(x.shape[0], numbers.Integral), SIZES),
    "quotient": (lambda self, x, y: isinstance(x.shape[0] / 2, float), SIZES),
    "relation": (lambda self, x, y: isinstance(x.shape[0] == 5, bool), SIZES),
    "type of a size": (lambda self, x, y: type(x.shape[0]) is int, SIZES),
    "type of a number": (lambda self, x, y: int is int and float is float, SIZES),
    "type in": (lambda self, x, y: type(x.stride(0)) in (int, float), SIZES),
    "type as a key": (lambda self, x, y: {int: True}.get(type(x.shape[0]), False), SIZES),
    "match": (matched, SIZES),
    "shape": (lambda self, x, y: type(x.shape) is torch.Size, SIZES),
}
# name -> the question, the calls, and what is said of some of them
IN_EAGER: dict[str, tuple[Asked, list[tuple[Any, ...]], str]] = {
    "getattr": (lambda self, x, y: getattr(x, "scale", None), SCALED, "has attributes of its own"),
    "hasattr": (lambda self, x, y: hasattr(x, "scale"), SCALED, "has attributes of its own"),
    "try": (has_scale, SCALED, "has attributes of its own"),
    "the module's own": (lambda self, x, y: x is self.table, SAME, "a tensor of the module itself"),
    "requires_grad": (lambda self, x, y: x.requires_grad, GRADIENTS, "gradient"),
    "is_leaf": (lambda self, x, y: x.is_leaf, GRADIENTS, "gradient"),
    "grad_fn": (lambda self, x, y: x.grad_fn is None, GRADIENTS, "gradient"),
    "grad": (lambda self, x, y: x.grad is None, [(X, Y), (with_gradient(), Y)], "asks for grad"),
    "_version": (lambda self, x, y: x._version, [(X, Y), (drawn().add_(1), Y)], "_version"),
    "is_inference": (lambda self, x, y: x.is_inference(), [(X, Y)], "is_inference"),
    "is_pinned": (lambda self, x, y: x.is_pinned(), [(X, Y)], "is_pinned"),
    "is_shared": (lambda self, x, y: x.is_shared(), [(X, Y), (drawn().share_memory_(), Y)], "is_s"),
    "is_view": (lambda self, x, y: x._is_view(), [(X, Y), (drawn()[:], Y)], "_is_view"),
    "gradients": (lambda self, x, y: torch.is_grad_enabled(), [(X, Y)], "gradients are enabled"),
    "inference": (lambda self, x, y: torch.is_inference_mode_enabled(), [(X, Y)], "inference"),
}
FORWARDS = SERVED | {name: case[:2] for name, case in IN_EAGER.items()}


def made(asked: Asked, *, trains: bool = False) -> Asking:
    torch.manual_seed(0)
    return Asking(asked).eval().requires_grad_(trains)


def check(eager: Asking, fast: Any, calls: Sequence[tuple[Any, ...]], *more: Any) -> None:
    for call in (*calls, *calls):
        given = [tuple(m.table if t is OWN else t for t in call) for m in (eager, fast)]
        torch.testing.assert_close(fast(*given[1]), eager(*given[0]), rtol=1e-4, atol=1e-5)


OWN = drawn(5)  # stands for a tensor of the module itself


@pytest.mark.parametrize("mode", ANY)
@pytest.mark.parametrize("name", FORWARDS)
def test_answers_are_those_of_eager(name: str, mode: Any, tmp_path: Path) -> None:
    asked, calls = FORWARDS[name]
    calls = [*calls, (OWN, Y)] if name == "the module's own" else calls
    options = tiny.options(cache_dir=str(tmp_path), strict=name in SERVED)
    eager, fast = made(asked), strop.optimize(made(asked), options=options)
    with mode():
        check(eager, fast, calls)
    if name in SERVED:
        assert fast.forward.variants.num_captures == (
            2 if calls is SAME or calls is PARAMETERS else 1
        )


@pytest.mark.parametrize("name", FORWARDS)
def test_answers_of_a_training_step_are_those_of_eager(name: str, tmp_path: Path) -> None:
    asked, calls = FORWARDS[name]
    options = tiny.options(cache_dir=str(tmp_path))
    eager = made(asked, trains=True)
    fast = strop.optimize(made(asked, trains=True), options=options, train=True)
    check(eager, fast, calls)
    with torch.no_grad():
        check(eager, fast, calls)


@pytest.mark.parametrize("name", IN_EAGER)
def test_what_runs_in_eager_says_why(name: str, tmp_path: Path) -> None:
    asked, calls, reason = IN_EAGER[name]
    calls = [*calls, (OWN, Y)] if name == "the module's own" else calls
    fast = strop.optimize(made(asked), options=tiny.options(cache_dir=str(tmp_path)))
    for mode in ANY:
        with mode():
            check(made(asked), fast, calls)
    assert any(reason in text for text in fast.forward.counters.fallbacks)
    assert reason in str(strop.explain(fast))


def test_a_tensor_given_twice_is_one_input(tmp_path: Path) -> None:
    options = tiny.options(cache_dir=str(tmp_path))
    fast = strop.optimize(made(lambda self, x, y: x is y), options=options)
    with torch.no_grad():
        fast(X, Y), fast(X, X)
    two, one = (variant.program for variant in fast.forward.variants.all)
    assert len(two.inputs) == len(one.inputs) + 1
    assert not fast.forward.counters.fallbacks


def test_whole_numbers_beside_a_tensor_given_twice(tmp_path: Path) -> None:
    """Numbers that become sizes are inputs behind the tensors."""

    class Cut(Asking):
        def forward(self, x: Tensor, y: Tensor, rows: int = 1, more: int = 1) -> Any:
            cut = super().forward(x, y)[:rows]
            return cut, torch.ones(more, rows)

    def cut() -> Cut:
        torch.manual_seed(0)
        return Cut(lambda self, x, y: x is y).eval().requires_grad_(False)

    options = tiny.options(cache_dir=str(tmp_path))
    eager, fast = cut(), strop.optimize(cut(), options=options)
    for numbers_ in ((1, 1), (2, 3), (3, 2), (2, 2), (3, 3)):
        with torch.no_grad():
            check(eager, fast, [(X, Y, *numbers_), (X, X, *numbers_)])


def test_code_that_does_not_ask_has_one_graph(tmp_path: Path) -> None:
    options = tiny.options(cache_dir=str(tmp_path))
    fast = strop.optimize(made(lambda self, x, y: y is None), options=options)
    with torch.no_grad():
        fast(X, Y), fast(X, X), fast(with_attributes(scale=2), Y)
    assert fast.forward.variants.num_captures == 1
    assert fast.forward.state.told_apart.asks_nothing


@pytest.mark.parametrize("name", ["requires_grad", "is_leaf"])
def test_weights_that_begin_to_require_a_gradient(name: str, tmp_path: Path) -> None:
    def asked(self: Any, x: Any, y: Any) -> Any:
        return getattr(self.last.weight, name)

    options = tiny.options(cache_dir=str(tmp_path))
    eager, fast = made(asked), strop.optimize(made(asked), options=options)
    for wants in (False, True, False):
        eager.last.requires_grad_(wants)
        fast.last.requires_grad_(wants)
        with torch.no_grad():
            check(eager, fast, [(X, Y)])


def test_attributes_of_weights(tmp_path: Path) -> None:
    """There before the first call, and put there later."""

    def asked(self: Any, x: Any, y: Any) -> Any:
        return getattr(self.last.weight, "scale", None)

    for first in (0, 2):
        options = tiny.options(cache_dir=str(tmp_path / str(first)))
        eager, fast = made(asked), strop.optimize(made(asked), options=options)
        for step in range(4):
            if step == first:
                eager.last.weight.scale = fast.last.weight.scale = 2  # type: ignore[assignment]
            with torch.no_grad():
                check(eager, fast, [(X, Y)])
        assert any("may ask for scale of last.weight" in t for t in fast.forward.counters.fallbacks)


def on_result(self: Any, x: Tensor) -> Tensor:
    result: Tensor = self.last(x)
    vars(result)["scale"] = 3
    return result


def on_argument(self: Any, x: Tensor) -> Tensor:
    vars(x)["seen"] = True
    return self.last(x)  # type: ignore[no-any-return]


def on_weight(self: Any, x: Tensor) -> Tensor:
    self.last.weight.seen = True
    return self.last(x)  # type: ignore[no-any-return]


def inside(self: Any, x: Tensor) -> Tensor:
    between = self.last(x)
    between.scale = 3
    return between * between.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("body", [on_result, on_argument, on_weight, inside])
def test_attributes_that_a_forward_puts_on_tensors(
    body: Callable[..., Tensor], trains: bool, tmp_path: Path
) -> None:
    class Puts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(8, 8)

        forward = body

    torch.manual_seed(0)
    eager = Puts().eval().requires_grad_(trains)
    fast: Any = copy.deepcopy(eager)
    options = tiny.options(cache_dir=str(tmp_path))
    fast = strop.optimize(fast, options=options, train=trains)
    for rows in (3, 5, 3):
        given = [torch.ones(rows, 8) for _ in range(2)]
        found, wanted = fast(given[0]), eager(given[1])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert vars(found) == vars(wanted)
        assert vars(given[0]) == vars(given[1])
        assert vars(fast.last.weight) == vars(eager.last.weight)
    counters = fast.forward.counters
    assert bool(counters.fallbacks or counters.eager_calls) is (body is not inside)


def test_a_shape_comes_back_as_one(tmp_path: Path) -> None:
    class Shapes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"x": x * 2, "shape": x.shape, "several": (x.size(), x.shape[:1], x.shape[0])}

    fast = strop.optimize(Shapes().eval(), options=tiny.options(cache_dir=str(tmp_path)))
    again = strop.optimize(Shapes().eval(), options=tiny.options(cache_dir=str(tmp_path)))
    for module in (fast, fast, again):  # the last has its graph from disk
        for rows in (3, 5):
            with torch.no_grad():
                found, wanted = (m(torch.ones(rows, 8)) for m in (module, Shapes()))
            assert found["shape"] == wanted["shape"]
            assert found["several"] == wanted["several"]
            kinds = [type(value) for value in (found["shape"], *found["several"])]
            assert kinds == [torch.Size, torch.Size, torch.Size, int]
    assert again.forward.variants.num_captures == 0


def test_which_code_compares_objects() -> None:
    def _of(function: Callable[..., Any]) -> bool:
        return compares_identity(function.__code__)

    assert _of(lambda a, b: a is b)
    assert _of(lambda a, b: a[0] is not b[0])
    assert _of(lambda a, b: [each for each in a if each is b])
    assert _of(lambda a, b: a.x is b.x)
    assert not _of(lambda a, b: a is None or b is not None)
    assert not _of(lambda a, b: type(a) is Tensor or a is nn.Linear)
    assert not _of(lambda a, b: a == b or a in b)


def test_nothing_is_asked_of_most_code() -> None:
    told = ToldApart.by({"shape", "linear"}, False, [X])
    assert told.asks_nothing
    assert not told.misfit([with_attributes(scale=2)])
    assert told.has_usual_answers([X, X])
    assert not told.own

"""Calls that are wrong, or that no graph can serve: eager's own error, or eager's result."""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.dispatch import variants
from strop.errors import OptionError, StropError
from tests.views.running import Function

from .nets import Net, X, optimized


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None]) + 1


def images(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


MISTAKES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "features": (Net, lambda m: m(images(3, 7))),
    "dtype": (Net, lambda m: m(X.double())),
    "integers": (Net, lambda m: m(X.long())),
    "no argument": (Net, lambda m: m()),
    "unknown keyword": (Net, lambda m: m(X, factor=2)),
    "one argument too many": (Net, lambda m: m(X, X)),
    "a text": (Net, lambda m: m("hello")),
    "a list of numbers": (Net, lambda m: m([1.0, 2.0])),
    "none": (Net, lambda m: m(None)),
    "a keyword that is no number": (Net, lambda m: m(X, scale="big")),
    "channels": (Convolution, lambda m: m(images(2, 3, 8, 8))),
    "dtype of an image": (Convolution, lambda m: m(images(2, 4, 8, 8, dtype=torch.float64))),
    "an image smaller than the window": (Convolution, lambda m: m(images(2, 4, 2, 2))),
    "head sizes": (Attention, lambda m: m(images(2, 5, 8), images(2, 5, 4), images(2, 5, 4))),
}


@pytest.mark.parametrize("strict", [False, True], ids=["usual", "strict"])
@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_what_eager_makes_of_it(name: str, when: str, strict: bool) -> None:
    kind, call = MISTAKES[name]
    with torch.no_grad():
        with pytest.raises(Exception) as wanted:  # noqa: PT011  (whatever eager raises)
            call(kind().eval())
        module = optimized(kind(), strict=strict)
        right = images(2, 4, 8, 8) if kind is Convolution else X
        rights = (right[None],) * 3 if kind is Attention else (right,)
        if when == "later":
            module(*rights)
        with pytest.raises(type(wanted.value)) as found:
            call(module)
        assert type(found.value) is type(wanted.value)
        assert str(found.value) == str(wanted.value)
        module(*rights)
    assert module.forward.counters.eager_calls == 0, module.forward.counters.fallbacks


class OwnError(Exception):
    """A user's own, which Strop knows nothing about."""


class Raises(Net):
    """Raises for more than ``most`` rows, deep inside."""

    def __init__(self, error: Exception, most: int) -> None:
        super().__init__()
        self.error, self.most = error, most

    def check(self, x: Tensor) -> None:
        if x.shape[0] > self.most:
            raise self.error

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return self.lin(x)


@pytest.mark.parametrize("most", [2, 4], ids=["at capture", "later"])
@pytest.mark.parametrize("strict", [False, True], ids=["usual", "strict"])
@pytest.mark.parametrize(
    "error", [OwnError("mine"), KeyError("k"), OSError(2, "no file")], ids=repr
)
def test_an_exception_of_the_forward_comes_out_as_it_is(
    error: Exception, strict: bool, most: int, caplog: Any
) -> None:
    module = optimized(Raises(error, most), strict=strict)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "strop"):
        if most > 3:
            module(X)
        with pytest.raises(type(error)) as found:
            module(torch.cat([X, X]))
        assert found.value is error
        assert error.__cause__ is None
        assert error.__context__ is None
        names = [frame.name for frame in traceback.extract_tb(found.value.__traceback__)]
        assert names[-2:] == ["forward", "check"]
        torch.testing.assert_close(module(X[:2]), module.forward.eager(X[:2]))
    assert module.forward.counters.eager_calls == 0, "the other sizes are compiled all the same"
    assert not caplog.messages


class Guarded(Net):
    """Turns torch's error about values into one of its own, which eager never sees."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            is_positive = bool(x.sum() > 0)
        except RuntimeError as error:
            raise OwnError("no values here") from error
        return self.lin(x) if is_positive else -self.lin(x)


class Branches(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if x.sum() > 0 else -self.lin(x)


@pytest.mark.parametrize("kind", [Guarded, Branches])
def test_control_flow_that_depends_on_values_runs_in_eager(kind: type[Net], caplog: Any) -> None:
    module, plain = optimized(kind()), kind().eval()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "strop"):
        for x in (X.abs(), -X.abs(), X.abs()):
            assert torch.equal(module(x), plain(x))
    (message,) = caplog.messages
    assert kind.__name__ in message
    reason = "no values here" if kind is Guarded else "that the values of a tensor decide"
    assert reason in message
    assert "\n" not in message
    line = inspect.getsourcelines(kind.forward)[1]
    places = [f"(test_calls.py:{line + after})" for after in range(6)]
    assert any(place in message for place in places), "where the forward asks"
    assert module.forward.counters.eager_calls == 3
    with torch.no_grad(), pytest.raises(StropError, match="tracing"):
        optimized(kind(), strict=True)(X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.max().item(),
        lambda x: x[: int(x[0, 0])],
        lambda x: torch.nonzero(x.flatten()).flatten(),
        lambda x: x[torch.nonzero(x[:, 0]).flatten()].reshape(-1, 2).transpose(0, 1).flatten(),
        lambda x: x[x > 0].view(-1, 2).contiguous() + 1,
    ],
)
def test_numbers_read_from_tensors_are_called_so(
    function: Callable[[Tensor], Tensor], caplog: Any
) -> None:
    module = strop.optimize(Function(function).eval())
    x = torch.full((3, 4), 2.0)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "strop"):
        assert torch.equal(module(x), function(x))
    (message,) = caplog.messages
    assert "reads from a tensor" in message or "the values of a tensor decide" in message
    assert "\n" not in message


class Loops(nn.Module):
    """A state that walks along a dim, in Python: a graph for each length."""

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = torch.tanh(state + x[:, step])
        return state


def test_loops_over_a_size_are_told_and_graphs_for_single_sizes_are_few(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "MOST_FIXED", 2)
    module = optimized(Loops())
    with torch.no_grad(), caplog.at_level(logging.WARNING, "strop"):
        for length in (3, 2, 4, 5, 3, 4):
            x = torch.randn(2, length)
            torch.testing.assert_close(module(x), module.forward.eager(x))
    assert len(module.forward.variants.all) == 2
    assert module.forward.counters.eager_calls == 3
    (message,) = caplog.messages
    assert "2 graphs for one size each: its code fixes the size d0_1 at 2: Eq(" in message
    assert "test_calls.py" in message  # where
    module = optimized(Loops(), strict=True)
    with torch.no_grad():
        module(torch.randn(2, 3)), module(torch.randn(2, 2))
        with pytest.raises(StropError, match="its code fixes the size"):
            module(torch.randn(2, 4))


class Wide(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)[:, None].expand(-1, 2**40, -1) * 2


def test_what_does_not_fit_into_memory_is_torchs_own_error() -> None:
    module = optimized(Wide())
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                module(X)
        torch.testing.assert_close(module(X[:0]), module.forward.eager(X[:0]))


def test_an_interrupt_is_no_reason_to_go_on() -> None:
    class Interrupted(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        optimized(Interrupted())(X)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("made", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 8))])
def test_a_scripted_module_has_no_forward_to_trace(made: Any) -> None:
    module = made(nn.Linear(8, 8).eval())
    with pytest.raises(OptionError, match="the module that was scripted or traced"):
        strop.optimize(module)
    assert torch.equal(module(torch.zeros(2, 8)), module(torch.zeros(2, 8))), "as it was"

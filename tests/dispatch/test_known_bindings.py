"""What was bound to an earlier state of a module serves that state again, and is never stale."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.dispatch.known_bindings import MOST_BINDINGS
from strop.runtime.run import shape_plan
from tests.dispatch.test_kept_bindings import Pair, X, assert_alike
from tests.e2e import tiny


class Modal(Pair):
    """What its ``mode`` is decides about its graph."""

    mode = "as it is"

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found if self.mode == "as it is" else found.tanh() + len(self.mode)


def pairs() -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain, fast = Modal().eval(), Modal().eval()
    fast.load_state_dict(plain.state_dict())
    for module in (plain, fast):
        module.mode = "as it is"
    strop.optimize(fast, options=tiny.options())
    return plain, fast


def turn(plain: Any, fast: Any, mode: str) -> None:
    for module in (plain, fast):
        module.mode = mode
    assert_alike(plain, fast)


def entry_of(fast: Any) -> Any:
    (entry,) = fast.forward.shapes.entries
    return entry


def test_an_earlier_state_has_what_was_bound_to_it() -> None:
    plain, fast = pairs()
    entries = []
    for mode in ("as it is", "bent", "as it is", "bent"):
        turn(plain, fast, mode)
        entries.append(entry_of(fast))
    assert entries[:2] == entries[2:]
    assert entries[0] is not entries[1]
    assert fast.forward.counters.rebinds == 1


def moved(module: Any) -> None:
    module.first.weight.data = module.first.weight.data * 2


def renewed(module: Any) -> None:
    module.second.weight = nn.Parameter(module.second.weight.detach() * 2)


def transposed(module: Any) -> None:
    with torch.no_grad():
        module.first.weight.t_()  # the same Parameter, at the same address


def left_out(module: Any) -> None:
    module.second = nn.Linear(4, 4)
    nn.init.constant_(module.second.weight, 0.5)
    nn.init.zeros_(module.second.bias)


@pytest.mark.parametrize(
    ("change", "is_seen"),
    [
        *((change, is_seen) for change in (moved, renewed, left_out) for is_seen in (False, True)),
        (transposed, False),
    ],
)
def test_weights_that_changed_meanwhile_are_read(
    change: Callable[[Any], None], is_seen: bool
) -> None:
    """``is_seen``: a call in the other state sees the change before the setting is turned back."""
    plain, fast = pairs()
    assert_alike(plain, fast)
    first, before = entry_of(fast), plain(X).detach()
    turn(plain, fast, "bent")
    for module in (plain, fast):
        change(module)
    if is_seen:
        assert_alike(plain, fast)
    turn(plain, fast, "as it is")
    assert not torch.allclose(plain(X), before)
    assert entry_of(fast) is not first


def test_values_written_meanwhile_are_read_by_what_was_bound() -> None:
    plain, fast = pairs()
    assert_alike(plain, fast)
    first = entry_of(fast)
    turn(plain, fast, "bent")
    with torch.no_grad():
        for module in (plain, fast):
            module.first.weight.mul_(-1)
    turn(plain, fast, "as it is")
    assert entry_of(fast) is first


def test_weights_that_went_are_free() -> None:
    plain, fast = pairs()
    assert_alike(plain, fast)
    turn(plain, fast, "bent")
    gone = weakref.ref(fast.first.weight)
    for module in (plain, fast):
        module.first.weight = nn.Parameter(module.first.weight.detach() + 1)
    assert_alike(plain, fast)
    gc.collect()
    assert gone() is None


def test_few_states_are_kept() -> None:
    plain, fast = pairs()
    for number in range(2 * MOST_BINDINGS):
        turn(plain, fast, "bent" * number or "as it is")
    known = fast.forward.shapes._known
    assert len(list(known.entries)) == MOST_BINDINGS
    fast.forward.forget_shapes()
    assert not list(known.entries)


def test_a_shape_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is bound anew where weights have moved."""
    planned = []
    original = shape_plan.plan_shape

    def counted(*args: Any, **kwargs: Any) -> Any:
        planned.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(shape_plan, "plan_shape", counted)
    plain, fast = pairs()
    for change in (None, moved, renewed, moved):
        for module in (plain, fast) if change else ():
            change(module)
        assert_alike(plain, fast)
    assert fast.forward.counters.rebinds == 3
    assert len(planned) == 1

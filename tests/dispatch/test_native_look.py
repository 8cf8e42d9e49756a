"""A look in native code answers as one in Python does."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import strop
from strop.dispatch import native_look as native
from strop.dispatch import quick_look, replayed_calls
from strop.dispatch.module_state import ModuleState
from strop.dispatch.native_look import NativeLook, Watched
from strop.dispatch.quick_look import LookWhenReady, QuickLook
from strop.errors import CodegenError
from strop.options import Options
from tests.diffusion.replayed import replayed_first
from tests.e2e import tiny

FACTOR, LISTED, MAPPED = 1.5, [1.0, 2.0], {"a": 1.0, "b": 2.0}
ROWS, NAMES = np.array([1.0, 2.0]), {"x"}


def closed() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    number = 2.5

    def scaled(x: Tensor) -> Tensor:
        return x * number

    def put(value: float) -> None:
        nonlocal number
        number = value

    return scaled, put


SCALED, PUT = closed()


class Base(nn.Module):
    bias = 0.5


class Part(Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.scale = nn.Linear(4, 4), nn.Dropout(0.5), 0.25
        self.table = nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.linear(x)) * self.scale + self.bias
        x = SCALED(x) * FACTOR + LISTED[0] + MAPPED["a"] + self.table.weight.sum()
        return x + float(ROWS[0]) + ("x" in NAMES) + getattr(self, "more", 0)


class Twin(Part):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(), Part()
        self.second.register_forward_hook(traced_hook)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def traced_hook(*args: Any) -> None:
    """Stands for a hook that the trace captures."""


traced_hook.__module__ = "transformers.utils.output_capturing"


def look_at(module: nn.Module) -> tuple[Callable[[], bool], QuickLook]:
    """Return the look in Python, and the one that is in native code first."""
    state = ModuleState(module)
    function, reason = native.native_look("")
    assert not reason
    python = state.comparison(is_memory_known=True)
    quick = state.comparison(is_memory_known=True, native=function)
    assert python is not None
    assert isinstance(quick, QuickLook)
    return python, quick


def put(table: Any, key: Any, value: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda net, patch: patch.setitem(table, key, value)


def other_class(net: Net, patch: pytest.MonkeyPatch) -> None:
    net.first.__class__ = Twin


def longer(net: Net, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "LISTED", LISTED)
    LISTED.append(3.0)


def reordered(net: Net, patch: pytest.MonkeyPatch) -> None:
    MAPPED["a"] = MAPPED.pop("a")


def other_hook(net: Net, patch: pytest.MonkeyPatch) -> None:
    hooks = net.second._forward_hooks
    hooks[next(iter(hooks))] = print


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "a number": lambda net, patch: setattr(net.first, "scale", 0.75),
    "a further attribute": lambda net, patch: setattr(net.first, "more", 1),
    "one attribute less": lambda net, patch: delattr(net.first, "scale"),
    "one attribute for another": lambda net, patch: vars(net.first).update(
        more=vars(net.first).pop("scale")
    ),
    "a part": lambda net, patch: setattr(net.first, "drop", nn.ReLU()),
    "one part less": lambda net, patch: delattr(net.first, "drop"),
    "a Parameter": lambda net, patch: setattr(
        net.first.linear, "bias", nn.Parameter(torch.zeros(4))
    ),
    "no Parameter": lambda net, patch: setattr(net.first.linear, "bias", None),
    "training of all": lambda net, patch: vars(net).update(training=True),
    "training of a layer": lambda net, patch: net.first.drop.train(),
    "a hook": lambda net, patch: net.first.register_forward_hook(print),
    "another hook": other_hook,
    "a forward": lambda net, patch: setattr(net.first, "forward", abs),
    "a class": other_class,
    "an attribute of a class": lambda net, patch: patch.setattr(Part, "bias", 1.5, raising=False),
    "an attribute of a base": lambda net, patch: patch.setattr(Base, "bias", 1.5),
    "a method": lambda net, patch: patch.setattr(Part, "forward", Base.forward),
    "a global name": put(globals(), "FACTOR", 2.5),
    "no global name": lambda net, patch: patch.delitem(globals(), "FACTOR"),
    "a function of torch": lambda net, patch: patch.setattr(nn.functional, "linear", abs),
    "an item of a list": lambda net, patch: LISTED.__setitem__(1, 9.0),
    "a longer list": longer,
    "a shorter list": lambda net, patch: LISTED.pop(),
    "an item of a dictionary": put(MAPPED, "b", 9.0),
    "a longer dictionary": put(MAPPED, "c", 9.0),
    "a shorter dictionary": lambda net, patch: patch.delitem(MAPPED, "b"),
    "a key of a dictionary": lambda net, patch: MAPPED.update(c=MAPPED.pop("b")),
    "the order of a dictionary": reordered,
    "an array": lambda net, patch: ROWS.__setitem__(0, 7.0),
    "a set": lambda net, patch: NAMES.add("y"),
    "a variable of an enclosing function": lambda net, patch: PUT(3.5),
    "rows of a table": lambda net, patch: setattr(net.first.table.weight, "data", torch.ones(6, 4)),
}


@pytest.fixture
def restored() -> Any:
    yield
    LISTED[:], ROWS[0] = [1.0, 2.0], 1.0
    MAPPED.clear()
    MAPPED.update(a=1.0, b=2.0)
    NAMES.discard("y")
    PUT(2.5)


@pytest.mark.parametrize("name", CHANGES)
def test_it_sees_what_python_sees(
    name: str, restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net().eval().requires_grad_(False)
    python, quick = look_at(net)
    assert python()
    assert quick._holds()
    CHANGES[name](net, monkeypatch)
    assert not python()
    assert not quick()


def test_an_equal_number_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net().eval().requires_grad_(False)
    _, quick = look_at(net)
    for count in range(1, 6):
        net.first.scale = float("0.25")
        assert not quick._holds()
        assert quick()
        assert quick._holds() == (count in (1, 2, 4))  # it is noted anew more and more seldom
    net.first.scale = 0.5
    assert not quick()


def test_names_that_the_module_writes_itself_are_left_out() -> None:
    net = Net().eval().requires_grad_(False)
    state = ModuleState(net)
    function, _ = native.native_look("")
    quick = state.comparison(is_memory_known=True, native=function)
    assert isinstance(quick, QuickLook)
    state.ignore(frozenset({"first.scale"}))
    assert not quick._holds()
    net.first.scale = 0.5
    assert quick()
    assert quick._holds()


def watched(**parts: Any) -> Watched:
    nothing = {"places": (), "owned": (), "num_owned": 0, "kinds": (), "contents": ()}
    return Watched(**nothing | parts)


class Table:
    """Stands for a table that native code cannot read."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def __len__(self) -> int:
        return len(self.values)


@pytest.mark.parametrize("kind", [dict, OrderedDict, Table], ids=lambda kind: kind.__name__)
def test_tables_of_every_kind(kind: Any) -> None:
    function, _ = native.native_look("")
    table, values = kind(a=1.5, b=2.5), None
    values = table if isinstance(table, dict) else table.values
    named = NativeLook(function, watched(places=[(table, "a", values["a"])]))
    counted = NativeLook(function, watched(owned=[table], num_owned=2))
    assert named.holds()
    assert counted.holds()
    values["a"] = 3.5
    values["c"] = 3.5
    assert not named.holds()
    assert not counted.holds()


def refuse(self: Any, sources: Any) -> None:
    raise CodegenError("g++ was not found")


def test_without_a_compiler_python_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.NativeKernels, "make", refuse)
    monkeypatch.setattr(replayed_calls, "look_if_ready", native.native_look)
    net = Net().eval().requires_grad_(False)
    with replayed_first(), torch.no_grad():
        fast = strop.optimize(copy.deepcopy(net), options=tiny.options(cache_dir=str(tmp_path)))
        x = torch.randn(2, 4)
        for _ in range(5):
            torch.testing.assert_close(fast(x), net(x))
        assert fast.forward.counters.short_replays == 2
        assert "looked at in Python, as there is no native code: g++ was not" in str(
            strop.explain(fast)
        )
        fast.first.scale = 0.75
        assert not torch.allclose(fast(x), net(x))


def test_no_call_waits_for_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go the long way until another thread has compiled what looks. An error is raised by the
    call behind it."""
    may_end, make = threading.Event(), native.NativeKernels.make

    def late(self: Any, sources: Any) -> None:
        assert may_end.wait(120)
        make(self, sources)

    monkeypatch.setattr(native.NativeKernels, "make", late)
    net, x = Net().eval().requires_grad_(False), torch.randn(2, 4)
    with replayed_first(), torch.no_grad():
        fast = strop.optimize(copy.deepcopy(net), options=tiny.options(cache_dir=str(tmp_path)))
        for _ in range(5):
            torch.testing.assert_close(fast(x), net(x))
        counters = fast.forward.counters
        assert (counters.replays, counters.short_replays) == (4, 0)
        may_end.set()
        native._BUILDS[str(tmp_path)].result(120)
        for _ in range(2):
            torch.testing.assert_close(fast(x), net(x))
        assert (counters.replays, counters.short_replays) == (6, 1)


def test_an_error_of_the_build_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cache_dir: str) -> Any:
        raise RuntimeError("of the build")

    monkeypatch.setattr(native, "native_look", broken)
    with contextlib.suppress(RuntimeError):
        native.look_if_ready(str(tmp_path))
        native._BUILDS[str(tmp_path)].result(120)
    with pytest.raises(RuntimeError, match="of the build"):
        native.look_if_ready(str(tmp_path))


def test_it_needs_the_global_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    function, reason = native.native_look(str(tmp_path))
    assert function is None
    assert "global lock" in reason


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[LookWhenReady]:
    """Short ways of all modules, which look in native code as soon as that is compiled."""
    made = list[LookWhenReady]()

    def note(self: LookWhenReady, *args: Any) -> None:
        begin(self, *args)
        made.append(self)

    begin = LookWhenReady.__init__
    monkeypatch.setattr(LookWhenReady, "__init__", note)
    monkeypatch.setattr(quick_look, "look_if_ready", native.native_look)
    monkeypatch.setattr(quick_look, "MANY_NAMES", 1)
    return made


def test_small_calls_on_a_cpu_look_so(looks: list[LookWhenReady], tmp_path: Any) -> None:
    """They do from the fifth on, and see memory that has moved, and what else is another."""
    net = nn.Sequential(nn.LayerNorm(8), nn.Softmax(-1)).eval().requires_grad_(False)
    plain = copy.deepcopy(net)
    strop.optimize(net, options=Options(cache_dir=str(tmp_path), strict=True))
    x = torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(9):
            net(x)
        (look,) = looks
        quick = look._look
        assert isinstance(quick, QuickLook)
        assert quick._holds()
        net[0].weight.data = torch.full((8,), 2.0)
        assert not quick()
        plain[0].weight.fill_(2.0)
        torch.testing.assert_close(net(x), plain(x))
        for _ in range(9):
            net(x)
        net[0].eps = 3.0
        plain[0].eps = 3.0
        torch.testing.assert_close(net(x), plain(x))


def test_without_native_code_it_stays_in_python(
    looks: list[LookWhenReady], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([None, None, (None, "there is no compiler")])
    monkeypatch.setattr(quick_look, "look_if_ready", lambda folder: next(answers))
    state = ModuleState(Net().eval().requires_grad_(False))
    python = state.comparison()
    look = quick_look.quickest(state, python, "")
    assert isinstance(look, LookWhenReady)
    for _ in range(20):  # it asks until there is an answer, and then no more
        assert look()
    assert look._look is python
    state.module.first.scale = 0.5
    assert not look()

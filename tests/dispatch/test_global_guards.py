"""What a forward reads besides arguments, weights and settings is a part of its program's key."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.dispatch.module_state import ModuleState
from strop.errors import StropError
from strop.options import Options
from strop.runtime.build import loader as kernels
from tests.e2e import tiny

X = torch.randn(3, 8, generator=torch.manual_seed(0))

SCALE = 2.0
FACTORS = [1.0, 2.0]
TABLE = {"gain": 0.5}
COUNT = _SEEN = 0
shape = 7  # no name of ``x.shape``
elsewhere = types.ModuleType("elsewhere")
elsewhere.GAIN = 2.0


class Config:
    def __init__(self, gain: float) -> None:
        self.gain = gain
        self.seen = 0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.gain


CONFIG = Config(2.0)


def activation(x: Tensor) -> Tensor:
    return x.sigmoid() * SCALE


def other_activation(x: Tensor) -> Tensor:
    return x.tanh()


def helped(x: Tensor) -> Tensor:
    return activation(x)


PARTIAL = functools.partial(torch.mul, other=2.0)


def reads(body: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return type("Reads", (nn.Module,), {"forward": body, "LEVEL": 2.0, "step": _step})().eval()


def _step(self: nn.Module, x: Tensor) -> Tensor:
    return x * SCALE


def _closure(level: float) -> tuple[nn.Module, Callable[[], None]]:
    def body(self: nn.Module, x: Tensor) -> Tensor:
        return x * level

    def change() -> None:
        nonlocal level
        level = 5.0

    return reads(body), change


def _set(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda module: globals().__setitem__(name, value)


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[nn.Module], None]]] = {
    "a number": (lambda self, x: x * SCALE, _set("SCALE", 3.0)),
    "zero and minus zero": (lambda self, x: x * 0 + SCALE, _set("SCALE", -2.0)),
    "a number in a lambda": (lambda self, x: (lambda: x * SCALE)(), _set("SCALE", 3.0)),
    "a list": (lambda self, x: x * FACTORS[1], lambda m: FACTORS.append(FACTORS.pop() + 1)),
    "a dict": (lambda self, x: x * TABLE["gain"], lambda m: TABLE.update(gain=4.0)),
    "a function": (lambda self, x: activation(x), _set("activation", other_activation)),
    "what a function calls": (lambda self, x: helped(x), _set("activation", other_activation)),
    "what a method reads": (lambda self, x: self.step(x), _set("SCALE", 3.0)),
    "a class attribute": (lambda self, x: x * self.LEVEL, lambda m: setattr(type(m), "LEVEL", 4)),
    "a forward": (lambda self, x: x * 2, lambda m: setattr(type(m), "forward", _step)),
    "another module": (
        lambda self, x: x * elsewhere.GAIN,
        lambda m: setattr(elsewhere, "GAIN", 3.0),
    ),
    "an object": (lambda self, x: CONFIG.scaled(x), lambda m: setattr(CONFIG, "gain", 3.0)),
    "another object": (lambda self, x: CONFIG.scaled(x), _set("CONFIG", Config(3.0))),
    "a partial": (
        lambda self, x: PARTIAL(x),
        _set("PARTIAL", functools.partial(torch.mul, other=4.0)),
    ),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    kept = dict(globals())
    yield
    for name in ("SCALE", "activation", "CONFIG", "PARTIAL", "COUNT", "shape"):
        globals()[name] = kept[name]
    FACTORS[:], TABLE["gain"], CONFIG.gain, elsewhere.GAIN = [1.0, 2.0], 0.5, 2.0, 2.0
    kernels.kernel_loader.cache_clear()


def optimized(module: nn.Module, folder: Path) -> nn.Module:
    return strop.optimize(module, options=Options(cache_dir=str(folder), strict=True))


def check(module: nn.Module) -> None:
    with torch.no_grad():
        torch.testing.assert_close(module(X), module.forward.eager(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_another_value_is_another_graph(name: str, tmp_path: Path) -> None:
    body, change = CASES[name]
    module = optimized(reads(body), tmp_path)
    check(module)
    change(module)
    if name == "a forward":  # the instance's own was bound at ``optimize``
        module.forward._eager = types.MethodType(_step, module)
    check(module)
    check(module)
    assert module.forward.variants.num_captures == 2
    again = optimized(reads(body if name != "a forward" else _step), tmp_path)
    if name == "a class attribute":
        type(again).LEVEL = 4
    check(again)
    assert again.forward.variants.num_captures == 0, "on disk under its own key"


def test_a_value_that_returns_has_its_graph(tmp_path: Path) -> None:
    global SCALE
    module = optimized(reads(lambda self, x: x * SCALE), tmp_path)
    for value in (2.0, 3.0, 2.0, 3.0):
        SCALE = value
        check(module)
    assert module.forward.variants.num_captures == 2


def test_a_closure_and_an_equal_value(tmp_path: Path) -> None:
    global SCALE, shape
    module, change = _closure(1.5)
    optimized(module, tmp_path)
    check(module)
    change()
    check(module)
    assert module.forward.variants.num_captures == 2

    module = optimized(reads(lambda self, x: x * SCALE + x.shape[0]), tmp_path)
    check(module)
    SCALE = float("2.0")  # equal, another object
    shape = 8  # no name that the forward reads
    check(module)
    assert module.forward.counters.rebinds == 0


def test_a_forward_that_writes_elsewhere_runs_in_eager(tmp_path: Path) -> None:
    def body(self: nn.Module, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        CONFIG.seen += 1
        return x * 2

    module = strop.optimize(reads(body), options=Options(cache_dir=str(tmp_path)))
    before = COUNT, CONFIG.seen
    for _ in range(3):  # the first is traced besides
        module(torch.ones(8))
    assert (COUNT, CONFIG.seen) == (before[0] + 3, before[1] + 3)
    assert module.forward.variants.num_captures == 1
    (reason,) = module.forward.counters.fallbacks
    assert "COUNT" in reason
    assert "CONFIG.seen" in reason
    strict = strop.optimize(reads(body), options=Options(cache_dir=str(tmp_path), strict=True))
    with pytest.raises(StropError, match="COUNT"):
        strict(torch.ones(8))


def test_a_cache_that_a_forward_writes_elsewhere_is_not_watched(
    tmp_path: Path, caplog: Any
) -> None:
    def body(self: nn.Module, x: Tensor) -> Tensor:
        global _SEEN
        _SEEN += 1
        return x * 2

    module = optimized(reads(body), tmp_path)
    for _ in range(3):
        check(module)  # which runs eager beside it
    assert module.forward.variants.num_captures == 1
    (line,) = [r.getMessage() for r in caplog.records if "writes" in r.getMessage()]
    assert "_SEEN" in line


class Backend:
    """What a library keeps for each class of tensor that it has met, as einops does."""

    def doubled(self, x: Tensor) -> Tensor:
        return x + x


_BACKENDS: dict[type, Backend] = {}


def test_a_cache_that_a_trace_has_filled_is_no_other_structure(tmp_path: Path) -> None:
    """Where modules are looked at anew, as when a LoRA loader puts other weights in their place."""

    def body(self: nn.Module, x: Tensor) -> Tensor:
        if Tensor not in _BACKENDS:
            _BACKENDS[Tensor] = Backend()
        return _BACKENDS[Tensor].doubled(x) * self.weight

    _BACKENDS.clear()
    module = reads(body)
    module.weight = nn.Parameter(torch.ones(8), requires_grad=False)
    optimized(module, tmp_path)
    check(module)
    for value in (2.0, 3.0):
        module.weight = nn.Parameter(torch.full((8,), value), requires_grad=False)
        copy.copy(_BACKENDS[Tensor])  # which notes something in the class
        check(module)
    assert module.forward.variants.num_captures == 1


def test_a_trace_that_fails_is_not_tried_again_for_what_it_wrote(tmp_path: Path) -> None:
    def body(self: nn.Module, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return x * 2 if x.sum() > 0 else x

    module = strop.optimize(reads(body), options=Options(cache_dir=str(tmp_path)))
    for _ in range(3):
        check(module)
    assert module.forward.variants.num_captures == 1
    assert module.forward.counters.eager_calls == 3


LIBRARY = """
import torch
FLAG, LIMITS = 2.0, [1]

def helped(x):
    return x * FLAG

class Layer(torch.nn.Module):
    def forward(self, x):
        return self.again(x)

    def again(self, x):
        return helped(x) * FLAG * len(LIMITS)
"""


@pytest.mark.parametrize("library", ["torch.nn.layer", "diffusers.models.layer", "own.layer"])
def test_of_libraries_little_is_watched(library: str) -> None:
    space: dict[str, Any] = {"__name__": library}
    exec(LIBRARY, space)
    labels = {line.split("=")[0] for line in ModuleState(space["Layer"]()).global_guards.text}
    own = {"Layer.forward", "Layer.again", "helped", "FLAG", "LIMITS"}
    watched = {"torch.nn.layer": set(), "diffusers.models.layer": {"FLAG"}, "own.layer": own}
    assert labels == {f"{library}.{name}" for name in watched[library]}


def test_a_unet_costs_nothing() -> None:
    assert not ModuleState(tiny.unet()).global_guards.text


def calls(layer: nn.Module, body: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    kind = type("Reader", (nn.Module,), {"forward": body})
    module: nn.Module = kind().eval()
    module.layer = layer
    return module


READERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "named": lambda self, x: self.layer(x) * self.layer.in_features,
    "by getattr": lambda self, x: self.layer(x) * getattr(self.layer, "in_features"),  # noqa: B009
    "in a tuple": lambda self, x: (
        self.layer(x) * sum(getattr(self.layer, name) for name in ("in_features", "out_features"))
    ),
    "in a closure": lambda self, x: self.layer(x) * (lambda m: m.in_features)(self.layer),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_layers_setting_that_some_code_reads_counts(reader: str, tmp_path: Path) -> None:
    module = calls(nn.Linear(8, 8), READERS[reader])
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    check(module)
    module.layer.in_features = 5
    check(module)
    module.layer.in_features = 5.5
    check(module)


def test_a_setting_that_nobody_reads_is_not_watched() -> None:
    module = calls(nn.Linear(8, 8), lambda self, x: self.layer(x))
    state = ModuleState(module)
    module.forward = module.forward
    assert not state.has_new_structure()
    module.layer.in_features = 5
    assert not state.has_new_structure()
    module.layer.added = 5  # nobody knows who reads it
    assert state.has_new_structure()


def test_a_setting_that_a_user_gives_a_layer_is_watched() -> None:
    module = calls(nn.Linear(8, 8), lambda self, x: self.layer(x))
    module.layer.added = 5
    state = ModuleState(module)
    module.forward = module.forward
    assert not state.has_new_structure()
    module.layer.added = 6
    assert state.has_new_structure()


def test_keys_hold_no_addresses() -> None:
    lines = [
        line for body, _ in CASES.values() for line in ModuleState(reads(body)).global_guards.text
    ]
    assert any("lambda" in line for line in lines)
    assert not [line for line in lines if " at 0x" in line]

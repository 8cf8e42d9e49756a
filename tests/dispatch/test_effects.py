"""Objects that are no modules: what a forward changes in them happens at every call, a trace leaves
nothing behind, and what a user changes in them is seen."""

from __future__ import annotations

import copy
import functools
import types
from argparse import Namespace
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import strop
from strop.errors import StropError
from strop.options import Options

CALLS = 4
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # fp32 sums of eight


class Processor:
    """As diffusers' attention has one: an object that a module calls, and no module itself."""

    shared = 0

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        self.act = act
        self.count, self._count, self._tally, self.scale = 0, 0, 0, 1.0
        self.maps: Any = []
        self._maps: list[Tensor] = []
        self._tables: dict[int, Tensor] = {}
        self.inner: Any = None

    def __call__(self, part: nn.Linear, x: Tensor) -> Tensor:
        return self.act(self, part(x))


class Layer(nn.Module):
    def __init__(self, processor: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8).requires_grad_(False)
        self.processor = processor

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(self.linear, x)


class Controller:
    """Shared by processors, as of Prompt-to-Prompt."""

    def __init__(self) -> None:
        self.layer, self.step, self.store = 0, 0, {"down": []}

    def __call__(self, x: Tensor) -> Tensor:
        self.layer += 1
        self.store["down"].append(x)
        if self.layer == 2:
            self.layer, self.store = 0, {"down": []}
            self.step += 1
        return x if self.step < 2 else x * 0.5


class Slotted:
    __slots__ = ("count", "unset")

    def __init__(self) -> None:
        self.count = 0


@dataclass
class Record:
    count: int = 0
    seen: list[int] = field(default_factory=list)


TOTAL = 0
GLOBAL: dict[str, Any] = {}
CONTROLLER = Controller()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    global TOTAL
    yield
    TOTAL, Processor.shared, CONTROLLER.__dict__ = 0, 0, vars(Controller())
    GLOBAL.clear()
    globals().pop("LATEST", None)
    halved.cache_clear()


def fades(p: Processor, x: Tensor) -> Tensor:
    p.count += 1
    return x if p.count <= 2 else x * 0.25


def fades_by_a_private_count(p: Processor, x: Tensor) -> Tensor:
    p._count += 1
    return x if p._count <= 2 else x * 0.25


def fades_by_setattr(p: Processor, x: Tensor) -> Tensor:
    setattr(p, "cou" + "nt", getattr(p, "cou" + "nt") + 1)
    return x * p.count


def keeps_maps(p: Processor, x: Tensor) -> Tensor:
    p.maps.append(x)
    return x * 2


def keeps_private_maps(p: Processor, x: Tensor) -> Tensor:
    p._maps.append(x)
    return x * 2


def keeps_the_latest(p: Processor, x: Tensor) -> Tensor:
    p.latest = x
    return x * 2


def controls(p: Processor, x: Tensor) -> Tensor:
    return p.inner(x)


def _with(value: Any, act: Callable[[Any, Tensor], Any]) -> Callable[[Processor, Tensor], Tensor]:
    """An act on an object that the processor holds; the value is as that says."""

    def on(p: Processor, x: Tensor) -> Tensor:
        if p.inner is None:
            raise AssertionError("the test gives it one")
        return x * act(p.inner, x)

    on.inner = value  # type: ignore[attr-defined]
    return on


def counts_globally(p: Processor, x: Tensor) -> Tensor:
    global TOTAL
    TOTAL += 1
    return x * TOTAL


def makes_a_global(p: Processor, x: Tensor) -> Tensor:
    global LATEST
    LATEST = x
    return x * 2


def counts_in_its_class(p: Processor, x: Tensor) -> Tensor:
    type(p).shared += 1
    return x * Processor.shared


def writes_a_global_dict(p: Processor, x: Tensor) -> Tensor:
    GLOBAL["count"] = GLOBAL.get("count", 0) + 1
    return x * GLOBAL["count"]


def controls_globally(p: Processor, x: Tensor) -> Tensor:
    return CONTROLLER(x)


def grows_a_default(p: Processor, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return x * len(seen)


def _closure() -> Callable[[Processor, Tensor], Tensor]:
    count, table = 0, {"a": 0}

    def act(p: Processor, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        table["a"] += 1
        return x * (count + table["a"])

    return act


def _bumped(value: Any) -> int:
    value.count += 1
    return int(value.count)


def _appended(value: Any) -> int:
    value.append(1)
    return len(value)


def _recorded(value: Record) -> int:
    value.seen.append(1)
    return len(value.seen)


def _numbered(value: Any, key: str = "n") -> int:
    value[key] += 1
    return int(value[key])


def _added(value: set[int]) -> int:
    value.add(len(value))
    return len(value)


def _written(value: np.ndarray) -> float:
    value[0] += 1
    return float(value[0])


def _drawn(value: np.ndarray) -> float:
    return float(value.sum())


ACTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a count": fades,
    "a private count": fades_by_a_private_count,
    "setattr": fades_by_setattr,
    "maps": keeps_maps,
    "private maps": keeps_private_maps,
    "an attribute that is new": keeps_the_latest,
    "a controller": controls,
    "a list": _with([], lambda v, x: _appended(v)),
    "a deque": _with(deque(maxlen=9), lambda v, x: _appended(v)),
    "a Counter": _with(Counter(n=0), lambda v, x: _numbered(v)),
    "a defaultdict": _with(defaultdict(int), lambda v, x: _numbered(v)),
    "a set": _with(set(), lambda v, x: _added(v)),
    "an array": _with(np.zeros(3), lambda v, x: _written(v)),
    "slots": _with(Slotted(), lambda v, x: _bumped(v)),
    "a dataclass": _with(Record(), lambda v, x: _bumped(v)),
    "a list in a dataclass": _with(Record(), lambda v, x: _recorded(v)),
    "a SimpleNamespace": _with(types.SimpleNamespace(count=0), lambda v, x: _bumped(v)),
    "an argparse.Namespace": _with(Namespace(count=0), lambda v, x: _bumped(v)),
    "an object in a list": _with([Record()], lambda v, x: _bumped(v[0])),
    "an object in a dict": _with({"a": [Record()]}, lambda v, x: _bumped(v["a"][0])),
    "a global": counts_globally,
    "a global that is new": makes_a_global,
    "a class attribute": counts_in_its_class,
    "a global dict": writes_a_global_dict,
    "a global controller": controls_globally,
    "a default": grows_a_default,
    "a closure": _closure(),
}


def layer(act: Callable[[Any, Tensor], Tensor]) -> Layer:
    processor = Processor(act)
    processor.inner = copy.deepcopy(getattr(act, "inner", None))
    if act is controls:
        processor.inner = Controller()
    return Layer(processor).eval()


def outside(act: Callable[..., Any]) -> Any:
    """What lies outside of the layer."""
    cells = [c.cell_contents for c in act.__closure__ or () if not callable(c.cell_contents)]
    made = "LATEST" in globals()
    kept = (TOTAL, Processor.shared, vars(CONTROLLER), GLOBAL, act.__defaults__, cells, made)
    return copy.deepcopy(kept)


def attributes(processor: Any) -> dict[str, Any]:
    return {k: _plain(v) for k, v in vars(processor).items() if k != "act"}


def _plain(value: Any) -> Any:
    """An object as what it holds, for a comparison."""
    if isinstance(value, Slotted):
        return value.count
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | deque):
        return list(map(_plain, value))
    return _plain(vars(value)) if hasattr(value, "__dict__") else value


def run(module: Layer, act: Callable[..., Any]) -> tuple[list[Tensor], Any, Any]:
    with torch.no_grad():
        results = [module(torch.arange(16.0).view(2, 8) + n) for n in range(CALLS)]
    return results, attributes(module.processor), outside(act)


@pytest.mark.parametrize("name", ACTS)
def test_every_call_has_its_effects(name: str, tmp_path: Path) -> None:
    act = ACTS[name]
    before = outside(act)
    module = strop.optimize(layer(act), options=Options(cache_dir=str(tmp_path), strict=True))
    with pytest.raises(StropError, match="it writes"):
        run(module, act)
    torch.testing.assert_close(outside(act), before)  # of a trace that was refused
    torch.testing.assert_close(attributes(module.processor), attributes(layer(act).processor))
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    found = run(module, act)
    _restore(act, before)
    expected = run(layer(act), act)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)  # eager's own
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)
    torch.testing.assert_close(found[2], expected[2], rtol=0, atol=0)
    _restore(act, before)
    assert module.forward.counters.eager_calls == CALLS
    assert module.forward.variants.num_captures == 1, "what eager has changed is no new module"
    ((_, count),) = module.forward.counters.fallbacks.items()
    assert count == CALLS


def _restore(act: Callable[..., Any], before: Any) -> None:
    """To what it was before the calls of the other model."""
    global TOTAL
    TOTAL, Processor.shared = before[0], before[1]
    CONTROLLER.__dict__ = copy.deepcopy(before[2])
    GLOBAL.clear()
    globals().pop("LATEST", None)
    for default, known in zip(act.__defaults__ or (), before[4] or (), strict=True):
        default[:] = known
    cells = [c for c in act.__closure__ or () if not callable(c.cell_contents)]
    for cell, known in zip(cells, before[5], strict=True):
        cell.cell_contents = copy.deepcopy(known)


def test_a_refused_module_is_compiled_when_its_processor_is_another(tmp_path: Path) -> None:
    module = strop.optimize(layer(fades), options=Options(cache_dir=str(tmp_path)))
    run(module, fades)
    module.processor = Processor(lambda p, x: x * 3)
    x = torch.ones(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(module(x), module.linear(x) * 3, **CLOSE)
    assert module.forward.counters.eager_calls == CALLS


def caches(p: Processor, x: Tensor) -> Tensor:
    """A table of what depends on sizes alone."""
    p._tally += 1
    if x.dim() not in p._tables:
        p._tables[x.dim()] = torch.arange(8, dtype=x.dtype) / 2
    return x * p._tables[x.dim()]


def test_a_cache_may_be_filled_and_holds_nothing_of_a_trace(tmp_path: Path) -> None:
    module = strop.optimize(layer(caches), options=Options(cache_dir=str(tmp_path), strict=True))
    for n in range(3):
        x = torch.arange(16.0).view(2, 8) + n
        with torch.no_grad():
            found = module(x)
            assert not module.processor._tables
            torch.testing.assert_close(found, layer(caches)(x), **CLOSE)
    assert module.forward.variants.num_captures == 1


@functools.lru_cache(maxsize=4)
def halved(size: int) -> Tensor:
    return torch.arange(size) / 2


def test_a_function_keeps_no_result_of_a_trace(tmp_path: Path) -> None:
    def act(p: Processor, x: Tensor) -> Tensor:
        return x * halved(8)

    module = strop.optimize(layer(act), options=Options(cache_dir=str(tmp_path)))
    x = torch.ones(2, 8)
    with torch.no_grad():
        found = module(x)
        assert type(halved(8)) is Tensor, "no fake one"
        torch.testing.assert_close(found, layer(act)(x), **CLOSE)


class Read:
    """Objects that a processor reads, and what a user does to them."""

    def __init__(
        self, value: Any, read: Callable[[Any], Any], change: Callable[[Any], Any]
    ) -> None:
        self.value, self.read, self.change = value, read, change


class Holder:
    gain = 2.0

    def __init__(self) -> None:
        self.scale, self._scale, self.maps = 1.0, 1.0, [1.0]
        self.inner = types.SimpleNamespace(step=1)

    def __getattr__(self, name: str) -> Any:
        if name == "late":
            return 1.0
        raise AttributeError(name)


class WithGain(Holder):
    gain = 5.0


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda held: setattr(held, name, value)


READS: dict[str, Read] = {
    "an attribute": Read(Holder(), lambda v: v.scale, _set("scale", 0.5)),
    "a private attribute": Read(Holder(), lambda v: v._scale, _set("_scale", 0.5)),
    "one that hides a class attribute": Read(Holder(), lambda v: v.gain, _set("gain", 0.5)),
    "another class": Read(Holder(), lambda v: v.gain, _set("__class__", WithGain)),
    "an integer for a float": Read(Holder(), lambda v: v.scale // 0.4, _set("scale", 2)),
    "a list": Read(Holder(), lambda v: sum(v.maps), lambda v: v.maps.append(3.0)),
    "an item": Read([1.0, 2.0], lambda v: v[0], lambda v: v.__setitem__(0, 4.0)),
    "a nested item": Read({"a": [1.0]}, lambda v: v["a"][0], lambda v: v["a"].__setitem__(0, 4.0)),
    "minus zero": Read(
        [0.0], lambda v: 1.0 if str(v[0])[0] == "-" else 2.0, lambda v: v.__setitem__(0, -0.0)
    ),
    "a deque": Read(deque([1.0]), sum, lambda v: v.append(2.0)),
    "a set": Read({1.0}, sum, lambda v: v.add(2.0)),
    "a Counter": Read(Counter("a"), lambda v: v["a"], lambda v: v.update("a")),
    "an array": Read(np.ones(3), lambda v: float(v.sum()), lambda v: v.fill(2)),
    "a namespace": Read(Holder(), lambda v: v.inner.step, lambda v: setattr(v.inner, "step", 0)),
    "a dataclass": Read(Record(2), lambda v: v.count, _set("count", 3)),
    "slots": Read(Slotted(), lambda v: v.count + 1, _set("count", 3)),
    "a slot that was empty": Read(Slotted(), lambda v: getattr(v, "unset", 1.0), _set("unset", 3)),
    "a partial's argument": Read(
        functools.partial(pow, [2.0]),
        lambda v: v.args[0][0],
        lambda v: v.args[0].__setitem__(0, 3.0),
    ),
    "a tensor in an object": Read(
        types.SimpleNamespace(w=torch.ones(8)), lambda v: v.w, lambda v: v.w.fill_(2)
    ),
    "another tensor": Read(
        types.SimpleNamespace(w=torch.ones(1)),
        lambda v: v.w,
        lambda v: setattr(v, "w", torch.zeros(1)),
    ),
}


@pytest.mark.parametrize("place", ["processor", "module"])
@pytest.mark.parametrize("name", READS)
def test_a_change_by_a_user_is_seen(name: str, place: str, tmp_path: Path) -> None:
    case = READS[name]

    def act(p: Any, x: Tensor) -> Tensor:
        return x * case.read(p.inner)

    class Own(nn.Module):
        inner: Any

        def forward(self, x: Tensor) -> Tensor:
            return x * case.read(self.inner)

    held: Any = Own().eval() if place == "module" else layer(act)
    owner = held if place == "module" else held.processor
    owner.inner = copy.deepcopy(case.value)
    module = strop.optimize(held, options=Options(cache_dir=str(tmp_path)))
    x = torch.arange(16.0).view(2, 8)
    with torch.no_grad():
        before = module(x)
        torch.testing.assert_close(before, module.forward.eager(x), **CLOSE)
        case.change(owner.inner)
        for _ in range(2):
            found, expected = module(x), module.forward.eager(x)
            torch.testing.assert_close(found, expected, **CLOSE)
        if name != "another class":  # deep copies of a ``__class__`` are its own affair
            assert not torch.equal(expected, before), "a weak test"


def test_tensors_that_nobody_holds_are_no_constants(tmp_path: Path) -> None:
    weight = torch.tensor([2.0])  # so small that it was once taken for a number
    module = strop.optimize(
        layer(lambda p, x: x * weight), options=Options(cache_dir=str(tmp_path))
    )
    x = torch.ones(2, 8)
    with torch.no_grad():
        for value in (2.0, 5.0):
            weight.fill_(value)
            torch.testing.assert_close(module(x), module.linear(x) * value, **CLOSE)
    (reason,) = module.forward.counters.fallbacks
    assert "register it as a buffer" in reason


def test_what_nobody_reads_may_change(tmp_path: Path) -> None:
    """A log that a user's callback fills is no reason to bind again."""
    module = strop.optimize(
        layer(lambda p, x: x * p.scale), options=Options(cache_dir=str(tmp_path))
    )
    with torch.no_grad():
        for n in range(3):
            module(torch.ones(2, 8))
            module.processor._maps.append(torch.ones(n))
            module.processor.count += 1
    assert module.forward.counters.rebinds == 0
    assert module.forward.variants.num_captures == 1

"""What holds for every graph: passes keep values, a plan computes each node once, buffers that
are needed together share no byte, and what others would see of a mutation is kept from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from strop.backend import Compiled
from strop.debug.reference import evaluate, input_values
from strop.fusion.legality import looks_into
from strop.fusion.planner import computed_by, is_fusible
from strop.fusion.stitch import stitches
from strop.ir.graph import Graph, Node
from strop.ir.ops import Kind
from strop.ir.program import Program, Step
from strop.runtime.run.executor import Bound
from tests.fuzz.interpreted import interpreted
from tests.fuzz.judge import optimized, sharing
from tests.fuzz.programs import SIZES
from tests.fuzz.programs import Program as Source
from tests.fuzz.strategy import programs
from tests.fuzz.test_fuzz import FUZZ, folder, one_thread  # noqa: F401

EVERY = settings(FUZZ, max_examples=max(FUZZ.max_examples // 3, 60))
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom")


def ran(source: Source, folder: str) -> Any:  # noqa: F811
    """The dispatcher after a call at the traced sizes, or None if the program runs in eager."""
    dispatcher = optimized(source, folder, record=True)
    with torch.no_grad():
        try:
            dispatcher.module(*source.inputs(SIZES))
        except (RuntimeError, IndexError, NotImplementedError):  # eager says so, too
            return None
    return dispatcher if dispatcher.variants.all else None


@EVERY
@given(source=programs())
def test_every_graph(source: Source, folder: str) -> None:  # noqa: F811
    with interpreted():
        dispatcher = ran(source, folder)
        if dispatcher is None or dispatcher.latest is None:
            return
        compiled: Compiled = dispatcher.latest.variant.compiled
        (bound,) = dispatcher.latest.bounds.values()
        check_passes(compiled, [*dispatcher.state.tensors, *source.inputs(SIZES)])
        check_plan(compiled)
        check_memory(bound, source)


def check_passes(compiled: Compiled, arguments: Sequence[Tensor]) -> None:
    """Each keeps values."""
    assert compiled.imported is not None
    before = values(compiled.imported, arguments)
    for record in compiled.passes:
        assert record.graph is not None
        after = values(record.graph, arguments)
        for one, other in zip(before, after, strict=True):
            torch.testing.assert_close(
                other,
                one,
                rtol=1e-9,
                atol=1e-9,
                equal_nan=True,
                msg=lambda m, name=record.name: f"{name}: {m}",
            )


def values(graph: Graph, arguments: Sequence[Tensor]) -> list[Tensor]:
    given_values = input_values(graph, dict(enumerate(arguments)))
    found = evaluate(graph.outputs, given_values, graph.hints | SIZES, exact=True)
    return [found[output] for output in graph.outputs]


def check_plan(compiled: Compiled) -> None:
    """It computes each node once, or again where that is cheaper, and each call once."""
    graph, plan = compiled.graph, compiled.plan
    members = Counter(node for group in plan.groups for node in group.nodes)
    stores = Counter(node for group in plan.groups for node in group.stores)
    calls = Counter(step for step in plan.steps if isinstance(step, Node))
    for count in (members, stores, calls):
        assert set(count.values()) <= {1}
    recomputed = set[Node]().union(*(computed_by(group, set(stores)) for group in plan.groups))
    for node in graph.nodes:
        if node.kind in (Kind.CONTRACTION, Kind.OPAQUE) and node.op != "input":
            assert calls[node] == 1, node
        elif is_fusible(node):
            assert node in recomputed, node
    wholes = (stitch.whole for stitch in stitches(graph, plan))
    for group in (*plan.groups, *wholes):
        made = computed_by(group, set(stores))
        assert not any(looks_into(node, made) for node in made), group
    assert set(stores) <= set(members)


def check_memory(bound: Bound, source: Source) -> None:
    """Before each step all bytes that no later step needs turn into NaN: nobody notices."""
    expected = bound.run([x.contiguous() for x in source.inputs(SIZES)])
    bound.around = Poison(bound)
    found = bound.run([x.contiguous() for x in source.inputs(SIZES)])
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


class Poison:
    """Overwrites what is dead in the arena. Who lives when is worked out from the steps alone."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for position, step in enumerate(bound.program.steps):
            for number in _written(step):
                self.first.setdefault(number, position)
            for number in (*_written(step), *_read(step)):
                self.last[number] = position
        for item in bound.program.returned:
            if item.tensor is not None:
                self.last[item.tensor.buffer] = len(bound.program.steps)

    def __call__(self, position: int, step: Callable[[], None]) -> None:
        assert self.bound._linked is not None
        memory = self.bound._linked.memory
        is_dead = torch.ones(memory.numel(), dtype=torch.bool)
        for number in arena(self.bound.program):
            if self.first[number] < position <= self.last[number]:
                tensor = self.bound.contents(number)
                begin = tensor.data_ptr() - memory.data_ptr()
                end = begin + tensor.numel() * tensor.element_size()
                assert is_dead[begin:end].all(), f"buffer {number} lies in another's memory"
                is_dead[begin:end] = False
        memory[is_dead] = 255
        step()


def arena(program: Program) -> list[int]:
    return [n for n, buffer in enumerate(program.buffers) if buffer.kind == "arena"]


def _written(step: Step) -> Sequence[int]:
    return getattr(step, "writes", ()) or [n for n in getattr(step, "outputs", ()) if n >= 0]


def _read(step: Step) -> Sequence[int]:
    found: Sequence[int] = getattr(step, "buffers", ())
    return found or [ref.buffer for ref in getattr(step, "inputs", ())]


# mutation


def _assign(x: Tensor, value: Any) -> Tensor:
    x.copy_(value)
    return x


def _read_before_and_after(x: Tensor, y: Tensor) -> Any:
    before = x * 2
    x.add_(1)
    return before, x * 3


def _swap(x: Tensor, y: Tensor) -> Any:
    old = x + 0
    x.copy_(y)
    y.copy_(old)
    return x - y


def _twice(x: Tensor, y: Tensor) -> Any:
    x.copy_(x.flip(1))
    z = x[:, :2] * 2
    x.add_(z.sum())
    return z


def _through_a_view(x: Tensor, y: Tensor) -> Any:
    v = x[1:3].t()
    v.mul_(2)
    return v, x.sum(0)


def _part(x: Tensor, y: Tensor) -> Any:
    x[:, 0] = 5
    x[1] += y[0]
    return x + 1


MUTATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "read_before_and_after": _read_before_and_after,
    "rolled_into_itself": lambda x, y: _assign(x, x.roll(1, 0)) + 0,
    "flipped_into_itself": lambda x, y: _assign(x, x.flip(0)),
    "shifted_by_one": lambda x, y: _assign(x[1:], x[:-1] + 1) * 2,
    "softmax_into_itself": lambda x, y: (_assign(x, x.softmax(-1)) - y).sum(0),
    "scaled_by_its_sum": lambda x, y: _assign(x, x * x.sum()),
    "swapped": _swap,
    "twice": _twice,
    "through_a_view": _through_a_view,
    "part": _part,
    "result_is_the_argument": lambda x, y: (x.add_(y), y),
    "view_of_the_argument": lambda x, y: x.add_(1)[1:],
    "both_arguments": lambda x, y: (x.add_(y), y.add_(x))[1] * 2,
    "same_value_twice": lambda x, y: (_assign(x, y * 2), _assign(y, y * 2))[0] + 1,
}
LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "every_second": lambda x: torch.stack([x, x], -1).flatten(-2)[:, ::2],
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations(name: str, folder: str) -> None:  # noqa: F811
    """Arguments are written to as in eager, and nothing else changes; whatever their strides."""
    function = MUTATIONS[name]
    torch._dynamo.reset()
    fast = torch.compile(function, backend="strop", dynamic=False, options={"cache_dir": folder})
    for layout in LAYOUTS.values():
        mine, theirs = (
            [layout(torch.arange(24.0).view(4, 6) / s) for s in (8, 16)] for _ in range(2)
        )
        with torch.no_grad():
            found, expected = _results(fast(*mine)), _results(function(*theirs))
        for one, other in zip((*mine, *found), (*theirs, *expected), strict=True):
            torch.testing.assert_close(one, other)
        assert sharing([*mine, *found]) == sharing([*theirs, *expected])


def _results(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)

"""Which steps may leave a denoise loop, and what a CUDA graph replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.api import optimize_module
from strop.dispatch.adapter import Adapter
from strop.dispatch.derived_inputs import HOISTED
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.signature import Skeleton
from strop.ir.dims import const
from strop.ir.program import CallStep, TensorRef
from strop.runtime.derived.sources import versions_of
from strop.runtime.loop.denoise_loop import DenoiseLoop
from strop.runtime.loop.hoisting import prologue_of, stamp_of
from strop.runtime.run.cuda_graphs import CapturedGraph
from strop.runtime.run.executor import Bound
from tests.diffusion.test_hoisting import plain  # noqa: F401
from tests.e2e import tiny

Forward = Callable[["Net", Tensor, Tensor], Any]
ROWS, WIDTH = 6, 8


class SecondIsSteady(Adapter):
    def steady(self, skeleton: Skeleton) -> tuple[int, ...]:
        return (1,)


class Net(nn.Module):
    """A forward of two arguments, x and the steady p, with weights at hand."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.code = forward
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor, p: Tensor) -> Any:
        return self.code(self, x, p)


def keys(net: Net, x: Tensor, p: Tensor) -> Tensor:
    return x * net.key(p) + net.value(p)


def two_in_a_row(net: Net, x: Tensor, p: Tensor) -> Tensor:
    return x * net.value(F.silu(net.key(p)))


def of_both(net: Net, x: Tensor, p: Tensor) -> Tensor:
    return net.key(x + p)


def looked_up(net: Net, x: Tensor, p: Tensor) -> Tensor:
    return x * net.key(net.table[p[:, 0].long().abs()])


def drawn(net: Net, x: Tensor, p: Tensor) -> Tensor:
    return x * net.key(F.dropout(p, 0.5))


def in_torch(net: Net, x: Tensor, p: Tensor) -> Tensor:
    return x * net.key(p.cumsum(0))


def returned_as_well(net: Net, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """A caller may write into what is returned."""
    key = net.key(p)
    return x * key, key


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,))


def joined(net: Net, x: Tensor, p: Tensor) -> Tensor:
    """Two kernels store into one buffer, of which nothing depends on x."""
    both = torch.cat([_normed(net.key(p)), _normed(p[1:])])
    return x * net.value(both)[ROWS - 1 :]


def half_joined(net: Net, x: Tensor, p: Tensor) -> Tensor:
    """The second half is another one in each call, so both are computed in each."""
    both = torch.cat([_normed(p), _normed(x)])
    return net.value(both)


# how many launches leave the loop
FORWARDS: dict[Forward, int] = {
    keys: 1,
    two_in_a_row: 3,
    of_both: 0,
    looked_up: 0,
    drawn: 0,
    in_torch: 0,
    returned_as_well: 0,
    joined: 4,
    half_joined: 0,
}


def optimized(forward: Forward, loop: DenoiseLoop, **more: Any) -> tuple[Net, Dispatcher]:
    net = Net(forward).eval()
    how = {"adapter": SecondIsSteady(), "loop": loop}
    return net, optimize_module(net, tiny.options(**{"hoist": True} | more), **how)


def arguments() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def bound_of(dispatcher: Dispatcher) -> Bound:
    (entry,) = dispatcher.shapes.entries
    (bound,) = entry.bounds.values()
    return bound


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_what_is_hoisted(forward: Forward) -> None:
    loop = DenoiseLoop()
    net, dispatcher = optimized(forward, loop)
    twin = Net(forward).eval()
    x, p = arguments()
    loop.begin()
    for step in range(3):
        torch.manual_seed(step)
        found = net(x, p)
        if forward is not drawn:  # whose numbers are not eager's
            torch.testing.assert_close(found, twin(x, p))
        for result in found if isinstance(found, tuple) else (found,):
            result.zero_()
        x = x + 1
    loop.end()
    assert dispatcher.counters.eager_calls == 0
    assert len(bound_of(dispatcher).hoisted.steps) == FORWARDS[forward]
    if forward is drawn:
        assert not torch.equal(net(x, p), net(x, p))


def test_a_program_that_writes_to_an_argument_keeps_all_its_steps() -> None:
    net, dispatcher = optimized(keys, DenoiseLoop())
    net(*arguments())
    bound = bound_of(dispatcher)
    number, buffer = next((n, b) for n, b in enumerate(bound.program.buffers) if b.kind == "input")
    ref = TensorRef(number, const(0), buffer.shape, buffer.strides)
    write = CallStep("write", (ref, ref), (), (), "")
    given = [i for i, spec in enumerate(bound.program.inputs) if not spec.is_state]
    for steps, count in ((bound.steps, 1), ([*bound.steps, write], 0)):
        found = prologue_of(bound.program, steps, [given[1]], ["linear"])
        assert len(found.steps) == count


def test_a_failing_lookup_raises_at_every_step() -> None:
    loop = DenoiseLoop()
    net, _ = optimized(looked_up, loop)
    x, p = arguments()
    p.fill_(WIDTH)
    loop.begin()
    for _ in range(3):
        with pytest.raises(IndexError):
            net(x, p)


def test_a_checked_run_judges_every_step() -> None:
    """Options.check watches runs in their order, prologue first."""
    loop = DenoiseLoop()
    net, dispatcher = optimized(two_in_a_row, loop, check=True, cache_dir="")
    loop.begin()
    net(*arguments())
    assert dispatcher.counters.checked_steps == len(bound_of(dispatcher).steps) > 3
    assert not dispatcher.counters.findings


def test_weights_of_inference_mode_are_not_reused() -> None:
    loop = DenoiseLoop()
    with torch.inference_mode():
        weight = nn.Parameter(torch.ones(WIDTH))
        net, _ = optimized(two_in_a_row, loop)
    assert versions_of([weight]) is None
    assert versions_of([weight.detach()]) is None, "which has a version, but not its own"
    weight.data = torch.ones(WIDTH)
    assert versions_of([weight]) is None
    x, p = arguments()
    loop.begin()
    for _ in range(3):
        found = net(x, p)
        with torch.inference_mode():
            torch.testing.assert_close(found, two_in_a_row(net, x, p))
            net.key.weight.mul_(2)
    assert strop.explain(net).components[0].derived_of(HOISTED).num_reuses == 0


@dataclass
class Recorded:
    """Stands for a CUDA graph: runs its half of a program on fixed memory."""

    run: Callable[[], object]
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.run()


def test_a_graph_replays_its_prologue_when_it_must() -> None:
    loop = DenoiseLoop()
    net, dispatcher = optimized(two_in_a_row, loop)
    x, p = arguments()
    expected = net(x, p)
    bound, inputs, result = bound_of(dispatcher), arguments(), torch.empty_like(expected)
    prologue = Recorded(lambda: bound.run_prologue(inputs))
    rest = Recorded(lambda: result.copy_(*bound.run_rest(inputs)))
    captured = CapturedGraph(rest, prologue, None, inputs, (result,), bound, 0, 0)  # type: ignore[arg-type]

    def replay(number: int, p: Tensor) -> int:
        found, _ = captured.replay([x, p], stamp_of(number, [p]))
        torch.testing.assert_close(found[0], Net(two_in_a_row)(x, p))
        return prologue.num_replays

    assert [replay(1, p), replay(1, p)] == [1, 1]
    assert [replay(1, p.clone()), replay(1, p)] == [2, 3], "another tensor, if equal"
    assert replay(1, p.mul_(2)) == 4
    assert [replay(2, p), replay(2, p)] == [5, 5]
    net(x, p)  # outside of a loop, in the same memory
    assert replay(2, p) == 6
    assert rest.num_replays == 8
    captured.replay([x, p], None)
    assert prologue.num_replays == 7


def test_torch_compile_keeps_nothing(plain: Iterator[None]) -> None:  # noqa: F811
    """Its arguments have no names, and its caller no loop."""
    net, twin = Net(keys).eval(), Net(keys).eval()
    compiled = torch.compile(net, backend="strop")
    x, p = arguments()
    for _ in range(3):
        torch.testing.assert_close(compiled(x, p), twin(x, p))
        p.data.mul_(2)

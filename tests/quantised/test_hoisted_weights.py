"""A denoise loop keeps what comes of the prompt, and no weight in full that is quantised."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from strop.api import optimize_module
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.ir.dims import symbol
from strop.ir.ops import planned_on
from strop.ir.program import CallStep
from strop.options import Options
from strop.runtime.loop.denoise_loop import DenoiseLoop
from strop.runtime.loop.hoisting import Hoist, Kept, Prologue, Tally
from strop.runtime.loop.timetable import Timetable, timed_of
from tests.diffusion.test_hoisting_rules import SecondIsSteady, bound_of
from tests.e2e import tiny
from tests.frontend.tracing import trace
from tests.quantised.stand_ins import ByFunctions, ByOperators, quantised

WIDTH, ROWS = 64, 6


class Attending(nn.Module):
    """Of x, and of a prompt p that stays the same."""

    def __init__(self):
        super().__init__()
        self.own, self.key, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, p):
        return self.out(F.silu(self.own(x)) * self.key(p))


@pytest.mark.parametrize("kind", [ByOperators, ByFunctions])
def test_weights_are_not_kept_in_full(kind):
    net = quantised(kind, Attending())
    eager, loop = copy.deepcopy(net), DenoiseLoop()
    how = {"adapter": SecondIsSteady(), "loop": loop}
    dispatcher = optimize_module(net, tiny.options(hoist=True), **how)
    x, p = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    loop.begin()
    for _ in range(3):
        torch.testing.assert_close(net(x, p), eager(x, p), rtol=1e-5, atol=1e-5)
        x = x + 1
    loop.end()
    bound, counters = bound_of(dispatcher), dispatcher.counters
    assert counters.eager_calls == 0
    assert counters.hoisted.num_runs == 1
    assert counters.hoisted.num_reuses == 2
    kept = [bound.program.buffers[number].shape for number in bound.hoisted.kept]
    assert [str(size) for shape in kept for size in shape] == ["b", str(WIDTH)]  # of the prompt
    assert bound.hoisted.memory.nbytes < WIDTH * WIDTH * 4


@pytest.mark.parametrize("kind", [ByOperators, ByFunctions])
def test_working_memory_holds_two_weights_in_full_at_most(kind):
    count, width = 8, 128
    stack = quantised(kind, nn.Sequential(*(nn.Linear(width, width) for _ in range(count))))
    dispatcher = optimize_module(stack, tiny.options())
    stack(torch.randn(4, width))
    in_full, activations = width * width * 4, 4 * width * 4
    arena_bytes = bound_of(dispatcher).plan.memory.arena_bytes
    assert in_full <= arena_bytes <= 2 * in_full + 4 * activations


class Timed(nn.Module):
    """Of x, and of a timestep that goes through a quantised linear."""

    def __init__(self):
        super().__init__()
        self.time = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, t):
        frequencies = torch.arange(WIDTH, device=x.device)
        return x * self.time(torch.sin(t[:, None].float() * frequencies))


def test_a_timetable_decodes_what_a_step_multiplies_by_codes():
    traced = trace(quantised(ByOperators, Timed()).eval(), f"b {WIDTH}", "b", b=1)
    program = compile_graph(traced.graph, Signature(traced.returned, ()), "cuda", Options()).program
    number = next(i for i, spec in enumerate(program.inputs) if spec.shape == (symbol("b"),))
    hoist = Hoist((), Kept(torch.device("cpu")), (), Tally(), timestep=number)
    few, many = program.at({"b": 2}), program.at({"b": 56})
    timed = timed_of(program, few, Prologue(), hoist, planned_on("cuda"))
    (call,) = (p for p, step in enumerate(program.steps) if isinstance(step, CallStep))
    assert timed.absorbed == (call,)
    assert few[call] is None
    assert many[call] is not None
    assert timed.kept == tuple(many[call].outputs)
    assert Timetable(program, timed, None, {"b": 2}, 0)._is_alike({"b": 56})
    without = Timetable(program, replace(timed, absorbed=()), None, {"b": 2}, 0)
    assert not without._is_alike({"b": 56})  # the part would lack its product

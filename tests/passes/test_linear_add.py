"""Sums with a linear, made where its product is added up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop import passes
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.ir.graph import Graph
from strop.ir.program import CallStep
from strop.options import Options
from strop.passes import run as run_passes
from strop.runtime.run import library_calls as calls
from tests.frontend.tracing import trace


class Block(nn.Module):
    """A feed-forward as at the end of a transformer block, and what reads the sum next."""

    def __init__(self, then: str = "linear", bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=bias)
        self.norm, self.out, self.then = nn.LayerNorm(32), nn.Linear(32, 32), then

    def forward(self, x: Tensor) -> Any:
        start = x + F.silu(x)
        total = self.down(F.gelu(self.up(self.norm(start)))) + start
        if self.then == "linear":
            return F.silu(self.out(total))
        if self.then == "norm":
            return F.silu(self.out(self.norm(total)) + total)
        if self.then == "reshaped":
            return F.silu(self.out(total.flatten(1, 2)))
        return total


class ReadTwice(Block):
    """The linear's own result is wanted too."""

    def forward(self, x: Tensor) -> Any:
        start = x + F.silu(x)
        down = self.down(F.gelu(self.up(start)))
        return F.silu(self.out(down + start)), down


class OfAnArgument(Block):
    """Nobody computes the other value."""

    def forward(self, x: Tensor) -> Any:
        return F.silu(self.out(self.down(F.gelu(self.up(x))) + x))


class Broadcast(Block):
    def forward(self, x: Tensor) -> Any:
        return F.silu(self.out(self.down(F.gelu(self.up(x))) + (x + F.silu(x))[:1]))


class Exact(Block):
    """The other value is not rounded in eager, and would be with a bias."""

    def forward(self, x: Tensor) -> Any:
        return F.silu(self.out(self.down(F.gelu(self.up(x))) + x * 2))


def traced(module: nn.Module, device: str = "cuda", **options: Any) -> Graph:
    return run_passes(trace(module, "b s s 32", b=2, s=6).graph, Options(**options), device)[0]


def count(graph: Graph) -> int:
    return sum(node.op == "linear_add" for node in graph.nodes)


@pytest.mark.parametrize("then", ["linear", "reshaped"])
def test_a_sum_that_a_call_reads_next_is_the_call_befores(then: str) -> None:
    graph = traced(Block(then))
    assert count(graph) == 1
    (found,) = (node for node in graph.nodes if node.op == "linear_add")
    assert found.inputs[2].op == "add"  # the other value and the bias
    assert found.inputs[2].shape == found.shape


@pytest.mark.parametrize(
    "module",
    [
        Block("norm"),
        Block("return"),
        Block(bias=False),
        ReadTwice(),
        OfAnArgument(),
        Broadcast(),
        Exact(),
    ],
    ids=["a kernel reads it", "result", "no bias", "read twice", "argument", "broadcast", "exact"],
)
def test_other_sums_stay(module: nn.Module) -> None:
    assert count(traced(module)) == 0


def test_it_is_a_pass_for_gpus_that_can_be_left_out() -> None:
    assert count(traced(Block(), "cpu")) == 0
    assert count(traced(Block(), disable=("linear_add",))) == 0


def test_one_launch_less_in_the_place_of_the_other_sum() -> None:
    captured = trace(Block(), "b s s 32", b=2, s=6)
    signature, sizes = Signature(captured.returned, ()), {"b": 2, "s": 6}
    with_it, without = (
        compile_graph(captured.graph, signature, "cuda", Options(disable=names))
        for names in ((), ("linear_add",))
    )
    assert len(with_it.program.at(sizes)) == len(without.program.at(sizes)) - 1
    (step,) = (s for s in with_it.program.steps if isinstance(s, CallStep) and s.op == "linear_add")
    assert step.in_place == ((step.outputs[0], step.inputs[2].buffer),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which has all but the reason for it."""
    addresses = list[bool]()
    plain = calls.PLANNED_OUT["linear_add"]

    def heard(attrs: Any) -> Any:
        call = plain(attrs)

        def run(inputs: Any, out: Tensor) -> None:
            addresses.append(inputs[2].data_ptr() == out.data_ptr())
            call(inputs, out)

        return run

    monkeypatch.setitem(calls.PLANNED_OUT, "linear_add", heard)
    monkeypatch.setattr(passes, "ONLY_ON", {**passes.ONLY_ON, "linear_add": "cpu"})
    torch.manual_seed(0)
    module, shapes = Block().to(dtype).eval(), ((2, 16, 16), (1, 3, 3), (4, 19, 19))
    errors = []
    with torch.no_grad():
        for shape in shapes:
            x = torch.randn(*shape, 32).to(dtype)
            eager = module(x)
            truth = module.double()(x.double())
            module.to(dtype)
            ours = strop.optimize(module, options=Options(strict=True))
            errors.append([float((y.double() - truth).norm()) for y in (ours(x), eager)])
            strop.restore(module)
    of_ours, of_eager = (math.hypot(*column) for column in zip(*errors, strict=True))
    assert of_ours <= 1.02 * of_eager
    assert addresses
    assert all(addresses)  # the product is added to what is there already


class OfTheSameBias(nn.Module):
    """What is added, with the bias that the pass moves there, is what the linear reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(1024, 1024), nn.Linear(1024, 8)

    def forward(self, x: Tensor) -> Tensor:
        start = x + F.silu(x)
        return F.silu(self.out(self.linear(start + self.linear.bias) + start))


def test_a_product_is_not_written_over_its_own_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, x = OfTheSameBias().eval(), torch.randn(64, 1024)
    captured = trace(module, "r 1024", r=64)
    signature = Signature(captured.returned, ())
    program = compile_graph(captured.graph, signature, "cuda", Options()).program
    (step,) = (s for s in program.call_steps if s.op == "linear_add")
    assert step.in_place == ()
    monkeypatch.setattr(passes, "ONLY_ON", {**passes.ONLY_ON, "linear_add": "cpu"})
    with torch.no_grad():
        wanted = module(x)
        torch.testing.assert_close(strop.optimize(module)(x), wanted)


def test_an_addend_that_lies_elsewhere() -> None:
    x, weight, addend, out = (torch.randn(size) for size in ((5, 8), (4, 8), (5, 4), (5, 4)))
    calls.PLANNED_OUT["linear_add"]({})((x, weight, addend), out)
    torch.testing.assert_close(out, x @ weight.T + addend)

"""Sums with a linear that are made where the other operand lies."""

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
from strop.kernels.library import select
from strop.options import Options
from strop.passes import run as run_passes
from strop.runtime.run import library_calls as calls
from strop.runtime.run.choices import call_of
from tests.frontend.tracing import trace
from tests.gpus import H100
from tests.passes.ours import assert_needs_kernels_of_ours

HALF, WIDTH = torch.float16, 320


class Block(nn.Module):
    """A residual stream through two layers, and what reads it next."""

    def __init__(self, bias: bool = True, outs: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, outs)
        self.norm, self.next = nn.LayerNorm(outs), nn.LayerNorm(outs)
        self.up, self.down = nn.Linear(outs, outs), nn.Linear(outs, outs, bias=bias)

    def begin(self, x: Tensor) -> Tensor:
        return self.first(F.silu(x))

    def forward(self, x: Tensor) -> Any:
        start = self.begin(x)
        middle = self.up(F.silu(self.norm(start))) + start
        return F.silu(self.next(self.down(F.silu(self.next(middle))) + middle))


class Picture(Block):
    """Behind views: the stream is a picture, the layer's result a line of pixels."""

    def forward(self, x: Tensor) -> Any:
        start = F.silu(x) + F.gelu(x)
        line = start.flatten(2).transpose(1, 2)
        picture = self.up(F.silu(self.norm(line))).transpose(1, 2).reshape(x.shape)
        return F.silu(F.silu(picture + start) * 2)


class ReadLater(Block):
    """The other value is wanted once more, behind the sum."""

    def forward(self, x: Tensor) -> Any:
        start = self.begin(x)
        middle = self.up(F.silu(self.norm(start))) + start
        return F.silu(self.next(self.down(F.silu(middle)) + start * 3))


class Argument(Block):
    def forward(self, x: Tensor) -> Any:
        return F.silu(self.next(self.up(F.silu(self.norm(x))) + x))


class Alone(Block):
    """Nobody but the sum reads the other value, which no kernel would store."""

    def forward(self, x: Tensor) -> Any:
        return F.silu(self.next(self.up(F.silu(x)) + F.gelu(x)))


class Result(Block):
    def forward(self, x: Tensor) -> Any:
        start = self.begin(x)
        return self.up(F.silu(self.norm(start))) + start


def traced(
    module: nn.Module, device: str = "cuda", dtype: torch.dtype = HALF, **options: Any
) -> Graph:
    spec = "b 320 h w" if isinstance(module, Picture) else "b s 320"
    sizes = {"b": 2, "h": 4, "w": 6} if isinstance(module, Picture) else {"b": 2, "s": 6}
    graph = trace(module.to(dtype), spec, dtype=dtype, **sizes).graph
    return run_passes(graph, Options(**options), device)[0]


def found_in(graph: Graph) -> list[Any]:
    return [node for node in graph.nodes if node.op == "linear_add" and len(node.inputs) == 4]


def test_a_stream_stays_in_one_memory() -> None:
    first, second = found_in(traced(Block()))
    assert second.inputs[2] is first
    assert [tuple(map(str, node.inputs[3].shape)) for node in (first, second)] == [("320",)] * 2


def test_through_views() -> None:
    (found,) = found_in(traced(Picture()))
    assert len(found.shape) == 3
    assert found.inputs[2].shape == found.shape


@pytest.mark.parametrize(
    ("module", "count"),
    [
        (Block(bias=False), 1),
        (ReadLater(), 0),
        (Argument(), 0),
        (Alone(), 0),
        (Result(), 0),
        (Block(outs=328), 0),
    ],
    ids=["no bias", "read later", "argument", "alone", "result", "width"],
)
def test_other_sums_stay(module: nn.Module, count: int) -> None:
    assert len(found_in(traced(module))) == count


class End(Block):
    """Of a UNet's transformer: three sums, and a layer that reads the last."""

    def __init__(self) -> None:
        super().__init__()
        self.more, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        one = self.begin(x)
        two = self.up(F.silu(self.norm(one))) + one
        three = self.more(F.silu(self.next(two))) + two
        four = self.down(F.silu(self.next(three))) + three
        return F.silu(self.last(four))


def test_what_a_library_can_add_is_left_to_it() -> None:
    """The last sum, and the one before it, which has the last layer's bias."""
    graph = traced(End())
    (two,) = found_in(graph)
    (four,) = (n for n in graph.nodes if n.op == "linear_add" and len(n.inputs) == 3)
    moved = four.inputs[2]
    assert moved.op == "add"
    assert two in {n for side in moved.inputs for n in (side, *side.inputs)}
    assert len(found_in(traced(End(), disable=("linear_add",)))) == 3


def test_where_kernels_of_ours_can_do_it() -> None:
    assert_needs_kernels_of_ours(
        "product_sum", lambda *device, **how: found_in(traced(Block(), *device, **how))
    )
    assert Options().on(has_wgmma=True) == Options()


def test_it_is_written_over_the_other_value() -> None:
    captured = trace(Block().to(HALF), "b s 320", dtype=HALF, b=2, s=6)
    signature = Signature(captured.returned, ())
    program = compile_graph(captured.graph, signature, "cuda", Options()).program
    steps = [s for s in program.steps if isinstance(s, CallStep) and s.op == "linear_add"]
    assert len(steps) == 2
    for step in steps:
        assert step.in_place == ((step.outputs[0], step.inputs[2].buffer),)
        call = call_of(program, step)
        assert select(call, call.at({"b": 2, "s": 1024}), H100).kernel == "wgmma_gemm"


@pytest.mark.parametrize("kind", [Block, Picture])
def test_values(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, by torch."""
    operands, plain = list[int](), calls.PLANNED_OUT["linear_add"]

    def heard(attrs: Any) -> Any:
        call = plain(attrs)

        def run(inputs: Any, out: Tensor) -> None:
            operands.append(len(inputs))
            call(inputs, out)

        return run

    monkeypatch.setitem(calls.PLANNED_OUT, "linear_add", heard)
    monkeypatch.setattr(passes, "ONLY_ON", {**passes.ONLY_ON, "product_sum": "cpu"})
    monkeypatch.setattr(Options, "on", lambda self, *, has_wgmma: self)
    torch.manual_seed(0)
    module = kind().to(HALF).eval()
    shapes = ((2, 320, 4, 6), (1, 320, 3, 5)) if kind is Picture else ((2, 16, 320), (1, 3, 320))
    errors = []
    with torch.no_grad():
        for shape in shapes:
            x = torch.randn(shape).to(HALF)
            eager = module(x)
            truth = module.double()(x.double())
            module.to(HALF)
            ours = strop.optimize(module, options=Options(strict=True))
            errors.append([float((y.double() - truth).norm()) for y in (ours(x), eager)])
            strop.restore(module)
    of_ours, of_eager = (math.hypot(*column) for column in zip(*errors, strict=True))
    assert of_ours <= 1.1 * of_eager
    assert set(operands) == {4}

"""Linears that go on over the factors of their adapters."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.debug.reference import evaluate, input_values
from strop.ir.graph import Graph, Node
from strop.ir.program import CallStep, Program
from strop.ir.serialize import from_json, to_json
from strop.options import Options
from strop.passes import low_rank_pair
from strop.passes import run as run_passes
from tests.passes.adapted import adapt, arguments, traced
from tests.passes.ours import assert_needs_kernels_of_ours

HALF, WIDTH = torch.float16, 32
Module = type[nn.Module]


class Layers(nn.Module):
    """Queries, keys and values of one x, and what a kernel does with each."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(2))
        self.k = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Any:
        return F.silu(self.q(x)), torch.sigmoid(self.k(x)), F.gelu(self.v(x))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(x).chunk(2, -1)
        return F.silu(self.down(value * F.gelu(gate)))


class Pictures(nn.Module):
    """A pointwise convolution, which is a linear, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = nn.Conv2d(WIDTH, 64, 1), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.one(F.silu(self.three(x))))


class Twice(Layers):
    """A layer's value is read besides its sum."""

    def forward(self, x: Tensor) -> Any:
        plain = F.linear(x, self.q.weight)
        low = F.linear(x, self.q.low_rank_a)  # type: ignore[arg-type]
        return F.silu(plain + F.linear(low, self.q.low_rank_b)), F.gelu(plain)  # type: ignore[arg-type]


class OfAnother(Layers):
    """The low-rank part is of the layer's own result: no pair could give it."""

    def forward(self, x: Tensor) -> Any:
        plain = F.linear(x, self.q.weight)
        low = F.linear(F.silu(plain), self.q.low_rank_a)  # type: ignore[arg-type]
        return F.silu(plain + F.linear(low, self.q.low_rank_b))  # type: ignore[arg-type]


def made(module: nn.Module, shape: str, *chosen: str, rank: int = 16, **options: Any) -> Graph:
    """What the pass makes of it; its values are those of the graph before."""
    torch.manual_seed(0)
    module = adapt(module.half(), chosen, rank).eval().requires_grad_(False)
    found = traced(module, shape, b=2, s=6)
    graph, _ = run_passes(found.graph, Options(**options))
    sizes = [{"b": 2, "s": 6}.get(size, size) for size in shape.split()]
    given = arguments(found, module, torch.randn([int(size) for size in sizes]).half())
    env = dict(found.graph.hints)
    own, before = (values(each, given, env) for each in (graph, found.graph))
    for one, other in zip(own, before, strict=True):
        torch.testing.assert_close(one, other)
    return graph


def values(graph: Graph, given: Any, env: dict[str, int]) -> list[Tensor]:
    inputs = {n: t.double() for n, t in input_values(graph, given).items()}
    found = evaluate(graph.outputs, inputs, env, exact=True)
    return [found[node] for node in graph.outputs]


def ops(graph: Graph) -> Counter[str]:
    return Counter(n.op for n in graph.nodes if n.op.startswith(("paired", "linear", "geglu")))


def pair_of(graph: Graph) -> Node:
    (found,) = (node for node in graph.nodes if node.op.startswith("paired"))
    return found


def corners_of(node: Node) -> Any:
    return node.inputs[3].attrs.get("corners")


def test_layers_of_one_input_are_one_product() -> None:
    graph = made(Layers(), "b s 32", "q", "k", "v")
    assert ops(graph) == {"linear": 1, "paired_linear": 1}
    _, weight, low, up = pair_of(graph).inputs
    assert low.op == "linear"  # all A's, of which no piece is taken
    assert [size.value for size in (*weight.shape, *up.shape)] == [128, 32, 128, 48]
    assert corners_of(pair_of(graph)) == ((0, 0), (32, 16), (96, 32))
    assert up.attrs["state"]


@pytest.mark.parametrize(
    ("chosen", "corners"),
    [("qv", ((0, 0), (96, 16))), ("k", ((32, 0),)), ("kv", ((32, 0), (96, 16)))],
)
def test_layers_without_adapters_stay_among_them(chosen: str, corners: Any) -> None:
    graph = made(Layers(), "b s 32", *chosen)
    assert ops(graph) == {"linear": 1, "paired_linear": 1}
    assert corners_of(pair_of(graph)) == corners


def test_one_layer_reads_its_own_factor() -> None:
    graph = made(Gated(), "b s 32", "down")
    assert ops(graph) == {"geglu": 1, "linear": 1, "paired_linear": 1}
    assert not pair_of(graph).inputs[3].attrs["merged"]


def test_gates_stay_in_the_product() -> None:
    graph = made(Gated(), "b s 32", "up", "down")
    assert ops(graph) == {"linear": 2, "paired_geglu": 1, "paired_linear": 1}


def test_biases_go_to_who_reads_the_result() -> None:
    graph = made(Layers(bias=True), "b s 32", "q", "k", "v")
    assert ops(graph) == {"linear": 1, "paired_linear": 1}
    assert len(pair_of(graph).inputs) == 4


def test_a_pointwise_convolution_is_a_linear() -> None:
    graph = made(Pictures(), "b 32 8 8", "one", "three")
    assert ops(graph) == {"linear": 2, "paired_linear": 1}  # A's, and B of the other one
    assert Counter(node.op for node in graph.nodes)["conv2d"] == 2


def test_what_is_wide_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(sys.modules[low_rank_pair.__module__]), "MOST_COLUMNS", 32)
    graph = made(Layers(bias=True), "b s 32", "q", "k", "v")
    assert ops(graph) == {"linear": 1, "paired_linear": 2}
    first, second = (node for node in graph.nodes if node.op == "paired_linear")
    assert corners_of(first) == ((0, 0), (32, 16))
    assert not second.inputs[3].attrs["merged"]
    assert second.inputs[2].op == "slice"


@pytest.mark.parametrize("kind", [Twice, OfAnother])
def test_other_sums_stay(kind: Module) -> None:
    assert not any(op.startswith("paired") for op in ops(made(kind(), "b s 32", "q")))


def test_few_rows_stay_with_the_kernel_for_them() -> None:
    assert ops(made(Layers(), "b 32", "q"))["paired_linear"] == 0
    assert ops(made(Layers(), "b s 32", "q"))["paired_linear"] == 1


def test_it_needs_kernels_of_ours() -> None:
    def found(device: str = "cuda", dtype: torch.dtype = HALF, **options: Any) -> list[Node]:
        module = adapt(Layers().to(dtype), "q")
        graph = traced(module, "b s 32", dtype=dtype, b=2, s=6).graph
        graph, _ = run_passes(graph, Options(**options), device)
        return [node for node in graph.nodes if node.op == "paired_linear"]

    assert_needs_kernels_of_ours("low_rank_pair", found)


# a block of SDXL's UNet

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(640, 640)
        self.first, self.second = (
            BasicTransformerBlock(640, 10, 64, cross_attention_dim=768) for _ in range(2)
        )
        self.end = nn.Linear(640, 640)

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        y = self.begin(F.silu(x))
        for block in (self.first, self.second):
            y = block(y, encoder_hidden_states=prompt)
        return self.end(y) + x


def program_of(*chosen: str, **options: Any) -> Program:
    with torch.device("meta"):
        module = Blocks().half()
    module = module.to_empty(device="cpu").eval().requires_grad_(False)
    found = traced(
        adapt(module, chosen, 32) if chosen else module, "b s 640", "b 77 768", b=2, s=1024
    )
    signature = Signature(found.returned, found.captured.guards)
    return compile_graph(found.graph, signature, "cuda", Options(**options)).program


def steps_of(program: Program) -> tuple[Counter[str], int]:
    """How often each call, and how many kernels."""
    steps = [step for step in program.at({"b": 2, "s": 1024}) if step is not None]
    calls = Counter(step.op.removeprefix("paired_") for step in steps if isinstance(step, CallStep))
    return calls, len(steps) - sum(calls.values())


def test_a_block_has_one_more_step_for_each_input_and_loses_none() -> None:
    """Six of each block, two around them, and one of the prompt, whose keys and values in all
    blocks are one product. Sums that were left to a library are made where they lie."""
    adapted = program_of(*TARGETS, "begin", "end")
    (calls, kernels), (more, as_many) = steps_of(program_of()), steps_of(adapted)
    assert as_many == kernels
    assert more.total() - calls.total() == 2 * 6 + 2 + 1
    assert more["geglu"] == calls["geglu"] == 2
    assert more["linear_add"] >= calls["linear_add"]
    assert not {step.op for step in adapted.call_steps} & {"geglu", "linear_add"}
    assert from_json(to_json(adapted)) == adapted


def test_older_gpus_multiply_twice() -> None:
    program = program_of(*TARGETS, disable=Options().on(has_wgmma=False).disable)
    found = {step.op for step in program.call_steps}
    assert "linear_add" in found
    assert not any(op.startswith("paired") for op in found)

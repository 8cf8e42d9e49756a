"""GELU that code spells out is one operator, and nothing else is taken for it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from strop.debug.reference import evaluate, input_values
from strop.ir.graph import Graph
from strop.options import Options
from strop.passes import run as run_passes
from tests.frontend.tracing import trace

K = math.sqrt(2 / math.pi)
Activation = Callable[[Tensor], Tensor]
TANH: dict[str, Activation] = {
    "GPT-2": lambda x: 0.5 * x * (1.0 + torch.tanh(K * (x + 0.044715 * torch.pow(x, 3.0)))),
    "fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "half last": lambda x: x * (torch.tanh(K * (x + 0.044715 * x**3)) + 1) * 0.5,
    "half on the gate": lambda x: x * (0.5 * (1 + torch.tanh(K * x * (1 + 0.044715 * x.square())))),
}
ERF: dict[str, Activation] = {
    "BERT": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "by a factor": lambda x: 0.5 * (x * (1.0 + torch.erf(x * 0.7071067811865476))),
}
OTHERS: dict[str, Activation] = {
    "another cubic": lambda x: 0.5 * x * (1.0 + torch.tanh(K * (x + 0.0447 * torch.pow(x, 3.0)))),
    "another factor": lambda x: 0.6 * x * (1.0 + torch.tanh(K * (x + 0.044715 * x**3))),
    "minus": lambda x: 0.5 * x * (1.0 - torch.tanh(K * (x + 0.044715 * x**3))),
    "another operand": lambda x: 0.5 * (x + 1) * (1.0 + torch.tanh(K * (x + 0.044715 * x**3))),
    "erf without the root": lambda x: 0.5 * x * (1.0 + torch.erf(x)),
    "a square": lambda x: 0.5 * x * x * (1.0 + torch.tanh(K * (x + 0.044715 * x**3))),
}


class Module(nn.Module):
    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x * x + x)  # of a product, whose own factors are none of GELU's


def graph_of(
    module: nn.Module, dtype: torch.dtype = torch.float16, shape: str = "b 8", rows: int = 4
) -> Graph:
    return run_passes(trace(module, shape, dtype=dtype, b=rows).graph, Options())[0]


def names(graph: Graph) -> set[str]:
    return {node.op for node in graph.nodes}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", TANH)
def test_the_form_by_tanh(name: str, dtype: torch.dtype) -> None:
    found = names(graph_of(Module(TANH[name]), dtype))
    assert "gelu_tanh" in found
    assert "tanh" not in found


@pytest.mark.parametrize("name", ERF)
def test_the_form_by_the_error_function(name: str) -> None:
    found = names(graph_of(Module(ERF[name])))
    assert "gelu" in found
    assert "erf" not in found


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_gelu(name: str) -> None:
    assert not {"gelu", "gelu_tanh"} & names(graph_of(Module(OTHERS[name])))


def test_what_others_read_as_well_stays() -> None:
    class Kept(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            bent = torch.tanh(K * (x + 0.044715 * x**3))
            return 0.5 * x * (1.0 + bent), bent

    assert "gelu_tanh" not in names(graph_of(Kept()))


def test_a_product_ends_in_it() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 256)

        def forward(self, x: Tensor) -> Tensor:
            return TANH["GPT-2"](self.up(x)) + 1.0

    layer = Layer().half()
    assert "linear_gelu" in names(graph_of(layer, shape="b 64", rows=512))


@pytest.mark.parametrize("name", [*TANH, *ERF])
def test_it_is_no_further_from_fp64_than_eager(name: str) -> None:
    module = Module({**TANH, **ERF}[name])
    x = torch.linspace(-4, 4, 4096).view(4, -1).half()
    graph = graph_of(module, shape="b 1024")
    given = input_values(graph, {0: x})
    (found,) = evaluate(graph.outputs, given, {"b": 4}, exact=False).values()
    exact = module(x.double())

    def off(y: Tensor) -> float:
        return float((y.double() - exact).norm())

    assert off(found) <= off(module(x))

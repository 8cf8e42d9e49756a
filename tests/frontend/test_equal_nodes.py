"""Equal nodes of a joint graph are merged as torch's partitioner merges them, without Inductor."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

import strop.frontend.joint  # noqa: F401  (defines strop.seed)
from strop.frontend.equal_nodes import can_merge, merged


def graph_of(function: Callable[..., object], *given: Tensor) -> Graph:
    return make_fx(function, tracing_mode="fake")(*given).graph


def text_of(graph: Graph) -> list[str]:
    return [f"{n.name} {n.target} {n.args} {n.kwargs}" for n in graph.nodes]


def numbers(x: Tensor) -> tuple[Tensor, ...]:
    return x * 1, x * 1.0, x * True, (x + 1).sum() * (x + 1).sum(), x.sum(0, True), x.sum(0, False)


def results_alike(x: Tensor) -> tuple[Tensor, ...]:
    return x + 1, x + 1, (x + 1).view(-1)


def random_ones(x: Tensor) -> Tensor:
    return (torch.rand_like(x) + torch.rand_like(x)).sum()


def empty_ones(x: Tensor) -> Tensor:
    return (torch.empty(3) + torch.empty(3)).sum() + x.sum() + x.sum()


def split_twice(x: Tensor) -> Tensor:
    return (x.split(2)[0] + x.split(2)[1] + x.split([2, 2])[0]).sin().sum()


CASES = (numbers, results_alike, random_ones, empty_ones, split_twice)


@pytest.mark.parametrize("function", CASES)
def test_the_graph_is_torchs(function: Callable[..., object]) -> None:
    graph = graph_of(function, torch.ones(4, 3))
    graph.eliminate_dead_code()
    expected = text_of(fx_graph_cse(graph))
    assert can_merge(graph)
    assert text_of(merged(graph)) == expected


def test_equal_nodes_are_merged_and_unequal_ones_kept() -> None:
    names = [node.target for node in merged(graph_of(numbers, torch.ones(4, 3))).nodes]
    assert names.count(torch.ops.aten.add.Tensor) == 1
    assert names.count(torch.ops.aten.mul.Tensor) == 4


def test_seeds_are_kept_apart() -> None:
    seed = torch.ops.strop.seed

    def draws(x: Tensor) -> Tensor:
        return seed(x, 0) + seed(x, 0)

    names = [node.target for node in merged(graph_of(draws, torch.ones(3))).nodes]
    assert names.count(seed.default) == 2


def test_a_graph_that_writes_is_left_to_torch() -> None:
    assert not can_merge(graph_of(lambda x: x.sin().add_(1), torch.ones(3)))


def test_a_training_step_does_not_load_the_compiler_of_torch() -> None:
    code = """
import sys, torch, strop
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
strop.optimize(model, train=True)
model(torch.ones(2, 4)).square().mean().backward()
print(strop.explain(model).summary()["num_graphs"], "torch._inductor.lowering" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]

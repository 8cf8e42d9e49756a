"""Rewrites: what they change, and what they leave alone."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop import passes
from strop.diffusion.components import adapter_for
from strop.ir.graph import Graph, Node, compute_nodes
from strop.options import Options
from strop.passes import PIPELINE
from strop.passes import run as run_passes
from tests.e2e import tiny
from tests.frontend.tracing import trace, trace_specs


def optimized(
    what: nn.Module | Callable[..., Any],
    *shapes: str,
    disable: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Graph:
    traced = trace(what, *shapes, dtype=dtype, b=2, h=8, w=12, s=24)
    return run_passes(traced.graph, Options(disable=disable))[0]


def ops(graph: Graph) -> Counter[str]:
    return Counter(n.op for n in compute_nodes(graph))


def merged(graph: Graph) -> list[Node]:
    return [n for n in graph.inputs if n.attrs["merged"]]


def test_a_1x1_convolution_is_a_linear_without_copies():
    module = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Conv2d(8, 16, 1),
        nn.SiLU(),
        nn.Conv2d(16, 8, 3, padding=1),
    )
    found = ops(optimized(module.half(), "b 8 h w", dtype=torch.float16))
    assert found["linear"] == 1
    assert found["conv2d"] == 2
    assert found["copy"] == 2  # the argument to channels-last, the result back


@pytest.mark.parametrize(
    "conv",
    [nn.Conv2d(8, 8, 1, stride=2), nn.Conv2d(8, 8, 1, padding=1), nn.Conv2d(8, 8, 1, groups=2)],
)
def test_other_convolutions_stay(conv: nn.Module):
    half = copy.deepcopy(conv).half()
    assert ops(optimized(half, "b 8 2*h 2*w", dtype=torch.float16))["linear"] == 0


class Heads(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, n, bias=bias) for n in (8, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x) + self.v(x)[..., :8]


@pytest.mark.parametrize("bias", [False, True])
def test_linears_of_one_input_become_one(bias: bool):
    graph = optimized(Heads(bias), "b s 8")
    assert ops(graph)["linear"] == 1
    parts = merged(graph)
    assert [str(p.shape[0]) for p in parts] == ["32"] * (2 if bias else 1)
    assert all(len(p.attrs["merged"]) == 3 for p in parts)
    assert ops(optimized(Heads(bias), "b s 8", disable=("dot_merge",)))["linear"] == 3


@pytest.mark.parametrize(("most_bytes", "pieces"), [(1024, [3]), (512, [2]), (511, []), (255, [])])
def test_a_piece_has_a_bound(most_bytes: int, pieces: list[int], monkeypatch: pytest.MonkeyPatch):
    """The weights of q and k have 256 bytes each, that of v 512."""
    names = vars(sys.modules[passes.dot_merge.__module__])
    monkeypatch.setitem(names, "MOST_BYTES", most_bytes)
    graph = optimized(Heads(), "b s 8")
    assert [len(part.attrs["merged"]) for part in merged(graph)] == pieces
    assert ops(graph)["linear"] == 3 - sum(pieces) + len(pieces)


def test_a_weight_used_twice_is_merged_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) + self.a(x.tanh()) * self.b(x.tanh())

    graph = optimized(Tied(), "b s 8")
    used = [i for p in merged(graph) for i in p.attrs["merged"]]
    assert len(used) == len(set(used))


def test_linears_of_other_weights_than_parameters_stay():
    graph = optimized(lambda x, a, b: F.linear(x, a) * F.linear(x, b), "s 8", "8 8", "8 8")
    assert ops(graph)["linear"] == 2


def unet_graph(**changes: Any) -> Graph:
    module = tiny.unet(**changes)
    args = tiny.unet_args(2, 8, 8, 7)
    shapes = adapter_for(module).shapes([args[2], args[0], args[1]])
    traced = trace_specs(
        module, lambda e, x, t: module(x, t, e, return_dict=False), list(shapes.specs), shapes.hints
    )
    return run_passes(traced.graph, Options())[0]


def test_all_cross_attention_keys_and_values_of_a_unet_are_one_gemm():
    graph = unet_graph()
    prompt = next(n for n in graph.inputs if not n.attrs["state"] and len(n.shape) == 3)
    readers = [n for n in graph.nodes if prompt in n.inputs]
    assert [n.op for n in readers] == ["linear"]
    weight = readers[0].inputs[1]
    # one down block, the middle, two layers of one up block: keys and values of four attentions
    assert len(weight.attrs["merged"]) == 2 * 4


def test_copies_of_a_unet_are_at_its_doors_and_its_upsampler():
    found = ops(unet_graph())
    assert found["copy"] == 3  # in, out, and the enlarged value that a convolution reads
    assert not found["aten"]


def test_nothing_computes_x_times_one():
    graph = optimized(lambda x: (x * 1 / 1 + 0.0) * 2, "b s 8")
    assert sorted(ops(graph)) == ["add", "mul"]  # adding zero is kept: it turns -0.0 into 0.0


@pytest.mark.parametrize("shapes", [("b h w", "b w h"), ("b 2 h w", "b h 2 w")], ids=str)
def test_a_sum_with_a_transposed_operand_lies_as_the_other_one(shapes: tuple[str, str]):
    for sum_of in (lambda x, y: x.transpose(1, 2) + y, lambda x, y: y + x.transpose(1, 2)):
        found = ops(optimized(lambda x, y, f=sum_of: f(x, y).softmax(-1), *shapes))
        assert "copy" not in found


def test_slices_that_undo_a_cat_are_its_pieces():
    graph = optimized(lambda x, y: torch.cat([x, y], 1)[:, 4:] * 2, "b 4 s", "b 6 s")
    assert list(ops(graph)) == ["mul"]


def test_biases_go_to_the_kernels_that_read_the_results():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.silu(self.a(x)))

    linears = [n for n in optimized(Net(), "b s 8").nodes if n.op == "linear"]
    assert [len(n.inputs) for n in linears] == [2, 3]


def test_disabled_passes_are_skipped():
    names = tuple(step.__name__ for step in PIPELINE if step.__name__ != "channels_last")
    traced = trace(Heads(), "b s 8", b=2, s=24)
    _, records = run_passes(traced.graph, Options(disable=names))
    assert [r.name for r in records] == ["channels_last"]


class Rows(nn.Module):
    """A linear on flattened rows, as Dynamo's graphs have it."""

    def __init__(self, *, shows_rows: bool) -> None:
        super().__init__()
        self.linear, self.shows_rows = nn.Linear(8, 16), shows_rows

    def forward(self, x: Tensor) -> Any:
        rows = self.linear(x.reshape(-1, 8))
        value, gate = rows.reshape(*x.shape[:-1], 16).chunk(2, -1)
        return (value * F.gelu(gate), rows) if self.shows_rows else value * F.gelu(gate)


@pytest.mark.parametrize("shows_rows", [False, True])
def test_one_gemm_for_rows_and_their_tensor(shows_rows: bool) -> None:
    """A backward keeps the rows: a linear on the tensor beside one on its rows was two."""
    graph = optimized(Rows(shows_rows=shows_rows), "b s 8")
    (linear,) = (node for node in graph.nodes if node.op == "linear")
    assert len(linear.shape) == (2 if shows_rows else 3)

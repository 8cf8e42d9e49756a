"""Results of calls that are written where a cat has them: which, what the graph is, and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.debug.reference import evaluate, input_values
from strop.fusion.planner import plan
from strop.ir.affine import base_of, strided
from strop.ir.contractions import AMONG_COLUMNS
from strop.ir.dims import const, symbol
from strop.ir.graph import Builder, Graph, Node
from strop.ir.parts import has_strides, places_of_calls
from strop.kernels.gemm import rows as gemm
from strop.kernels.kernel import Call
from strop.kernels.library import select
from strop.options import Options
from strop.passes import run as run_passes
from strop.passes.joined_calls import WIDTH
from tests.frontend.tracing import trace
from tests.gpus import A100, H100
from tests.kernels.launching import call as called

HALVES = [torch.float16, torch.bfloat16]
SIZES = {"b": 2, "s": 96}
DIM = 128


class Block(nn.Module):
    """As Flux's single blocks: attention and a feed-forward layer of one input, side by side."""

    is_causal, approximate = False, "tanh"

    def __init__(self, dim: int = DIM, width: int = 4 * DIM, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.mlp, self.out = nn.Linear(dim, width), nn.Linear(dim + width, dim)

    def attended(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return y.transpose(1, 2).flatten(2)

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.mlp(x), approximate=self.approximate)

    def pieces(self, x: Tensor) -> list[Tensor]:
        return [self.attended(x), self.hidden(x)]

    def forward(self, x: Tensor) -> Any:
        return x + self.out(torch.cat(self.pieces(x), 2))


class Exact(Block):
    approximate = "none"


class Causal(Block):
    is_causal = True


class Swapped(Block):
    def pieces(self, x: Tensor) -> list[Tensor]:
        return super().pieces(x)[::-1]


class ReadTwice(Block):
    def forward(self, x: Tensor) -> Any:
        attended, hidden = self.pieces(x)
        y = self.out(torch.cat([attended, hidden], 2))
        return y + attended + hidden.mean(-1, keepdim=True)


class Results(Block):
    def forward(self, x: Tensor) -> Any:
        attended, hidden = self.pieces(x)
        return self.out(torch.cat([attended, hidden], 2)), attended, hidden


class ForAKernel(Block):
    """A norm reads the cat, and puts it together on its way."""

    def forward(self, x: Tensor) -> Any:
        y = torch.cat(self.pieces(x), 2)
        return self.out(y) + y.mean(-1, keepdim=True)


class Wider(Block):
    """Two pieces that kernels compute would be two kernels."""

    def forward(self, x: Tensor) -> Any:
        y = torch.cat([self.attended(x), x.exp(), x.sin(), self.mlp(x)[..., : 2 * DIM].tanh()], 2)
        return self.out(y)


class CutApart(Block):
    """What a call makes is turned round on its way."""

    def hidden(self, x: Tensor) -> Tensor:
        return x.sin()

    def forward(self, x: Tensor) -> Any:
        y = self.attended(x)
        turned = torch.cat([y[:, 1:], y[:, :1]], 1)
        return F.linear(turned, self.out.weight[:, :DIM])


class Sliced(Block):
    """Some of what a call makes, and of another: each is read once."""

    def forward(self, x: Tensor) -> Any:
        half = DIM // 2
        y = torch.cat([self.attended(x)[..., :half], self.hidden(x)[..., half:]], 2)
        return F.linear(y, self.out.weight[:, : 4 * DIM])


class AsAResult(Block):
    def forward(self, x: Tensor) -> Any:
        return torch.cat(self.pieces(x), 2)


def traced(
    module: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    options: Options | None = None,
    width: int = DIM,
) -> Graph:
    given = trace(module.to(dtype), f"b s {width}", dtype=dtype, **SIZES).graph
    return run_passes(given, options or Options(), device)[0]


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def placed(graph: Graph) -> list[str]:
    return sorted(call.op for call in places_of_calls(graph))


def linears(graph: Graph) -> list[int]:
    """The columns of products, in their order."""
    calls = (node for node in graph.nodes if node.op in ("linear", "linear_gelu"))
    return [node.shape[-1].value for node in calls]


@pytest.mark.parametrize("module", [Block(), Swapped()], ids=["block", "swapped"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_no_kernel_puts_them_together(module: Block, dtype: torch.dtype) -> None:
    """q, k and v are one product, and what ends in GELU another; strides are those of the cat."""
    graph = traced(module, dtype)
    assert {"cat", "part", "gelu_tanh"}.isdisjoint(ops(graph))
    assert placed(graph) == ["attention", "linear_gelu"]
    assert sorted(linears(graph)) == [DIM, 3 * DIM, 4 * DIM]
    assert not [group for group in plan(graph).groups if len(group.nodes) < 2]
    (node,) = [n for n in graph.nodes if n.op == "linear_gelu"]
    assert node.attrs[AMONG_COLUMNS]
    x = torch.randn(3, 50, DIM).to(dtype)
    (number,) = [n.attrs["index"] for n in graph.inputs if not n.attrs["state"]]
    given = dict(enumerate(module.parameters())) | {number: x}
    for n in graph.inputs:
        if merged := n.attrs["merged"]:
            given[n.attrs["index"]] = torch.cat([given[part] for part in merged])
    env = {"b": 3, "s": 50}
    (value,) = evaluate(graph.outputs, input_values(graph, given), env, exact=False).values()
    torch.testing.assert_close(value, module(x), rtol=0.02, atol=0.02)


def test_places_are_those_of_the_cat() -> None:
    graph = traced(Swapped())
    found = {call.op: place for call, place in places_of_calls(graph).items()}
    whole, sizes = torch.arange(2 * 96 * 5 * DIM), {"b": 2, "s": 96}
    cat = whole.view(2, 96, 5 * DIM)
    heads = cat[..., 4 * DIM :].unflatten(-1, (2, -1)).transpose(1, 2)
    wanted = {"linear_gelu": cat.view(-1, 5 * DIM)[:, : 4 * DIM], "attention": heads}
    for op, place in found.items():
        assert base_of(place).op == "join"
        assert torch.equal(_seen(place, whole, sizes), wanted[op])


def _seen(place: Node, whole: Tensor, sizes: dict[str, int]) -> Tensor:
    view = strided(place)
    assert view is not None
    assert view.strides is not None
    shape, strides = ([n.eval(sizes) for n in each] for each in (place.shape, view.strides))
    return whole.as_strided(shape, strides, view.offset.eval(sizes))


@pytest.mark.parametrize(
    ("module", "given", "calls", "kernels"),
    [
        (Exact(), {}, ["attention"], 1),
        (Block(), {"options": Options(disable=("activated_linear",))}, ["attention"], 1),
        (Block(width=4 * DIM + 8), {}, ["attention"], 1),
        (Causal(), {}, ["linear_gelu"], 1),
        (AsAResult(), {}, ["attention", "linear_gelu"], 0),
    ],
    ids=["exact GELU", "no GELU in products", "odd width", "causal", "a result"],
)
def test_one_piece_may_be_a_kernels(
    module: Block, given: dict[str, Any], calls: list[str], kernels: int
) -> None:
    graph = traced(module, **given)
    assert placed(graph) == calls
    assert ops(graph).count("part") == kernels
    assert "cat" not in ops(graph)


def test_without_gelu_in_the_product_it_is_merged_as_before() -> None:
    assert linears(traced(Exact())) == [7 * DIM, DIM]
    assert linears(traced(Causal())) == [3 * DIM, 4 * DIM, DIM]  # attention's piece is copied


@pytest.mark.parametrize(
    ("module", "given"),
    [
        (ReadTwice(), {}),
        (Results(), {}),
        (ForAKernel(), {}),
        (Wider(), {}),
        (CutApart(), {}),
        (Sliced(), {}),
        (Block(dim=124, width=4 * DIM), {"width": 124}),
        (Block(), {"dtype": torch.float32}),
        (Block(), {"device": "cpu"}),
        (Block(), {"options": Options().in_training}),
        (Block(), {"options": Options().on(has_wgmma=False)}),
        (Block(), {"options": Options(disable=("joined_calls",))}),
    ],
    ids=[
        *("read twice", "results", "for a kernel", "two other pieces", "turned", "cut"),
        *("odd heads", "fp32", "cpu"),
        *("training", "no WGMMA", "switched off"),
    ],
)
def test_where_a_kernel_puts_them_together(module: Block, given: dict[str, Any]) -> None:
    graph = traced(module, **given)
    assert "cat" in ops(graph)
    assert not placed(graph)
    assert not any(node.attrs.get(AMONG_COLUMNS) for node in graph.nodes)


@pytest.mark.parametrize("options", [Options().on(has_wgmma=False), Options().in_training])
def test_elsewhere_products_are_merged_as_before(options: Options) -> None:
    assert linears(traced(Block(), options=options)) == [7 * DIM, DIM]


class Bare(nn.Module):
    """Two linears without biases, of two inputs."""

    def __init__(self, dim: int, bias: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.a, self.b = nn.Linear(DIM, DIM, bias=bias), nn.Linear(DIM, DIM, bias=bias)
        self.out = nn.Linear(2 * DIM if dim == 2 else DIM, DIM)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(torch.cat([self.a(x), self.b(y)], self.dim)).relu()


def test_rows_have_one_distance() -> None:
    """Side by side they have; behind each other those of the next picture begin elsewhere, unless
    there is one picture. ``joined_products`` is for these."""
    sizes = {"b": 2, "s": 128}
    for dim, batch, count in ((2, "b", 2), (1, "b", 0), (1, "1", 2)):
        shape = f"{batch} s {DIM}"
        found = trace(Bare(dim).half(), shape, shape, dtype=torch.float16, **sizes).graph
        graph = run_passes(found, Options(disable=("joined_products",)))[0]
        assert placed(graph) == ["linear"] * count
        assert ops(graph).count("cat") == (count == 0)


def test_linears_that_are_left_to_kernels() -> None:
    """Those of a few rows are added up faster by one, and biases are added by those that read."""
    shapes = f"b s {DIM}", f"b s {DIM}"
    for bias, rows, calls in ((False, 64, 2), (True, 64, 0), (False, 63, 0)):
        found = trace(Bare(2, bias).half(), *shapes, dtype=torch.float16, b=2, s=rows).graph
        assert len(placed(run_passes(found, Options())[0])) == calls


def test_what_an_adapter_adds_changes_no_merge() -> None:
    """Weights lie as they do without it."""

    class Adapted(Block):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(DIM, 8, bias=False), nn.Linear(8, 4 * DIM, bias=False)

        def hidden(self, x: Tensor) -> Tensor:
            return F.gelu(self.mlp(x) + self.up(self.down(x)), approximate="tanh")

    graph = traced(Adapted())
    assert placed(graph) == ["attention"]
    assert 3 * DIM in linears(graph)
    assert 7 * DIM not in linears(graph)


def test_strides_that_kernels_take() -> None:
    def place(columns: int, start: int, rank: int = 2) -> Node:
        b = Builder()
        shape = [symbol("r"), const(columns)][-rank:]
        whole = b.make("join", (), shape, torch.float16, dim=rank - 1)
        return b.slice(whole, rank - 1, start, 64)

    assert has_strides(place(320, 8), 8)
    assert not has_strides(place(320, 4), 8)
    assert not has_strides(place(324, 8), 8)


def test_ours_computes_it_where_rows_have_gaps() -> None:
    """A library would need a copy. Where rows are dense it has the same end, and was measured."""
    shapes = ("r", DIM), (4 * DIM, DIM), (4 * DIM,)
    for among, name in ((True, "wgmma_gemm"), (False, "cublas_gelu")):
        attrs = {AMONG_COLUMNS: True} if among else {}
        asked = called("linear_gelu", *shapes, **attrs)
        choice = select(asked, asked.at({"r": 4608}), H100)
        assert choice.kernel == name
    assert select(asked, asked.at({"r": 4608}), A100).kernel == "cublas_gelu"
    few = called("linear_gelu", *shapes, **{AMONG_COLUMNS: True})
    assert select(few, few.at({"r": 64}), H100).kernel == "cublas_gelu"


@pytest.mark.parametrize("columns", range(WIDTH, 12 * WIDTH, WIDTH))
def test_there_is_a_tile_for_each_width(columns: int) -> None:
    asked = called("linear_gelu", ("r", 64), (columns, 64), (columns,), **{AMONG_COLUMNS: True})
    assert gemm.supports(asked, H100) == ""
    assert gemm.ROW.launch(asked.at({"r": 4608}), H100) is not None
    assert isinstance(asked, Call)

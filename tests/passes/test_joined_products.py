"""Products of a text and a picture write into one buffer, of which attention reads the values."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.ir.graph import Builder, Graph, Node, finish
from strop.ir.program import Program
from strop.options import Options
from strop.passes import ONLY_ON, joined_products
from strop.passes import run as run_passes
from strop.runtime.run.placed_rows import by_rows
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import trace
from tests.fuzz.interpreted import interpreted
from tests.passes.test_joined_calls import ops, placed
from tests.runtime.test_placed_calls import optimized, program_of

DIM, HEADS = 64, 2
PASSES = ("joined_products", "joined_calls")


class Block(nn.Module):
    """Queries and keys are normed apart, as in Flux; values are put together as they are."""

    dim = 1

    def __init__(self, *, bias: bool = True, text: int = DIM) -> None:
        super().__init__()
        self.of_picture = nn.ModuleList(nn.Linear(DIM, DIM, bias=bias) for _ in range(3))
        self.of_text = nn.ModuleList(nn.Linear(text, DIM, bias=bias) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(DIM // HEADS) for _ in range(4))
        self.out = nn.Linear(DIM, DIM)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1))

    def qkv(self, x: Tensor, layers: Any, norms: Sequence[Any]) -> list[Tensor]:
        q, k, v = (self.heads(layer(x)) for layer in layers)
        return [norms[0](q), norms[1](k), v]

    def joined(self, x: Tensor, y: Tensor) -> list[Tensor]:
        picture = self.qkv(x, self.of_picture, self.norms[:2])
        text = self.qkv(y, self.of_text, self.norms[2:])
        return [torch.cat(pair, self.dim) for pair in zip(text, picture, strict=True)]

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*turned).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        z = self.out(self.attended(*self.joined(x, y)))
        return z[:, y.shape[1] :] + x, z[:, : y.shape[1]].relu()


class Plain(Block):
    """Nothing is normed, as in SD3: all three are read as they are."""

    def qkv(self, x: Tensor, layers: Any, norms: Sequence[Any]) -> list[Tensor]:
        return [self.heads(layer(x)) for layer in layers]


class Turned(Block):
    """Heads come before rows, as in other implementations of Flux."""

    dim = 2

    def heads(self, x: Tensor) -> Tensor:
        return super().heads(x).transpose(1, 2)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class PictureFirst(Block):
    def joined(self, x: Tensor, y: Tensor) -> list[Tensor]:
        picture = self.qkv(x, self.of_picture, self.norms[:2])
        text = self.qkv(y, self.of_text, self.norms[2:])
        return [torch.cat(pair, self.dim) for pair in zip(picture, text, strict=True)]


class ValuesAlone(Block):
    """Each is a product of its own."""

    def qkv(self, x: Tensor, layers: Any, norms: Sequence[Any]) -> list[Tensor]:
        q, k = norms[0](self.heads(x)), norms[1](self.heads(x.sin()))
        return [q, k, self.heads(layers[2](x))]


class Kernels(Block):
    """A kernel reads the values first."""

    def joined(self, x: Tensor, y: Tensor) -> list[Tensor]:
        q, k, v = super().joined(x, y)
        return [q, k, v.sigmoid()]


class Different(Block):
    """What one is at keys, the other is at values."""

    def joined(self, x: Tensor, y: Tensor) -> list[Tensor]:
        (a, b, c), (d, e, f) = (
            [self.heads(layer(z)) for layer in layers]
            for z, layers in ((x, self.of_picture), (y, self.of_text))
        )
        return [torch.cat(pair, 1) for pair in ((d.sin(), a.cos()), (e.sin(), c), (f, b.cos()))]


class OneOfTheOther(Block):
    """The text's product is of the picture's."""

    def joined(self, x: Tensor, y: Tensor) -> list[Tensor]:
        picture = self.qkv(x, self.of_picture, self.norms[:2])
        text = self.qkv(picture[2].flatten(2) + y, self.of_text, self.norms[2:])
        return [torch.cat(pair, self.dim) for pair in zip(text, picture, strict=True)]


class Returned(Block):
    """The caller gets what was put together, and a view of it."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        q, k, v = self.joined(x, y)
        return self.out(self.attended(q, k, v)).relu(), v, v.transpose(1, 2)


class Sorted(Block):
    """An operator of torch's reads them, whose results lie as they do."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attended(q, k, v) + v.sort(-1).values.flatten(2)


class SortedAlone(ValuesAlone):
    """The same of what one product made."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return *super().forward(x, y), self.of_text[2](y).sort(-1).values


class Dropped(Turned):
    """The first row of the text is left out."""

    def joined(self, x: Tensor, y: Tensor) -> list[Tensor]:
        picture = self.qkv(x, self.of_picture, self.norms[:2])
        text = (z[:, :, 1:] for z in self.qkv(y, self.of_text, self.norms[2:]))
        return [torch.cat(pair, self.dim) for pair in zip(picture, text, strict=True)]

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.out(self.attended(*self.joined(x, y))).relu()


class Twice(Block):
    """The same rows come twice."""

    def joined(self, x: Tensor, y: Tensor) -> list[Tensor]:
        q, k, v = self.qkv(x, self.of_picture, self.norms[:2])
        return [torch.cat([z, z], 1) for z in (q, k, v)]

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.out(self.attended(*self.joined(x, y))) * y.sum()


class Given(Block):
    """The caller gets the values of the text as well."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return *super().forward(x, y), self.of_text[2](y)


JOINED = {
    "flux": Block(),
    "sd3": Plain(),
    "turned": Turned(),
    "picture first": PictureFirst(),
    "values alone": ValuesAlone(),
    "bare": Block(bias=False),
    "narrow text": Block(text=40),
}


APART = {
    "a kernel reads": Kernels(),
    "different columns": Different(),
    "one of the other": OneOfTheOther(),
    "dropped": Dropped(),
    "returned": Returned(),
    "sorted": Sorted(),
    "sorted alone": SortedAlone(),
    "twice": Twice(),
    "given": Given(),
}


def shapes(module: Block) -> tuple[str, str]:
    text = module.of_text[0].in_features
    rows = "s" if isinstance(module, OneOfTheOther) else "t"
    return f"b s {DIM}", f"b {rows} {text}"


def graph_of(module: Block, device: str = "cuda", **options: Any) -> Graph:
    found = trace(module.half(), *shapes(module), dtype=torch.float16, b=2, s=96, t=24)
    return run_passes(found.graph, Options(**options), device)[0]


def program(module: Block) -> Program:
    found = trace(module.half(), *shapes(module), dtype=torch.float16, b=2, s=96, t=24)
    return compile_graph(found.graph, Signature(found.returned, ()), "cuda", Options()).program


@pytest.mark.parametrize("name", JOINED)
def test_no_kernel_puts_values_together(name: str) -> None:
    module = JOINED[name]
    graph = graph_of(module)
    assert placed(graph) == ["linear", "linear"]
    assert ops(graph).count("join") == (1 if name == "sd3" else 3)
    assert ops(graph).count("cat") == 0
    biased = [len(n.inputs) == 3 for n in graph.nodes if n.op == "linear"][:2]
    assert biased == [module.of_text[0].bias is not None] * 2
    found = program(module)
    assert len(found.call_steps) == 4  # two products, attention and what follows
    kernels = len(found.kernel_steps)
    found = compile_off(module)
    assert len(found.kernel_steps) > kernels or name == "turned"


def compile_off(module: Block) -> Program:
    found = trace(module.half(), *shapes(module), dtype=torch.float16, b=2, s=96, t=24)
    options = Options(disable=("joined_products",))
    return compile_graph(found.graph, Signature(found.returned, ()), "cuda", options).program


@pytest.mark.parametrize("name", APART)
def test_what_stays_apart(name: str) -> None:
    assert "linear" not in placed(graph_of(APART[name]))


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_argument_is_written_between_products(after: int) -> None:
    """What reads the first product, and that argument, would run behind the write."""
    given = trace(Plain().half(), *shapes(Plain()), dtype=torch.float16, b=2, s=96, t=24).graph
    graph = run_passes(given, Options(disable=(*PASSES, "bias_to_consumer")))[0]
    b, new, count = Builder(), dict[Node, Node](), 0
    for node in dict.fromkeys((*graph.inputs, *graph.nodes)):
        new[node] = b.copy_of(node, tuple(new[x] for x in node.inputs))
        count += node.op == "linear"
        if count == after + 1 and node.op == "linear":
            x = new[graph.inputs[-1]]
            b.make("write", (x, b.pointwise("neg", x, dtype=x.dtype)), x.shape, x.dtype)
    inputs, outputs = ([new[node] for node in of] for of in (graph.inputs, graph.outputs))
    written = finish(b, inputs, outputs, graph.hints)
    assert [n.op for n in written.nodes].count("write") == 1
    assert ops(joined_products(written, Options())).count("join") == (after > 0)


def test_on_processors_they_stay_apart() -> None:
    assert "join" not in ops(graph_of(Plain(), "cpu"))


@pytest.fixture
def on_a_cpu() -> Iterator[None]:
    elsewhere = {name: kind for name, kind in ONLY_ON.items() if name not in PASSES}
    with (
        patch.dict(ONLY_ON, elsewhere, clear=True),
        patch.object(Options, "on", lambda self, *, has_wgmma: self),
    ):
        yield


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("name", [*JOINED, *APART])
def test_values(name: str, tmp_path: Path) -> None:
    module = copy.deepcopy({**JOINED, **APART}[name]).bfloat16().eval().requires_grad_(False)
    exact = copy.deepcopy(module).double()
    source = torch.Generator().manual_seed(5)
    with interpreted():
        fast, dispatcher = optimized(module, tmp_path, check=True)
        for batch, rows, words in ((2, 9, 4), (1, 17, 5), (3, 4, 4), (2, 9, 4)):
            words = rows if name == "one of the other" else words
            x = torch.randn(batch, rows, DIM, generator=source).bfloat16()
            y = torch.randn(
                batch, words, module.of_text[0].in_features, generator=source
            ).bfloat16()
            found, eager = fast(x, y), module(x, y)
            wanted = exact(x.double(), y.double())
            for got, base, true in zip(*map(several, (found, eager, wanted)), strict=True):
                assert got.stride() == base.stride()
                assert_as_accurate_as_eager(got, base, true)
    is_joined = "linear" in [s.op for s in program_of(dispatcher).call_steps if s.place is not None]
    assert is_joined == (name in JOINED)
    assert not dispatcher.counters.findings
    assert not dispatcher.counters.eager_calls


def several(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


@pytest.mark.parametrize(
    ("pictures", "rows", "calls"),
    [(1, 40, [40]), (2, 40, [80]), (2, 8192, [8192, 8192]), (40, 8192, [40 * 8192])],
)
def test_rows_of_several_pictures(pictures: int, rows: int, calls: list[int]) -> None:
    """Large ones are multiplied one by one, of others all are copied."""
    seen = list[int]()

    def product(inputs: Sequence[Tensor], out: Tensor) -> None:
        seen.append(len(out))
        assert out.dim() == 2
        torch.mm(inputs[0], inputs[1], out=out)

    columns = 512 if pictures < 40 else 8
    whole = torch.full((pictures, rows + 3, columns), 7.0)
    place = whole[:, 2 : 2 + rows]
    x, weight = torch.randn(pictures * rows, 4), torch.randn(4, columns)
    by_rows(product, product)([x, weight], place)
    assert seen == calls
    torch.testing.assert_close(place, (x @ weight).view(place.shape))
    assert bool((whole[:, :2] == 7).all())
    assert bool((whole[:, -1] == 7).all())


def test_rows_with_a_distance_are_written_at_once() -> None:
    whole = torch.zeros(3, 5, 16)
    calls = list[Tensor]()
    write = by_rows(lambda inputs, out: calls.append(out), lambda inputs, out: None)
    write([], whole[..., 4:12])
    (out,) = calls
    assert out.shape == (15, 8)
    assert out.stride() == (16, 1)
    assert out.data_ptr() == whole[..., 4:].data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("name", JOINED)
def test_values_on_a_gpu(name: str, tmp_path: Path) -> None:
    module = copy.deepcopy(JOINED[name]).half().cuda().eval().requires_grad_(False)
    exact = copy.deepcopy(module).double()
    source = torch.Generator("cuda").manual_seed(5)
    fast, dispatcher = optimized(module, tmp_path)
    text = module.of_text[0].in_features
    for batch, rows, words in ((2, 512, 77), (1, 1024, 128), (3, 8192, 64), (1, 1024, 128)):
        x = torch.randn(batch, rows, DIM, generator=source, device="cuda").half()
        y = torch.randn(batch, words, text, generator=source, device="cuda").half()
        for _ in range(3):  # the last one replays a graph
            found, eager = fast(x, y), module(x, y)
        wanted = exact(x.double(), y.double())
        for got, base, true in zip(*map(several, (found, eager, wanted)), strict=True):
            assert got.stride() == base.stride()
            assert_as_accurate_as_eager(got, base, true)
    assert not dispatcher.counters.eager_calls

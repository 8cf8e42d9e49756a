"""Reductions of few rows for each of many others: a program has many of the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import strop
from strop.backend import Compiled, compile_graph
from strop.codegen.assemble import Signature
from strop.codegen.triton_short_column import ELEMENTS, FEW, MOST_ROWS
from strop.ir.graph import Ref
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.codegen.test_model_kernels import check, model_of
from tests.frontend.tracing import Function, trace

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": lambda x, w: (x * w[..., None]).sum(2),
    "largest": lambda x, w: (x * w[..., None]).amax(2) * 2,
    "product": lambda x, w: (x + w[..., None]).prod(2),
    "variance": lambda x, w: (x * w[..., None]).var(2, correction=0) + w.sum(2, keepdim=True),
    "mean of all, and each": lambda x, w: x.mean(2).relu() + w[..., :1],
}


def compiled(
    function: Callable[..., Tensor], rows: int = 4, cols: str = "32", *, q: int = 11
) -> Compiled:
    sizes = {"b": 3, "q": q} | ({"c": 5} if "c" in cols else {})
    graph = trace(function, f"b q {rows} {cols}", f"b q {rows}", **sizes).graph
    return compile_graph(graph, Signature([Ref(0)], ()), "cuda", Options())


@pytest.mark.parametrize("cols", ["32", "24", "3", "c", "4*c", "320"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str, cols: str) -> None:
    """Of 33 others, which are no whole number of tiles; in both forms."""
    made = compiled(FUNCTIONS[name], cols=cols)
    assert {source.split is None for source in made.program.sources} == {True, False}
    model = model_of(made)
    for sample, form in model.samples.values():
        check(sample, model.env, 1, form)


@pytest.mark.parametrize("rows", [MOST_ROWS, MOST_ROWS + 1])
def test_how_many_rows_are_few(rows: int) -> None:
    sources = compiled(FUNCTIONS["sum"], rows).program.sources
    assert any(source.split is None for source in sources) == (rows <= MOST_ROWS)


@pytest.mark.parametrize("q", [FEW // 96, FEW // 96 + 1])
def test_few_results_are_left_to_slabs(q: int) -> None:
    """All of a GPU has something to do then."""
    (source,) = compiled(FUNCTIONS["sum"]).program.sources_at({"b": 3, "q": q})
    assert (source.split is None) == (96 * q > FEW)


def test_a_program_has_a_tile_of_others() -> None:
    (source,) = compiled(FUNCTIONS["sum"]).program.sources_at({"b": 3, "q": 10**6})
    constants = dict(source.constants)
    assert constants["ROWS"] * constants["COLS"] == ELEMENTS
    assert source.grid[0].eval({"s0": 3 * 10**6}) == -(-3 * 10**6 // constants["ROWS"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("q", [50, 3001])
def test_on_a_gpu(name: str, q: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(size, device="cuda").half() for size in ((3, q, 4, 32), (3, q, 4)))
    fast, plain = Function(FUNCTIONS[name]).eval(), Function(FUNCTIONS[name]).eval()
    strop.optimize(fast, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.no_grad():
        wanted, eager = plain(x.double(), w.double()), plain(x, w)
        for _ in range(3):
            assert_as_accurate_as_eager(fast(x, w), eager, wanted)
    assert not fast.forward.counters.fallbacks


@pytest.mark.parametrize(("cols", "rows"), [(2, 512), (4, 256), (12, 64), (33, 16), (64, 16)])
def test_short_rows_fill_a_tile(cols: int, rows: int) -> None:
    """Softmaxes of a few weights each, as deformable attention has them."""
    graph = trace(lambda x: x.softmax(-1), f"b q {cols}", b=3, q=11).graph
    made = compile_graph(graph, Signature([Ref(0)], ()), "cuda", Options())
    (source,) = made.program.sources_at({"b": 3, "q": 10**5})
    assert dict(source.constants)["ROWS"] == rows
    model = model_of(made)
    for sample, form in model.samples.values():
        check(sample, model.env, 1, form)

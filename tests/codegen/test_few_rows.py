"""Reductions of few rows for each of several have narrower columns, and so more programs."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from strop.backend import Compiled, compile_graph
from strop.codegen.assemble import Signature
from strop.codegen.triton_column import FEW_ROWS, FEW_ROWS_COLS, NARROW_COLS
from strop.ir.graph import Ref
from strop.options import Options
from tests.codegen.test_model_kernels import check, model_of
from tests.frontend.tracing import trace


def compiled(function: Any, shape: str, **sizes: int) -> Compiled:
    graph = trace(function, shape, **sizes).graph
    return compile_graph(graph, Signature([Ref(0)], ()), "cuda", Options())


def mean(x: Tensor) -> Tensor:
    return (x * 2).mean((1, 2))


@pytest.mark.parametrize(
    ("side", "cols"), [(7, FEW_ROWS_COLS), (8, FEW_ROWS_COLS), (9, NARROW_COLS)]
)
def test_columns_of_a_mean_over_pixels(side: int, cols: int) -> None:
    made = compiled(mean, "b h w 512", b=3, h=side, w=side)
    assert (side**2 <= FEW_ROWS) == (cols == FEW_ROWS_COLS)
    (source,) = made.program.sources_at({"b": 3, "h": side, "w": side})
    assert dict(source.constants)["COLS"] == cols
    model = model_of(made)
    assert len(model.samples) == 2
    for sample, form in model.samples.values():
        check(sample, model.env, 1, form)


def test_sums_over_everything_have_one_form() -> None:
    """Their number of programs is that of the pieces into which rows are cut."""
    made = compiled(lambda x: x.sum((0, 1, 2)), "b h w 512", b=3, h=7, w=7)
    assert len(made.program.sources) == 1

"""Rows of which an operand lies across them are held in registers where they are short."""

from __future__ import annotations

import pytest
from torch import Tensor

from strop.backend import Compiled, compile_graph
from strop.codegen.assemble import Signature
from strop.codegen.triton_row import STRIDED_COLS, STRIDED_LIMITS, STRIDED_ROWS
from strop.ir.graph import Ref
from strop.options import Options
from tests.codegen.test_model_kernels import check, model_of
from tests.frontend.tracing import trace


def scores(x: Tensor, y: Tensor) -> Tensor:
    return (x + y.transpose(1, 2)).softmax(-1)


def compiled(cols: int) -> Compiled:
    graph = trace(scores, "b r c", "b c r", b=2, r=6, c=cols).graph
    return compile_graph(graph, Signature([Ref(0)], ()), "cuda", Options())


@pytest.mark.parametrize(
    ("cols", "held"), [(2, 32), (32, 32), (33, 64), (200, 256), (512, 512), (513, 0)]
)
def test_short_rows_are_read_once(cols: int, held: int) -> None:
    made = compiled(cols)
    (source,) = made.program.sources_at({"b": 2, "r": 6, "c": cols})
    tile = dict(source.constants)
    assert tile["COLS"] == (held or STRIDED_COLS)
    assert ("for first in range" in source.text) is not bool(held)
    if held:
        assert tile["ROWS"] == STRIDED_ROWS
    model = model_of(made)
    for sample, form in model.samples.values():
        check(sample, model.env, 1, form)


def test_there_is_a_form_for_each_limit() -> None:
    assert len(compiled(7).program.sources) == 1 + len(STRIDED_LIMITS)

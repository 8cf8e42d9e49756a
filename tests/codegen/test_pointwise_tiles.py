"""Tiles of pointwise kernels: no lane is idle where a batch may have one picture."""

from __future__ import annotations

import pytest

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.codegen.triton_pointwise import forms, pointwise_tile
from strop.codegen.triton_text import is_transposing
from strop.ir.loops import LoopKernel
from strop.lowering.lower import lower
from strop.options import Options
from tests.frontend.tracing import Traced, trace


def kernels_of(traced: Traced) -> list[LoopKernel]:
    signature = Signature(traced.returned, traced.captured.guards)
    compiled = compile_graph(traced.graph, signature, "cuda", Options())
    groups = compiled.plan.groups
    stored = {node for group in groups for node in group.stores}
    return [lower(group, stored, compiled.graph.hints).kernel for group in groups]


def tokens_of_picture(shape: str, **sizes: int) -> LoopKernel:
    """Return the copy of the last ``t`` of ``t + 3`` tokens."""
    traced = trace(lambda x, y: x[:, 3:] * 1 + 0 * y.sum(), shape, "1", **sizes)
    (kernel,) = [each for each in kernels_of(traced) if each.rows and not each.num_cols.is_const]
    return kernel


@pytest.mark.parametrize("most", [None, 2**20], ids=["many elements", "few"])
def test_one_long_row_fills_a_tile(most: int | None) -> None:
    kernel = tokens_of_picture("b t+3 3072", b=1, t=4096)
    rows, cols, num_warps = pointwise_tile(kernel, most)
    assert rows == 1
    assert cols >= 4 * 32 * num_warps


def test_many_rows_share_a_tile() -> None:
    kernel = tokens_of_picture("16*b t+3 3072", b=1, t=4096)
    assert pointwise_tile(kernel, None)[0] == 16


def test_few_elements_that_are_transposed_fill_many_programs() -> None:
    """A picture of 3 x 65 x 65 had eight tiles of a side of 64."""
    traced = trace(lambda x: x.permute(0, 2, 3, 1).contiguous() * 2, "b 3 h w", b=2, h=65, w=65)
    (kernel,) = kernels_of(traced)
    assert is_transposing(kernel)
    (form,) = forms(kernel)
    small, large = (pointwise_tile(kernel, most) for most in (form.most, None))
    assert small[0] * small[1] * 8 <= large[0] * large[1]
    assert form.fits({"b": 2, "h": 65, "w": 65})
    assert not form.fits({"b": 2, "h": 512, "w": 512})

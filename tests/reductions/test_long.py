"""Long reductions: no digit is lost on the way, by either code generator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import strop
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.codegen.triton import emit
from strop.codegen.triton_interpreter import interpret
from strop.ir.dims import to_expr
from strop.ir.loops import LoopKernel, Schedule
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.codegen.kernels import Sample, Writer, axis, index, reads, writes
from tests.codegen.test_ptx import ptx
from tests.frontend.tracing import Function, trace

F32 = torch.float32
LENGTHS = (1, 123, 12_345, 40_960, 1_000_000)
REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "var": lambda x, *dims: x.var(*dims, unbiased=False),
    "norm": lambda x, *dims: torch.linalg.vector_norm(x, 2, *dims),
}


def data(rows: int, length: int, mean: float) -> Tensor:
    generator = torch.Generator().manual_seed(rows + length)
    return torch.randn(rows, length, generator=generator) + mean


@pytest.mark.parametrize("rows", [2, 257])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_cpp(name: str, rows: int):
    function = REDUCTIONS[name]
    along = Function(lambda x, y: (function(x, -1), function(y, 0), function(x))).eval()
    with torch.no_grad():
        strop.optimize(along, options=Options(strict=True))
        for length in LENGTHS if rows == 2 else LENGTHS[:3]:
            x = data(rows, length, mean=0.5)
            args = x, x.t().contiguous()
            exact = Function.forward(along, *(a.double() for a in args))
            eager = Function.forward(along, *args)
            for ours, theirs, reference in zip(along(*args), eager, exact, strict=True):
                assert_as_accurate_as_eager(ours, theirs, reference)


def followed(x: Tensor) -> tuple[Tensor, ...]:
    """Reductions of rows, and of all, whose results go back to each element."""
    return (
        x / torch.linalg.vector_norm(x, 2, -1, keepdim=True),
        (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
        x.softmax(-1),
        x.clamp(max=x.amax() / 2),
        torch.where(torch.isinf(x).any(), x - 1, x.sin()),
        x.argmax(-1),
    )


def check_followed(x: Tensor, module: Function) -> None:
    exact, eager = followed(x.double()), followed(x)
    *found, places = module(x)
    for number, (ours, theirs, reference) in enumerate(zip(found, eager, exact, strict=False)):
        what = f"result {number} of {tuple(x.shape)}"
        assert_as_accurate_as_eager(ours, theirs, reference, what)
    assert torch.equal(x.gather(-1, places[:, None]), x.amax(-1, keepdim=True))
    x[0, 77] = float("inf")
    assert torch.equal(module(x)[4], x - 1)


@pytest.mark.parametrize("rows", [1, 2])
@torch.no_grad()
def test_cpp_of_what_follows_a_long_row(rows: int):
    """Threads share a row, and what each of its elements becomes after that."""
    module = Function(followed).eval()
    strop.optimize(module, options=Options(strict=True))
    check_followed(data(rows, 1_234_567, mean=0.5), module)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@torch.no_grad()
def test_what_follows_a_long_row_on_a_gpu(dtype: torch.dtype):
    """One graph: rows that programs share, and short ones that are one launch."""
    for shapes in (((1, 1_234_567), (1, 4000)), ((2, 10_000_000), (2, 999), (40, 777))):
        module = Function(followed).eval()
        strop.optimize(module, options=Options(strict=True))
        for rows, length in shapes:
            check_followed(data(rows, length, mean=0.5).to("cuda", dtype), module)


@pytest.mark.parametrize("shape", ["1 n", "2 n", "r 777"])
def test_fp32_is_divided_as_in_eager(shape: str):
    """Triton's own / is two ulps off, and all elements of a row share the error of its divisor: a
    standardised row was 2.2 times as far from fp64 as eager's."""
    pytest.importorskip("triton")
    traced = trace(followed, shape, **{name: 900 for name in "rn" if name in shape})
    signature = Signature(traced.returned, traced.captured.guards)
    program = compile_graph(traced.graph, signature, "cuda", Options()).program
    sources = [source for source in program.sources if "div" in source.name]
    assert any("tl.div_rn(" in source.text for source in sources)
    for source in sources:
        if torch.float32 in source.params and not source.split:
            assert "div.full.f32" not in ptx(source), source.text


def summed(schedule: Schedule, rows: int, length: int) -> Sample:
    """Sums of rows, or of columns."""
    w = Writer(F32)
    is_row = schedule is Schedule.ROW
    x = w.load(0, index(r=length, c=1) if is_row else index(r=1, c=rows))
    (total,) = w.reduce("sum", x)
    body = w.take()
    w.store(1, index(r=1), total)
    tail = w.take()
    params = reads(F32) + writes(F32)
    outer, inner = axis("r", rows), axis("c", length, reduced=True)
    if is_row:
        kernel = LoopKernel("summed", schedule, (outer,), (inner,), params, body + tail, ())
    else:
        kernel = LoopKernel("summed", schedule, (inner,), (outer,), params, body, tail)
    return Sample(kernel, (to_expr(rows * length), to_expr(rows)), ({},))


@pytest.mark.parametrize("length", LENGTHS[1:])
def test_triton_rows(length: int):
    """Zero on average: every lost digit of a partial sum shows in the result."""
    x, out = data(4, length, mean=0.0), torch.empty(4)
    interpret(emit(summed(Schedule.ROW, 4, length).kernel).source, [x.view(-1), out], {})
    assert_as_accurate_as_eager(out, x.sum(-1), x.double().sum(-1))


@pytest.mark.parametrize("length", LENGTHS[1:4])
def test_triton_columns(length: int):
    """64 columns: numpy, which stands for the GPU here, adds rows of a tile one by one."""
    x, out = data(length, 64, mean=0.0), torch.empty(64)
    source = emit(summed(Schedule.COLUMN, 64, length).kernel).source
    interpret(source, [x.view(-1), out], {"splits": 2})
    assert_as_accurate_as_eager(out, x.sum(0), x.double().sum(0))


def test_an_infinite_element_is_not_lost():
    x = torch.ones(1, 9000)
    x[0, 3] = float("inf")
    out = torch.empty(1)
    interpret(emit(summed(Schedule.ROW, 1, 9000).kernel).source, [x.view(-1), out], {})
    assert out.item() == float("inf")


def _by_quotients(x: Tensor) -> Tensor:
    return (x / (x.abs().amax(-1, keepdim=True).float() / 127)).round().to(torch.int8)


def _by_reciprocals(x: Tensor) -> Tensor:
    return (x * (127 / x.abs().amax(-1, keepdim=True).float())).round().to(torch.int8)


@pytest.mark.parametrize("codes", [_by_quotients, _by_reciprocals])
@pytest.mark.parametrize("dtype", [torch.float16, F32], ids=str)
def test_what_is_rounded_to_codes_is_divided_as_in_eager(
    dtype: torch.dtype, codes: Callable[[Tensor], Tensor]
):
    """What lies between two codes went to the other one, by the last bit of a quotient."""
    pytest.importorskip("triton")

    traced = trace(codes, "r n", dtype=dtype, r=900, n=900)
    signature = Signature(traced.returned, traced.captured.guards)
    sources = compile_graph(traced.graph, signature, "cuda", Options()).program.sources
    texts = [source.text for source in sources if "rint" in source.text]
    assert texts
    assert any("tl.div_rn(" in source.text for source in sources)
    assert not any(" / v" in source.text for source in sources)

"""Linears on a CPU by a kernel of ours, against fp64 and eager."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.ir.device import CPU
from strop.kernels import library
from strop.kernels.gemm import linear_cpu
from strop.kernels.kernel import Launch, Problem, Stride
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeKernels
from strop.runtime.build.processors import processor
from strop.testing import assert_as_accurate_as_eager
from tests.kernels.cpu_programs import run_while_weights_change

HAS_AVX = torch.backends.cpu.get_cpu_capability().startswith("AVX")
needs_avx = pytest.mark.skipif(not HAS_AVX, reason="has vectors of AVX")
MEASURED = replace(CPU, isa=linear_cpu.WITH_BF16)
TYPES = [torch.float32, torch.bfloat16]
# rows, depth, columns: whole tiles, and what is left of each kind; sums in parts; few rows and
# columns, at depths of less than a vector, of vectors and a rest, and of several parts
SIZES = [(6, 64, 64), (13, 50, 17), (1, 256, 80), (97, 258, 33), (8, 1030, 150), (192, 96, 288)]
SIZES += [(7, 14, 9), (2, 526, 5), (33, 78, 1), (5, 8200, 3), (3, 2, 130), (40, 6, 4)]
SIZES += [(800, 34, 70)]  # two panels


def product(kernels: NativeKernels, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    given = [x, weight] if bias is None else [x, weight, bias]
    problem = Problem("linear", (), tuple(tuple(t.shape) for t in given), x.dtype)
    launches = linear_cpu.launch(problem, MEASURED)
    assert launches is not None
    (part,) = launches.parts
    assert isinstance(part, Launch)
    out = torch.full((x.shape[0], weight.shape[0] + 2), 7.0, dtype=x.dtype)[:, :-2]
    tensors = [x, weight, out, *given[2:]]
    scalars = [
        tensors[each.operand].stride(each.dim) if isinstance(each, Stride) else each
        for each in part.scalars
    ]
    kernels.build([part.source])[part.source].bind([t.data_ptr() for t in tensors], scalars)()
    assert bool((out.as_strided((x.shape[0], 2), out.stride(), out.shape[1]) == 7).all())
    return out


@pytest.fixture(scope="module", params=["", "cpu-v3"])
def target(request: Any) -> str:
    """This processor, and one with AVX2 alone."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def kernels(target: str, tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    return NativeKernels(DiskCache(tmp_path_factory.mktemp("kernels")), target=target)


@needs_avx
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_fp64(kernels: NativeKernels, target: str, sizes: Any, dtype: torch.dtype) -> None:
    rows, depth, columns = sizes
    if not linear_cpu.can_multiply(dtype, processor(target).isa):
        pytest.skip("pairs of bf16 are for processors that multiply them")
    torch.manual_seed(rows)
    x, bias = torch.randn(rows, depth + 4).to(dtype)[:, :depth], torch.randn(columns).to(dtype)
    weight = torch.randn(columns, depth).to(dtype)
    for w in (weight, weight.t().contiguous().t()):
        for b in (bias, None):
            exact = F.linear(x.double(), w.double(), None if b is None else b.double())
            eager = F.linear(x, w, b)
            is_by_tiles = w is not weight and rows < linear_cpu.FEWEST_ROWS  # a weight that lies so
            if dtype is torch.float32 and is_by_tiles:
                torch.testing.assert_close(product(kernels, x, w, b), eager, rtol=1e-5, atol=1e-4)
            else:
                assert_as_accurate_as_eager(product(kernels, x, w, b), eager, exact)


@needs_avx
def test_any_rows_in_fp32(kernels: NativeKernels) -> None:
    """Rows may begin anywhere in fp32, and what lies beside them is not looked at."""
    for rows, depth, columns in ((9, 13, 64), (70, 525, 33), (3, 37, 6), (50, 21, 2)):
        wide = torch.full((rows, depth + 2), torch.nan)
        x = wide[:, 1:-1].copy_(torch.randn(rows, depth))
        weight = torch.full((columns, depth + 1), torch.inf)[:, :-1].copy_(
            torch.randn(columns, depth)
        )
        found, exact = product(kernels, x, weight, None), F.linear(x.double(), weight.double())
        assert_as_accurate_as_eager(found, F.linear(x, weight), exact)


@needs_avx
def test_few_rows_keep_what_is_not_finite(kernels: NativeKernels) -> None:
    """A number that is summed up already counts no second time, and none is lost."""
    for depth in (5, 16, 21, 37):
        x, weight = torch.ones(1, depth), torch.ones(6, depth)
        weight[0, 0], weight[1, -1], weight[2, depth // 2] = torch.inf, -torch.inf, torch.nan
        found = product(kernels, x, weight, None)
        torch.testing.assert_close(found, F.linear(x, weight), rtol=0, atol=0, equal_nan=True)


@needs_avx
def test_rows_and_threads_do_not_count(kernels: NativeKernels) -> None:
    x, weight = torch.randn(200, 300), torch.randn(170, 300)
    full = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(product(kernels, x, weight, None).clone())
    finally:
        torch.set_num_threads(full)
    assert torch.equal(*found)
    assert torch.equal(found[0][50:59], product(kernels, x[50:59], weight, None))
    few = product(kernels, x[:7], weight, None)
    assert torch.equal(few[3:5], product(kernels, x[3:5], weight, None))


class Layers(nn.Module):
    """Has rows of known width; a piece of a wider product is the operand of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 192), nn.Linear(64, 40, bias=False)
        self.odd = nn.Linear(40, 33)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.odd(self.narrow(self.wide(x.sin())[..., 64:128]))
        return found


@pytest.mark.skipif(not processor().has_bf16, reason="was measured with BF16 alone")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_in_a_program(dtype: torch.dtype, tmp_path: Any) -> None:
    """All sizes share a graph, calls are bound as kernels are, and weights are never stale."""
    torch.manual_seed(0)
    inputs = (torch.randn(2, rows, 64).to(dtype) for rows in (24, 9, 70, 24))
    module, bound = run_while_weights_change(Layers, dtype, inputs, tmp_path)
    assert linear_cpu.NAME in {choice.kernel for choice in bound.plan.choices.values()}
    assert strop.explain(module).num_graphs == 1


def test_choices() -> None:
    def chosen(rows: int, depth: int, columns: int, dtype: torch.dtype, isa: str = "") -> str:
        problem = Problem("linear", (), ((rows, depth), (columns, depth)), dtype)
        device = replace(MEASURED, isa=isa or MEASURED.isa)
        return library.select(problem.call, problem, device, ()).kernel

    for dtype in TYPES:
        assert chosen(768, 64, 64, dtype) == linear_cpu.NAME
        assert chosen(768, 64, 64, dtype, "neon") == "torch"  # was not measured
    for isa in ("avx2", "avx512"):  # which lack the instructions for bf16
        assert chosen(768, 64, 64, torch.float32, isa) == linear_cpu.NAME
        assert chosen(768, 64, 64, torch.bfloat16, isa) == "torch"
    for rows in (1, 2, 7):
        assert chosen(rows, 64, 64, torch.float32) == linear_cpu.NAME
        assert chosen(rows, 1280, 1280, torch.float32) == linear_cpu.NAME
    assert chosen(2, 64, 64, torch.bfloat16) == linear_cpu.NAME
    assert chosen(768, 65, 64, torch.bfloat16) != linear_cpu.NAME
    assert chosen(768, 64, 64, torch.float16) != linear_cpu.NAME


def test_reasons() -> None:
    problem = Problem("linear", (), ((8, 64), (64, 64)), torch.bfloat16)
    assert linear_cpu.supports(problem.call, MEASURED) == ""
    # artefacts for it are loaded where there is BF16, too; it is never chosen for less
    fewer = replace(CPU, isa="avx512")
    assert linear_cpu.supports(problem.call, fewer) == ""
    assert linear_cpu.cost_us(problem, fewer) == linear_cpu.NEVER
    assert "AVX2" in linear_cpu.supports(problem.call, CPU)
    assert "fp32 and bf16" in linear_cpu.supports(
        replace(problem, dtype=torch.float16).call, MEASURED
    )
    odd = replace(problem, shapes=((8, 63), (64, 63)))
    assert "even" in linear_cpu.supports(odd.call, MEASURED)
    empty = replace(problem, shapes=((0, 64), (64, 64)))
    assert linear_cpu.launch(empty, MEASURED) is None

"""Linear recurrences: the kernels for a CPU and for a GPU, against fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.ir.device import CPU
from strop.ir.linear_scan import STATES, linear_scan
from strop.kernels import library
from strop.kernels.kernel import Launch, Problem, Stride
from strop.kernels.scan import rows
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeKernels
from strop.testing import assert_as_accurate_as_eager
from tests.gpus import H100
from tests.kernels.launching import launched

SHAPES = [  # widths with registers of their own and others, one step, one lane, few of either
    *((2, 3, 7, 8), (1, 3, 12, 16), (2, 1, 9, 32), (2, 1, 3, 64), (3, 2, 33, 5), (1, 1, 6, 700)),
    *((1, 1, 4, 512), (1, 1, 1, 8), (4, 1, 1, 1), (3, 37, 11, 1), (1, 1, 40, 1), (600, 1, 130, 1)),
]
LAID = ["dense", "steps first", "apart", "shared"]
TYPES = list(STATES)


def operands(shape: tuple[int, ...], dtype: torch.dtype, laid: str = "dense") -> list[Tensor]:
    """Return a and b, which lie in memory so."""
    torch.manual_seed(sum(shape))
    found = [torch.rand(shape) * 1.1, torch.randn(shape)]
    return [lying(x.to(dtype), laid) for x in found]


def lying(x: Tensor, laid: str) -> Tensor:
    if laid == "steps first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if laid == "apart":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan, dtype=x.dtype)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    return x[:1].expand(x.shape) if laid == "shared" else x


def tree(a: Tensor, b: Tensor) -> Tensor:
    """Compute it as torch's generic scan does: what is rounded is one step of a tree."""
    step = 1
    while step < a.shape[2]:
        more = torch.addcmul(b[:, :, step:], a[:, :, step:], b[:, :, :-step])
        b = torch.cat([b[:, :, :step], more], 2)
        a = torch.cat([a[:, :, :step], a[:, :, step:] * a[:, :, :-step]], 2)
        step *= 2
    return b


def bound(problem: Problem, device: Any, tensors: list[Tensor]) -> tuple[Launch, list[int]]:
    choice = library.select(problem.call, problem, device)
    assert choice.launches is not None
    (part,) = choice.launches.parts
    assert isinstance(part, Launch)
    scalars = [
        tensors[s.operand].stride(s.dim) if isinstance(s, Stride) else int(s)  # type: ignore[arg-type]
        for s in part.scalars
    ]
    return part, scalars


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    return NativeKernels(DiskCache(tmp_path_factory.mktemp("kernels")))


def on_cpu(kernels: NativeKernels, a: Tensor, b: Tensor, laid: str = "dense") -> Tensor:
    out = lying(torch.full(b.shape, torch.nan, dtype=b.dtype), laid)
    tensors = [a, b, out]
    problem = Problem(rows.OP, (), (tuple(a.shape), tuple(b.shape)), b.dtype)
    part, scalars = bound(problem, CPU, tensors)
    kernels.build([part.source])[part.source].bind([t.data_ptr() for t in tensors], scalars)()
    return out


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_a_cpu(kernels: NativeKernels, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for laid in LAID:
        a, b = operands(shape, dtype, laid)
        exact = linear_scan(a.double(), b.double())
        found = on_cpu(kernels, a, b, "dense" if laid == "shared" else laid)
        assert_as_accurate_as_eager(found, tree(a, b), exact)
        torch.testing.assert_close(linear_scan(a, b), found)


def test_slow_decays_are_as_accurate_as_a_tree(kernels: NativeKernels) -> None:
    """A plain walk in fp32 would round as often as there are steps."""
    torch.manual_seed(0)
    a, b = torch.full((2, 2, 4096, 8), 1 - 1e-7), torch.rand(2, 2, 4096, 8)
    exact = linear_scan(a.double(), b.double())
    assert_as_accurate_as_eager(on_cpu(kernels, a, b), tree(a, b), exact)


def test_what_is_not_finite_begins_where_it_is(kernels: NativeKernels) -> None:
    """The first factor is multiplied with nothing, and neighbours stay as they are."""
    a, b = torch.ones(1, 1, 5, 8), torch.ones(1, 1, 5, 8)
    a[0, 0, 0], b[0, 0, 2, 3], a[0, 0, 3, 4] = torch.nan, torch.inf, torch.nan
    found = on_cpu(kernels, a, b)
    wanted = torch.arange(1.0, 6)[:, None].expand(1, 1, 5, 8).clone()
    wanted[0, 0, 2:, 3], wanted[0, 0, 3:, 4] = torch.inf, torch.nan
    assert torch.equal(found.nan_to_num(-1), wanted.nan_to_num(-1))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("laid", LAID)
def test_on_a_gpu_in_the_interpreter(laid: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from tests.kernels.interpreted import Interpreted

    for shape in ((2, 3, 7, 8), (3, 1, 12, 16), (1, 2, 9, 33), (4, 2, 1, 3), (7, 10, 18, 1)):
        kernels = Interpreted()
        a, b = (kernels.known(x) for x in operands(shape, dtype, laid))
        out = kernels.known(torch.full(shape, torch.nan, dtype=dtype))
        problem = Problem(rows.OP, (), (shape, shape), dtype)
        choice = library.select(problem.call, problem, H100)
        assert choice.launches is not None
        assert launched(choice.launches, kernels).run([a, b], out)
        assert kernels.ran == [rows.ON_GPU]
        exact = linear_scan(a.double(), b.double())
        assert_as_accurate_as_eager(out, tree(a, b), exact)


def test_nothing_is_launched_for_nothing() -> None:
    for shape in ((0, 2, 3, 4), (2, 1, 3, 0)):
        problem = Problem(rows.OP, (), (shape, shape), torch.float32)
        assert library.select(problem.call, problem, CPU) == library.TORCH
        assert library.select(problem.call, problem, H100).kernel == "torch_steps"
        empty = torch.empty(shape)
        assert linear_scan(empty, empty).shape == shape


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_compiles(dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from tests.codegen.test_triton_compile import compiled, resources

    assert resources(compiled(rows.on_gpu(dtype), 90), tmp_path)[1] == 0  # nothing spilled
    for arch in (80, 89, 120):
        assert compiled(rows.on_gpu(dtype), arch).shared == 0

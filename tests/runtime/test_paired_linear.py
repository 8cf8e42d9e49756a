"""A linear whose sum goes on over the factors of adapters: by the kernel, and by a library."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.ir.contractions import PAIRED
from strop.ir.device import Device
from strop.ir.dims import const
from strop.ir.program import CallStep, TensorRef
from strop.kernels.gemm import rows as products
from strop.kernels.kernel import RESULT, Late, Launch, Problem, Torch
from strop.kernels.library import Choice, select
from strop.kernels.ptx import KINDS
from strop.runtime.build.loader import kernel_loader
from strop.runtime.run.library_calls import CUDA_PLANNED_OUT
from strop.runtime.run.link import early_weights
from strop.testing import assert_as_accurate_as_eager
from tests.gpus import A100, H100
from tests.kernels.launching import call as asked_for
from tests.kernels.launching import launched, problem, refuse
from tests.runtime.test_wgmma_gemm import (
    BOUND,
    HALF,
    call,
    error,
    launches_of,
    needs_a_gpu,
    small,
    weights,
)

OPS = tuple(PAIRED.values())


def exact(op: str, inputs: Sequence[Tensor]) -> Tensor:
    """In the precision of the operands; in theirs, each product is rounded, as in eager."""
    x, w, low, up, *more = inputs
    *addend, bias = more or [None]
    found = F.linear(x, w, bias) + F.linear(low, up)
    if op == PAIRED["geglu"]:
        value, gate = found.chunk(2, -1)
        return value * F.gelu(gate)
    return found + addend[0] if addend else found


def given(
    op: str, rows: int, columns: int, depth: int, rank: int, *, gap: int = 0
) -> tuple[list[Tensor], Tensor]:
    """Operands, and where the result goes. With a gap, low is a piece of what is wider."""
    torch.manual_seed(rows + columns)
    own = 2 * columns if op == PAIRED["geglu"] else columns
    low = torch.randn(rows, rank + gap).to(HALF)[:, gap // 2 : gap // 2 + rank]
    inputs = [torch.randn(rows, depth).to(HALF), weights(own, depth), low, weights(own, rank)]
    if op == PAIRED["linear_add"]:
        inputs.append(torch.randn(rows, columns).to(HALF))
    if op != PAIRED["linear"]:
        inputs.append(torch.randn(own).to(HALF))
    return inputs, torch.full((rows, columns), math.nan, dtype=HALF)


@pytest.mark.parametrize("gap", [0, 32])
@pytest.mark.parametrize("op", OPS)
def test_by_the_kernel(op: str, gap: int) -> None:
    """In the machine for PTX; rows are odd, and leave the boxes."""
    inputs, out = given(op, 75, 160, 136, 48, gap=gap)
    machine = call(op, inputs, out)
    assert error(out, exact(op, [t.double() for t in inputs])) < BOUND
    assert "further" in machine.launched[0][0].text


@pytest.mark.parametrize("op", OPS)
def test_by_a_library(op: str) -> None:
    """Two products, of which the second is added to the first."""
    inputs, out = given(op, 75, 160, 136, 48, gap=16)
    CUDA_PLANNED_OUT[op]({})(inputs, out)
    truth = exact(op, [t.double() for t in inputs])
    assert_as_accurate_as_eager(out, exact(op, inputs), truth)


def test_a_library_adds_over_the_addend() -> None:
    inputs, _ = given(PAIRED["linear_add"], 20, 48, 32, 16)
    *inputs, addend, _ = inputs
    truth = exact(PAIRED["linear"], [t.double() for t in inputs]) + addend.double()
    out = addend.clone()
    CUDA_PLANNED_OUT[PAIRED["linear_add"]]({})((*inputs, out), out)
    assert error(out, truth) < 2 * BOUND
    other = torch.full_like(out, math.nan)
    CUDA_PLANNED_OUT[PAIRED["linear_add"]]({})((*inputs, addend), other)
    assert torch.equal(out, other)


@pytest.mark.parametrize("op", OPS)
def test_what_is_launched(op: str) -> None:
    inputs, _ = given(op, 256, 640, 640, 32)
    launches = products.ROW.launch(of(op, inputs), H100)
    assert launches is not None
    *before, part = launches.parts
    assert isinstance(part, Launch)
    biases = {PAIRED["linear"]: 1, PAIRED["geglu"]: 4, PAIRED["linear_add"]: 5}[op]
    assert [operand.number for operand in part.operands] == [0, 1, 2, 3, RESULT, biases]
    assert part.scalars[6] is Late.WEIGHTS
    assert all(isinstance(each, Torch) for each in before)
    assert [o.number for each in before for o in each.operands] == ([4, RESULT] if before else [])
    assert bool(before) == (op == PAIRED["linear_add"])
    rows = [("r", *t.shape[1:]) if len(t) == 256 else t.shape for t in inputs]
    assert set(launches.sources) <= set(products.ROW.forms(asked_for(op, *rows), H100))


def of(op: str, inputs: Sequence[Tensor]) -> Problem:
    return problem(op, *(t.shape for t in inputs), dtype=inputs[0].dtype)


def chosen(op: str, sizes: Sequence[int], device: Device, dtype: torch.dtype = HALF) -> Choice:
    rows, columns, depth, rank = sizes
    own = 2 * columns if op == PAIRED["geglu"] else columns
    more = {PAIRED["linear_add"]: ((rows, columns), (own,)), PAIRED["geglu"]: ((own,),)}
    shapes = (rows, depth), (own, depth), (rows, rank), (own, rank)
    asked = problem(op, *shapes, *more.get(op, ()), dtype=dtype)
    return select(asked.call, asked, device)


SIZES = ((2048, 1280, 1280, 32), (8192, 640, 640, 64), (2048, 640, 2560, 16), (301, 648, 200, 128))


@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_who_does_it(op: str, sizes: tuple[int, ...]) -> None:
    """On older GPUs the library, which multiplies twice. It takes longer on an H100, too."""
    choice = chosen(op, sizes, H100)
    assert choice.kernel == "wgmma_gemm"
    theirs = {PAIRED["geglu"]: "geglu"}.get(op, "cublas")
    assert choice.cost_us < dict(choice.beaten)[theirs]
    assert chosen(op, sizes, A100).kernel == theirs
    plain = next(name for name, paired in PAIRED.items() if paired == op)
    assert choice.cost_us < 1.2 * _plain_us(plain, sizes)


def _plain_us(op: str, sizes: Sequence[int]) -> float:
    rows, columns, depth, _ = sizes
    own = 2 * columns if op == "geglu" else columns
    more = {"linear_add": ((rows, columns), (own,)), "geglu": ((own,),)}.get(op, ())
    return products.ROW.cost_us(problem(op, (rows, depth), (own, depth), *more), H100)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ((("r", 640), (640, 640), ("r", 20), (640, 20)), "goes on over multiples of 8 channels"),
        ((("r", 640), (640, 640), ("r", "k"), (640, "k")), "wants weights of a known size"),
        ((("r", 640), (640, 640), ("r", 16), (640, 16), (640,)), "takes 4 operands"),
    ],
)
def test_what_the_kernel_refuses(shapes: Sequence[Sequence[int | str]], reason: str) -> None:
    asked = asked_for(PAIRED["linear"], *shapes)
    assert reason in products.supports(asked, H100)
    assert "WGMMA" in products.supports(asked, A100)


def test_gates_behind_two_products_of_a_library() -> None:
    inputs, _ = given(PAIRED["geglu"], 64, 160, 128, 32)
    choice = select(of(PAIRED["geglu"], inputs).call, of(PAIRED["geglu"], inputs), A100)
    assert choice.launches is not None
    linear, further, gates = choice.launches.parts
    assert isinstance(linear, Torch)
    assert isinstance(further, Torch)
    assert (linear.name, further.name) == ("linear", "further linear")
    assert [o.number for o in further.operands[:2]] == [2, 3]
    assert isinstance(gates, Launch)
    assert [o.number for o in gates.operands[1:]] == [4, RESULT]


def test_both_weights_are_read_early() -> None:
    """Unless a kernel before it may write one of them."""
    size = (const(16),)
    refs = [TensorRef(number, const(0), size * 2, size * 2) for number in range(6)]
    for op, wanted in ((PAIRED["linear_add"], [1, 3]), ("linear_add", [1]), ("conv2d", [1])):
        assert early_weights(CallStep(op, tuple(refs), (), (7,), "")) == wanted


def small_tile_can(op: str, inputs: Sequence[Tensor]) -> bool:
    asked = of(op, inputs)
    return products.is_able(small(asked).product, products.picture_of(asked))


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_on_a_gpu(op: str, dtype: torch.dtype) -> None:
    """By what is chosen, and by the small tile where that can; against fp64."""
    kernels = kernel_loader("cuda", torch.cuda.current_device(), "", 0)
    stream = torch.cuda.current_stream().cuda_stream
    for sizes in SIZES:
        inputs, out = given(op, *sizes, gap=32)
        inputs, out = [t.to("cuda", dtype) for t in inputs], out.to("cuda", dtype)
        inputs[2] = F.pad(inputs[2], (8, 24))[:, 8 : 8 + sizes[3]]
        launches = chosen(op, sizes, kernels.device, dtype).launches
        if sizes in SIZES[:3]:
            assert launches is not None
            assert [source.name for source in launches.sources] == ["wgmma_gemm"]
        truth = exact(op, [t.double() for t in inputs])
        by_small = launches_of(op, inputs) if small_tile_can(op, inputs) else None
        for by in (launches, by_small):
            for is_steady in (True, False) if by else ():
                ready = launched(by, kernels, stream, is_early=True, is_steady=is_steady)
                ready.writing(refuse)(inputs, out.fill_(math.nan))
                assert_as_accurate_as_eager(out, exact(op, inputs), truth)
        CUDA_PLANNED_OUT[op]({})(inputs, out.fill_(math.nan))
        assert_as_accurate_as_eager(out, exact(op, inputs), truth)

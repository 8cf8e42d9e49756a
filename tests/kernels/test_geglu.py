"""A linear and its gates behind a library's GEMM: in the interpreter, the compiler, and whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.ir.contractions import GATE_OPS, GELU, GELU_TANH, SILU, Gate
from strop.ir.device import CPU, Device
from strop.kernels import library
from strop.kernels.gemm.geglu import HALVES, MOST_NUMBERS, ROW, geglu
from strop.kernels.kernel import NEVER, Call, Launch, PartScratch, Torch
from strop.options import Options
from strop.runtime.run.library_calls import CUDA_PLANNED_OUT
from strop.testing import assert_as_accurate_as_eager
from tests.codegen.test_triton_compile import compiled, resources
from tests.gpus import A100, H100, RTX_5090
from tests.kernels.interpreted import Interpreted
from tests.kernels.launching import call, launched, problem

pytest.importorskip("triton")

LIBRARY: Any = CUDA_PLANNED_OUT["geglu"]({})
DEVICES = (A100, H100, RTX_5090)
GEGLU = Gate()


def operands(
    rows: int, depth: int, width: int, *, has_bias: bool = True, dtype: torch.dtype = torch.float16
) -> list[Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, depth), torch.randn(2 * width, depth) * depth**-0.5
    found = [x, weight, torch.randn(2 * width)]
    return [t.to(dtype) for t in found[: 2 + has_bias]]


def run(
    inputs: Sequence[Tensor], out: Tensor | None = None, gate: Gate = GEGLU
) -> tuple[Tensor, Interpreted]:
    kernels = Interpreted()
    x, weight = inputs[:2]
    if out is None:
        out = torch.full((len(x), len(weight) // 2), float("nan"), dtype=x.dtype)
    for tensor in (*inputs, out):
        kernels.known(tensor)
    asked = problem("geglu", *(t.shape for t in inputs), dtype=x.dtype, **gate.attrs)
    found = launched(ROW.launch(asked, H100), kernels, is_early=True)
    found.writing(CUDA_PLANNED_OUT["geglu"](gate.attrs))(inputs, out)
    return out, kernels


def truth_of(inputs: Sequence[Tensor], gate: Gate = GEGLU) -> Tensor:
    value, gates = F.linear(*(t.double() for t in inputs)).chunk(2, -1)
    value, gates = (gates, value) if gate.is_first else (value, gates)
    activated = {
        GELU: F.gelu(gates),
        GELU_TANH: F.gelu(gates, approximate="tanh"),
        SILU: F.silu(gates),
    }
    return value * activated[gate.activation]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [64, 45])  # the last block leaves the tensor
def test_as_accurate_as_torch(rows: int, has_bias: bool) -> None:
    inputs = operands(rows, 128, 64, has_bias=has_bias)
    found, kernels = run(inputs)
    eager = torch.empty_like(found)
    LIBRARY(inputs, eager)
    assert_as_accurate_as_eager(found, eager, truth_of(inputs))
    assert kernels.ran == ["geglu"]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", ""])
@pytest.mark.parametrize("activation", GATE_OPS)
def test_other_gates(activation: str, is_first: bool, has_bias: bool) -> None:
    gate = Gate(activation, is_first)
    inputs = operands(45, 128, 64, has_bias=has_bias, dtype=torch.bfloat16)
    found, kernels = run(inputs, gate=gate)
    eager = torch.empty_like(found)
    CUDA_PLANNED_OUT["geglu"](gate.attrs)(inputs, eager)
    assert_as_accurate_as_eager(found, eager, truth_of(inputs, gate))
    assert kernels.ran == ["geglu"]


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_few_rows_are_read_as_fast_as_their_weights_come(rows: int) -> None:
    gate = Gate(SILU, True)
    inputs = operands(rows, 256, 64, has_bias=False)
    found, kernels = run(inputs, gate=gate)
    eager = torch.empty_like(found)
    CUDA_PLANNED_OUT["geglu"](gate.attrs)(inputs, eager)
    assert_as_accurate_as_eager(found, eager, truth_of(inputs, gate))
    assert kernels.ran == ["skinny_gemm", "geglu"]


def test_gates_wait_for_the_product() -> None:
    """A library's GEMM is the launch before, and lets nobody begin while it runs."""
    assert run(operands(16, 64, 32))[1].early == [False]


@pytest.mark.parametrize("gate", [*map(Gate, GATE_OPS), Gate(SILU, True)], ids=str)
def test_extremes(gate: Gate) -> None:
    x, weight, bias = operands(32, 64, 32)
    bias[:8] = torch.tensor([1e4, -1e4, 6e4, -6e4, 0, torch.inf, -torch.inf, torch.nan])
    bias[32:40] = torch.tensor([torch.inf, -torch.inf, torch.nan, 6e4, -6e4, 1, 1, 1])
    found, _ = run([x, weight, bias], gate=gate)
    truth = truth_of([x, weight, bias], gate).half()
    assert torch.equal(found.isnan(), truth.isnan())
    assert torch.equal(found.isinf(), truth.isinf())


def test_rows_may_lie_anyhow() -> None:
    """The library's GEMM reads them."""
    x, weight, bias = operands(64, 128, 64)
    wanted, _ = run([x, weight, bias])
    for odd in (torch.stack((x, x), 1)[:, 0], x.t().contiguous().t()):
        found, kernels = run([odd, weight, bias])
        assert kernels.ran == ["geglu"]
        assert_as_accurate_as_eager(found, wanted, truth_of([x, weight, bias]))


@pytest.mark.parametrize("which", ["weight", "bias", "result"])
def test_torch_does_what_lies_otherwise(which: str) -> None:
    x, weight, bias = operands(64, 128, 64)
    weight = weight.t().contiguous().t() if which == "weight" else weight
    bias = torch.stack((bias, bias), 1)[:, 0] if which == "bias" else bias
    out = torch.full((64, 64), float("nan"), dtype=x.dtype)
    found, kernels = run([x, weight, bias], out.t() if which == "result" else out)
    assert not kernels.ran
    assert_as_accurate_as_eager(found, found, truth_of([x, weight, bias]))


def test_what_is_launched() -> None:
    """The product, twice as wide as the result, lies in working memory."""
    launches = ROW.launch(problem("geglu", (100, 320), (2560, 320), (2560,)), H100)
    assert launches is not None
    product, gates = launches.parts
    assert isinstance(product, Torch)
    assert isinstance(gates, Launch)
    assert product.operands[-1] == gates.operands[0]
    assert launches.scratch == (PartScratch((100, 2560), torch.float16),)
    assert gates.scalars == (100 * 1280,)
    assert launches.sources == (geglu(1280, torch.float16, has_bias=True),)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (call("geglu", ("r", 320), (2560, 320), (2560,)), ""),
        (call("geglu", ("r", 320), (2560, 320)), ""),
        (call("geglu", ("r", 320), (2560, 320), dtype=torch.bfloat16), ""),
        (call("geglu", ("r", 320), (2560, 320), dtype=torch.float32), "computes fp16 and bf16"),
        (call("geglu", ("r", 320), (2576, 320)), "multiples of 16"),
        (call("geglu", ("r", 320), ("n", 320)), "weights of a known size"),
    ],
)
def test_which_calls(given: Call, reason: str) -> None:
    for device in DEVICES:
        found = ROW.supports(given, device)
        assert reason in found
        assert bool(reason) == bool(found)
    assert ROW.supports(given, CPU) == "runs on GPUs"


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("has_bias", [True, False])
def test_it_runs_anywhere_and_is_known_before(has_bias: bool, device: Device) -> None:
    """Where one kernel is the faster one, it does what that leaves, and torch is never faster."""
    more = ((2560,),) if has_bias else ()
    asked = call("geglu", ("r", 320), (2560, 320), *more)
    *products, gates = ROW.forms(asked, device)
    assert gates == geglu(1280, torch.float16, has_bias=has_bias)
    assert {source.name for source in products} == (set() if has_bias else {"skinny_gemm"})
    for rows in (2, 77, 8192):
        choice = library.select(asked, asked.at({"r": rows}), device, ("wgmma_gemm",))
        assert choice.kernel == "geglu"
        assert choice.cost_us < dict(choice.beaten)["cublas_and_torch"]
        assert choice.sources[-1:] == (geglu(1280, torch.float16, has_bias=has_bias),)
    one = library.select(asked, asked.at({"r": 8192}), device)
    assert one.kernel == ("wgmma_gemm" if device is H100 else "geglu")


def test_too_many_numbers_are_for_the_library() -> None:
    rows = MOST_NUMBERS // 2560
    asked = problem("geglu", (rows + 1, 320), (2560, 320))
    assert ROW.cost_us(asked, A100) == NEVER
    assert library.select(asked.call, asked, A100).kernel == "cublas_and_torch"
    assert ROW.cost_us(problem("geglu", (rows - 1, 320), (2560, 320)), A100) < NEVER


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_compiles(has_bias: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    for arch in (80, 90, 120):
        built = compiled(geglu(1280, dtype, has_bias=has_bias), arch)
        assert built.early == (arch >= 90)
        if arch < 100:
            assert resources(built, tmp_path)[1] == 0  # nothing spilled


class FeedForward(nn.Module):
    def __init__(self, depth: int = 320, width: int = 1280) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(depth, 2 * width), nn.Linear(width, depth)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.first(x).chunk(2, dim=-1)
        return self.last(value * F.gelu(gate))


class Swish(nn.Module):
    """The feed-forward layer of Qwen and Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(320, 1280, bias=False)
        self.up = nn.Linear(320, 1280, bias=False)
        self.down = nn.Linear(1280, 320, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Tanh(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.first(x).chunk(2, dim=-1)
        return self.last(F.gelu(gate, approximate="tanh") * value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", [FeedForward, Tanh, Swish])
def test_on_a_gpu(kind: type[nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = kind().cuda().to(dtype).eval().requires_grad_(False)
    exact = kind().cuda().double()
    exact.load_state_dict(module.state_dict())
    inputs = [
        torch.randn(b, rows, 320, device="cuda", dtype=dtype)
        for b, rows in ((4, 4096), (1, 100), (5, 4095), (3, 7), (1, 2))
    ]
    with torch.no_grad():
        wanted = [(module(x), exact(x.double())) for x in inputs]
        for off in ((), ("geglu",), ("wgmma_gemm",)):
            options = Options(strict=True, kernels_off=off)
            strop.optimize(module, options=options)
            for x, (eager, truth) in zip(inputs, wanted, strict=True):
                for _ in range(3):  # step by step, captured, replayed
                    assert_as_accurate_as_eager(module(x), eager, truth)
            strop.restore(module)

"""Products of e4m3 codes: one call each, which reads bytes and writes where it is told."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import strop
from strop.ir.eight_bit import FORMATS
from strop.options import Options
from strop.runtime.run import scaled_calls
from tests.frontend.tracing import Function
from tests.passes.test_eight_bit import TOKENS, planned
from tests.quantised.small_models import Net

FP8 = FORMATS["fp8"]


class Operators(TorchDispatchMode):
    """Counts what torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operands(dtype: torch.dtype, *, bias: bool = True) -> tuple[list[Tensor], Tensor]:
    """Operands as a kernel and the runtime leave them, and the result in fp64."""
    source = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, 64, generator=source) for n in (20, 32))
    (codes, rows), (others, columns) = FP8.quantised(x), FP8.quantised(weight)
    added = [torch.randn(32, generator=source).to(dtype)] if bias else []
    wanted = (codes.double() @ others.double().t()) * rows[:, None] * columns
    wanted = wanted + added[0].double() if added else wanted
    return [codes.view(torch.uint8), others, rows[:, None], columns[None], *added], wanted


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_call_is_one_operator_that_writes_where_it_is_told(dtype, bias, monkeypatch):
    monkeypatch.setattr(scaled_calls, "_is_cublas", lambda device: True)
    given, wanted = operands(dtype, bias=bias)
    for make in (scaled_calls.on_cpu, scaled_calls.on_gpu):
        out = torch.full((20, 32), float("nan"), dtype=dtype)
        with Operators() as ran:
            make({"is_fast": False})(given, out)
        views = {"aten.view.dtype", "aten.t.default", "aten.detach.default"}
        assert {name: n for name, n in ran.calls.items() if name not in views} == {
            "aten._scaled_mm.out": 1
        }
        error = (out.double() - wanted).abs() / wanted.abs().clamp_min(1)
        assert error.max() < torch.finfo(dtype).eps


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_fp16_by_cutlass_is_rounded_to_bf16_first(bias, monkeypatch):
    monkeypatch.setattr(scaled_calls, "_is_cublas", lambda device: False)
    given, wanted = operands(torch.float16, bias=bias)
    out = torch.empty(20, 32, dtype=torch.float16)
    scaled_calls.on_gpu({"is_fast": False})(given, out)
    error = (out.double() - wanted).abs() / wanted.abs().clamp_min(4)
    assert torch.finfo(torch.float16).eps < error.max() < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("version", ["12.8", "12.9", "13.0", None])
@pytest.mark.parametrize("major", [8, 9, 10])
def test_who_multiplies_by_rows(version, major, monkeypatch):
    scaled_calls._is_cublas.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    is_cublas = scaled_calls._is_cublas(torch.device("cuda", 0))
    assert is_cublas == (major == 9 and version in ("12.9", "13.0"))
    scaled_calls._is_cublas.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_values_on_a_gpu(dtype, bias):
    """Shorter sums of tensor cores are promoted: they may be off by a few units of fp16."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products of fp8")
    scaled_calls._is_cublas.cache_clear()
    given, wanted = operands(dtype, bias=bias)
    out = torch.full((20, 32), float("nan"), dtype=dtype, device="cuda")
    scaled_calls.on_gpu({"is_fast": False})([t.cuda() for t in given], out)
    error = (out.cpu().double() - wanted).abs() / wanted.abs().clamp_min(4)
    is_once = dtype is torch.float16 and scaled_calls._is_cublas(out.device)
    assert error.max() < (2e-3 if is_once else 6e-3)


def test_a_plan_for_a_gpu_has_no_copy_for_a_product():
    program = planned(Net(128), TOKENS, "fp8", torch.float16).program
    calls = [step for step in program.call_steps if step.op == "scaled_product"]
    assert len(calls) == 8
    assert not any(step.op == "aten" for step in program.call_steps)
    for step in calls:
        buffers = [program.buffers[ref.buffer] for ref in step.inputs]
        assert buffers[0].dtype is torch.uint8, "as the kernel stores them"
        assert program.buffers[step.outputs[0]].kind == "arena"
        assert program.buffers[step.outputs[0]].dtype is torch.float16
    assert sum(len(step.inputs) == 5 for step in calls) == 6, "all but the layers without a bias"


def product(x: Tensor, weight: Tensor, columns: Tensor, **more: Any) -> Tensor:
    flat = x.reshape(-1, 16)
    codes, rows = (flat * 2).to(torch.float8_e4m3fn), flat[:, :1].abs() + 1
    turned = weight.to(torch.float8_e4m3fn).t()
    return torch._scaled_mm(codes, turned, rows, columns, **more)


OF_USERS = {
    "by rows": {"out_dtype": torch.bfloat16},
    "fast": {"out_dtype": torch.float16, "use_fast_accum": True},
    "wide": {"out_dtype": torch.float32},
}


@pytest.mark.parametrize("more", OF_USERS.values(), ids=OF_USERS)
def test_products_of_users(more, tmp_path):
    eager, module = (Function(lambda *args: product(*args, **more)).eval() for _ in range(2))
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    weight, columns = torch.randn(32, 16), torch.rand(1, 32)
    for count in (8, 16):
        given = torch.randn(2, count, 16), weight, columns
        assert torch.equal(module(*given), eager(*given))
    assert strop.explain(module).calls == {"scaled_product": 1}


def test_what_has_another_type_stays_with_torch(tmp_path):
    def by_e5m2(x: Tensor, weight: Tensor, one: Tensor) -> Tensor:
        codes, turned = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e5m2).t()
        return torch._scaled_mm(codes, turned, one, one, out_dtype=torch.bfloat16)

    eager, module = (Function(by_e5m2).eval() for _ in range(2))
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    given = torch.randn(16, 16), torch.randn(32, 16), torch.ones(())
    assert torch.equal(module(*given), eager(*given))
    assert strop.explain(module).calls["aten._scaled_mm.default"] == 1

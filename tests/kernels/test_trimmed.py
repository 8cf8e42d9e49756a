"""Some columns of a product, for some rows at a time: in the interpreter and the compiler."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import strop
from strop.ir.device import CPU, Device
from strop.kernels import library
from strop.kernels.gemm import trimmed
from strop.kernels.kernel import NEVER, RESULT, Launch, Operand, Torch, View, scratch
from strop.runtime.run.launched_calls import scratch_bytes
from strop.runtime.run.library_calls import CUDA_PLANNED_OUT
from strop.testing import assert_as_accurate_as_eager
from tests.codegen.test_triton_compile import compiled, resources
from tests.gpus import A100, H100, RTX_5090
from tests.kernels.interpreted import Interpreted
from tests.kernels.launching import call, launched, problem, refuse

pytest.importorskip("triton")
F16, BF16 = torch.float16, torch.bfloat16
WORDS, WIDE = 50257, 50264  # of GPT-2
GPUS = (A100, H100, RTX_5090)


def asked(rows: int, columns: int = WORDS, wide: int = WIDE, dtype: torch.dtype = F16) -> Any:
    return problem(trimmed.OP, (rows, 768), (wide, 768), dtype=dtype, columns=columns)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(("rows", "parts"), [(24, 1), (33, 3), (48, 3), (50, 4)])
def test_values(rows: int, parts: int, dtype: torch.dtype, monkeypatch: Any) -> None:
    """By the library's product, whose numbers of a row do not depend on other rows' here."""
    columns, wide = 131, 136
    monkeypatch.setattr(trimmed, "UNIT", 8)
    monkeypatch.setattr(trimmed, "MOST_BYTES", 16 * wide * 2 if parts > 1 else 1 << 20)
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 768).to(dtype), torch.zeros(wide, 768, dtype=dtype)
    weight[:columns] = torch.randn(columns, 768) * 768**-0.5
    weight[columns:] = math.nan  # nobody reads what they come to
    out, kernels = torch.full((rows, columns), math.nan, dtype=dtype), Interpreted(A100)
    for tensor in (x, weight, out):
        kernels.known(tensor)
    found = trimmed.ROW.launch(asked(rows, columns, wide, dtype), A100)
    launched(found, kernels, is_early=True).writing(refuse)((x, weight), out)
    assert kernels.ran == ["trimmed"] * parts
    some = weight[:columns]
    assert_as_accurate_as_eager(out, F.linear(x, some), F.linear(x.double(), some.double()))


def test_few_rows_are_written_where_they_belong() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 768).half(), torch.randn(136, 768).half()
    out, kernels = torch.full((2, 131), math.nan, dtype=F16), Interpreted()
    for tensor in (x, weight, out):
        kernels.known(tensor)
    found = launched(trimmed.ROW.launch(asked(2, 131, 136), H100), kernels)
    found.writing(refuse)((x, weight), out)
    assert kernels.ran == ["skinny_gemm"]
    exact = F.linear(x.double(), weight[:131].double())
    assert_as_accurate_as_eager(out, F.linear(x, weight[:131]), exact)


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
@pytest.mark.parametrize("rows", [32, 512, 4096, 16384, 5000, 200_000])
def test_each_row_is_multiplied_once_in_little_memory(
    rows: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trimmed, "_whole", lambda *_: (None, NEVER))  # what stores rows itself
    found = trimmed.ROW.launch(asked(rows), device)
    assert found is not None
    products, copies = found.parts[::2], found.parts[1::2]
    begin = 0
    for product, copy in zip(products, copies, strict=True):
        ((_, at, count),) = product.operands[0].piece
        assert at == begin
        assert product.operands[0].number == 0
        assert isinstance(copy, Launch)
        assert copy.scalars == (count, WORDS, WIDE)
        assert copy.operands[1].piece == ((0, begin, count),)
        assert begin * WORDS * 2 % 16 == 0, "where the kernel's pointer may begin"
        to = product.operands[2]
        assert to.number == copy.operands[0].number == scratch(0)
        assert to.shape == copy.operands[0].shape == (count, WIDE)
        assert RESULT not in [operand.number for operand in product.operands]
        assert isinstance(product, Torch) or device is H100
        begin += count
    assert begin == rows
    whole = rows * WIDE * 2
    assert scratch_bytes(found) <= max(trimmed.MOST_BYTES, whole / 60)
    assert set(found.sources) <= set(trimmed.ROW.forms(given(), device))


def given() -> Any:
    return call(trimmed.OP, ("n", 768), (WIDE, 768), columns=WORDS)


@pytest.mark.parametrize("rows", [512, 4096, 16384])
def test_a_product_of_ours_stores_dense_rows_on_hopper(rows: int) -> None:
    found = trimmed.ROW.launch(asked(rows), H100)
    assert not scratch_bytes(found)
    (only,) = found.parts
    assert isinstance(only, Launch)
    assert only.source.name == "wgmma_gemm"
    assert only.operands[1].piece == ((0, 0, WORDS),)
    assert only.operands[1].view == View((WORDS, 768), (768, 1))
    assert only.operands[2] == Operand(RESULT)
    assert only.source in trimmed.ROW.forms(given(), H100)


def test_what_has_too_many_numbers_or_no_whole_lines_goes_in_parts() -> None:
    many = trimmed.ROW.launch(asked(50_000), H100)
    assert len(many.parts) > 1
    odd = problem(trimmed.OP, (512, 772), (WIDE, 772), columns=WORDS)
    assert len(trimmed.ROW.launch(odd, H100).parts) > 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(130, 131), (512, 50257), (1025, 3001)])
def test_a_gpu_computes_it(rows: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    layer = torch.nn.Linear(768, columns, bias=False, device="cuda", dtype=dtype)
    layer.requires_grad_(False)
    x = torch.randn(1, rows, 768, device="cuda", dtype=dtype)
    eager, exact = layer(x), F.linear(x.double(), layer.weight.double())
    module = strop.optimize(torch.nn.Sequential(layer))
    for _ in range(3):
        found = module(x)
        assert found.is_contiguous()
        assert_as_accurate_as_eager(found, eager, exact)


@pytest.mark.parametrize("rows", [1, 8, 512, 16384])
@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_it_is_chosen(rows: int, device: Device) -> None:
    """And is expected to take a third longer than the product alone at most."""
    at = asked(rows)
    choice = library.select(given(), at, device)
    assert choice.kernel == trimmed.OP
    alone = problem("linear", (rows, 768), (WIDE, 768))
    assert choice.cost_us < 1.6 * library.select(alone.call, alone, device).cost_us + 5


def test_what_it_serves() -> None:
    assert trimmed.ROW.supports(given(), H100) == ""
    assert "GPUs" in trimmed.ROW.supports(given(), CPU)
    wide = call(trimmed.OP, ("n", 768), (WIDE, 768), dtype=torch.float32, columns=WORDS)
    assert "fp16 or bf16" in trimmed.ROW.supports(wide, H100)
    unknown = call(trimmed.OP, ("n", 768), ("m", 768), columns=WORDS)
    assert "a known size" in trimmed.ROW.supports(unknown, H100)
    assert trimmed.ROW.cost_us(asked(0), H100) == NEVER


def test_the_library_does_the_same() -> None:
    torch.manual_seed(0)
    x, weight, out = torch.randn(3, 64), torch.randn(16, 64), torch.empty(3, 13)
    CUDA_PLANNED_OUT[trimmed.OP]({"columns": 13})((x, weight), out)
    assert torch.equal(out, F.linear(x, weight)[:, :13])


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_it_compiles(arch: int, tmp_path: Path) -> None:
    built = compiled(trimmed.trimmed(F16), arch)
    assert built.early == (arch >= 90)
    if arch < 100:
        assert resources(built, tmp_path)[1] == 0  # nothing spilled

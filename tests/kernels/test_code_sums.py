"""Sums of products of int8 codes, exact by each kind of vectors this machine has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.ir import code_panel
from strop.ir.device import CPU
from strop.ir.source import KernelSource
from strop.kernels import library
from strop.kernels.gemm import code_sums
from strop.kernels.kernel import NEVER
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeFunction, NativeKernels
from strop.runtime.build.processors import processor
from tests.gpus import H100
from tests.kernels.launching import call, launched, problem, refuse

# A form of the kernel -> the target that it is compiled for, and what is put before its text.
WITHOUT_VNNI = "#define STROP_WITHOUT_VNNI\n"
FORMS = {
    "vnni": ("cpu-v4", ""),
    "avx512": ("cpu-v4", WITHOUT_VNNI),
    "avx2": ("cpu-v3", ""),
    "sse2": ("cpu-v1", ""),
}
ABLE = {"avx512_bf16": 3, "avx512": 3, "avx2": 2, "": 1}
WANTS = {"vnni": 3, "avx512": 3, "avx2": 2, "sse2": 1}
INT8 = torch.int8


class Kernels:
    """Builds one form, and binds it to any sizes."""

    def __init__(self, folder: Path, form: str) -> None:
        target, self._before = FORMS[form]
        self.device = replace(CPU, isa="avx2")
        self._native = NativeKernels(DiskCache(folder), target=target)

    def build(self, sources: Sequence[KernelSource]) -> dict[KernelSource, NativeFunction]:
        made = [replace(s, text=self._before + s.text) for s in sources]
        return dict(zip(sources, self._native.build(made).values(), strict=True))

    def bind(
        self,
        source: KernelSource,
        pointers: Sequence[int],
        scalars: Sequence[int],
        *_: Any,
        **__: Any,
    ) -> Any:
        return self.build([source])[source].bind(pointers, scalars)


@pytest.fixture(scope="module", params=FORMS)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if WANTS[request.param] > ABLE[processor().isa]:
        pytest.skip(f"this processor has no {request.param}")
    return Kernels(tmp_path_factory.mktemp(request.param), request.param)


def ours(kernels: Any, x: Tensor, weight: Tensor) -> Tensor:
    launches = code_sums.launch(problem("code_sums", x.shape, weight.shape, dtype=torch.int32), CPU)
    out = torch.full((x.shape[0], weight.shape[0]), -7, dtype=torch.int32)
    launched(launches, kernels).writing(refuse)((x, weight), out)
    return out


def ours_less(kernels: Any, x: Tensor, weight: Tensor, zero: int, *zeros: Tensor) -> Tensor:
    """The sums without zero points."""
    shapes = [each.shape for each in (x, weight, *zeros)]
    launches = code_sums.launch(problem("code_sums", *shapes, dtype=torch.int32, zero=zero), CPU)
    out = torch.full((x.shape[0], weight.shape[0]), -7, dtype=torch.int32)
    launched(launches, kernels).writing(refuse)((x, weight, *zeros), out)
    return out


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return (x.long() @ weight.long().t()).int()


def codes(rows: int, depth: int) -> Tensor:
    return torch.randint(-128, 128, (rows, depth), dtype=INT8)


DEPTHS = (1, 2, 3, 4, 5, 31, 63, 64, 65, 127, 130, 257)
COLUMNS = (1, 4, 15, 16, 17, 48, 63, 64, 65, 100, 127, 130, 515, 1030)
ROWS = (1, 2, 3, 5, 6, 7, 11, 23, 24, 25, 49)


def test_every_number_of_rows_columns_and_codes(kernels):
    shapes = {(rows, 37, 66) for rows in range(1, 52)}
    shapes |= {(7, columns, depth) for columns in COLUMNS for depth in DEPTHS}
    shapes |= {(rows, 64, 64) for rows in ROWS} | {(26, 300, 4099)}
    for rows, columns, depth in sorted(shapes):
        x, weight = codes(rows, depth), codes(columns, depth)
        assert torch.equal(ours(kernels, x, weight), exact(x, weight)), (rows, columns, depth)


@pytest.mark.parametrize("zero", [0, 1, -128, 127])
@pytest.mark.parametrize("most", [None, 0, 128])
def test_zero_points_are_taken_off(zero, most, kernels):
    for rows, columns, depth in ((1, 1, 1), (7, 37, 66), (26, 130, 257), (49, 16, 4)):
        x, weight = codes(rows, depth), codes(columns, depth)
        zeros = [] if most is None else [torch.randint(-most, most + 1, (columns,))]
        less = weight.long() - (zeros[0][:, None] if zeros else 0)
        wanted = ((x.long() - zero) @ less.t()).int()
        assert torch.equal(ours_less(kernels, x, weight, zero, *zeros), wanted), (rows, columns)


@pytest.mark.parametrize("values", [(-128, -128), (127, 127), (127, -128), (-128, 127)], ids=str)
def test_the_largest_codes_saturate_nowhere(values, kernels):
    x, weight = (torch.full((n, 1000), v, dtype=INT8) for n, v in zip((7, 65), values, strict=True))
    assert torch.equal(ours(kernels, x, weight), exact(x, weight))


def test_results_are_those_of_one_thread(kernels):
    x, weight = codes(250, 300), codes(200, 300)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(ours(kernels, x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(sums, exact(x, weight)) for sums in found)


def test_what_lies_otherwise_goes_to_the_library(kernels):
    weight = codes(32, 20).t()  # (20, 32), column by column
    launches = code_sums.launch(problem("code_sums", (5, 32), (20, 32), dtype=torch.int32), CPU)
    asked = list[Sequence[Tensor]]()
    run = launched(launches, kernels).writing(lambda given, out: asked.append(given))
    run((codes(5, 32), weight), torch.empty(5, 20, dtype=torch.int32))
    assert asked


def test_it_is_chosen_where_there_is_something_to_multiply():
    device = replace(CPU, isa="avx2")
    wanted = call("code_sums", ("m", 64), (32, 64), dtype=torch.int32)
    choice = library.select(wanted, wanted.at({"m": 5}), device)
    assert choice.kernel == "code_sums"
    assert choice.sources == (code_sums.source(),)
    assert library.select(wanted, wanted.at({"m": 0}), device).kernel == "int_mm"
    exact = replace(device, has_vnni=True)  # torch's is exact there, and faster
    assert library.select(wanted, wanted.at({"m": 5}), exact).kernel == "int_mm"
    assert library.select(wanted, wanted.at({"m": 5}), device, ("code_sums",)).kernel == "int_mm"
    assert "CPUs" in library.reasons(wanted, H100)["code_sums"]
    assert code_sums.cost_us(problem("code_sums", (0, 64), (32, 64)), device) == NEVER


def test_its_memory_is_as_large_as_the_kernel_says():
    """The header is C++, and what reserves memory for it is not."""
    text = code_panel.header()
    assert f"PANEL = {code_panel.ROWS};" in text
    assert f"return up_to(columns, {code_panel.LANES}) * (depth / 2 + 3);" in text
    assert f"HEAD = {code_panel.HEAD};" in text
    assert code_panel.packed_words(17, 9) == 32 * 7
    assert "return depth / 2 + 1;" in text
    assert code_panel.row_words(9) == 5

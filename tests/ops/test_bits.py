"""Bytes that are looked at as numbers of other types, and floats of 8 bits."""

import pytest
import torch
from torch import nn

import strop
from strop.codegen import cpp, triton
from strop.codegen.triton_interpreter import interpret
from strop.ir import e4m3
from strop.options import Options
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.cubin import compile_cubin
from strop.runtime.build.native import NativeKernels
from tests.codegen import kernels
from tests.codegen.cpp_launch import launch
from tests.codegen.test_triton_compile import disassemble
from tests.frontend.tracing import Function

ROWS = {
    "half_of_bits": torch.arange(-(2**15), 2**16, dtype=torch.int32),
    "float_of_bits": torch.arange(-(2**31), 2**31 - 1, 104729).to(torch.int32),
}


def sample(name):
    return kernels.pointwise(name, [torch.int32], torch.float32).kernel


def expected(name):
    bits = ROWS[name]
    is_half = name == "half_of_bits"
    return bits.to(torch.int16).view(torch.float16).float() if is_half else bits.view(torch.float32)


def check(found, name):
    torch.testing.assert_close(found, expected(name), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ROWS)
def test_cpp_reads_them(name, tmp_path):
    emitted, out = cpp.emit(sample(name)), torch.empty(len(ROWS[name]))
    native = NativeKernels(DiskCache(tmp_path))
    built = native.build([emitted.source])[emitted.source]
    launch(built, emitted, [ROWS[name], out], {"n": len(out)})
    check(out, name)


@pytest.mark.parametrize("name", ROWS)
def test_triton_reads_them(name):
    emitted, out = triton.emit(sample(name)), torch.empty(len(ROWS[name]))
    sizes = {f"s{i}": size.eval({"n": len(out)}) for i, size in enumerate(emitted.scalars)}
    interpret(emitted.source, [ROWS[name], out], sizes)
    check(out, name)
    assert compile_cubin(emitted.source, 80).code


FLOATS = torch.arange(-(2**31), 2**31 - 1, 104729).to(torch.int32).view(torch.float32)


def bits_expected(x):
    return torch.where(x.isnan(), 0, x.view(torch.int32))


def test_cpp_gives_bits(tmp_path):
    emitted = cpp.emit(kernels.pointwise("bits_of_float", [torch.float32], torch.int32).kernel)
    out = torch.empty(len(FLOATS), dtype=torch.int32)
    built = NativeKernels(DiskCache(tmp_path)).build([emitted.source])[emitted.source]
    launch(built, emitted, [FLOATS, out], {"n": len(out)})
    assert torch.equal(torch.where(FLOATS.isnan(), 0, out), bits_expected(FLOATS))


def test_triton_gives_bits():
    emitted = triton.emit(kernels.pointwise("bits_of_float", [torch.float32], torch.int32).kernel)
    out = torch.empty(len(FLOATS), dtype=torch.int32)
    sizes = {f"s{i}": size.eval({"n": len(out)}) for i, size in enumerate(emitted.scalars)}
    interpret(emitted.source, [FLOATS, out], sizes)
    assert torch.equal(torch.where(FLOATS.isnan(), 0, out), bits_expected(FLOATS))
    assert compile_cubin(emitted.source, 80).code


def coded():
    """A kernel that rounds to e4m3, numbers and their codes: of a NaN whatever sign."""
    numbers = torch.cat([GIVEN["float32"], torch.tensor([464.0, -464.1, 1e9, -torch.inf])])
    wanted = numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)
    wanted = torch.where(numbers.isnan(), 0x7F, wanted)
    return kernels.pointwise("e4m3_code", [torch.float32], torch.int32).kernel, numbers, wanted


def test_cpp_rounds_to_8_bits(tmp_path):
    kernel, numbers, wanted = coded()
    emitted, out = cpp.emit(kernel), torch.empty(len(numbers), dtype=torch.int32)
    built = NativeKernels(DiskCache(tmp_path)).build([emitted.source])[emitted.source]
    launch(built, emitted, [numbers, out], {"n": len(out)})
    assert torch.equal(torch.where(numbers.isnan(), out & 0x7F, out), wanted)


def test_triton_rounds_to_8_bits_by_whole_numbers():
    kernel, numbers, wanted = coded()
    emitted, out = triton.emit(kernel), torch.empty(len(numbers), dtype=torch.int32)
    sizes = {f"s{i}": size.eval({"n": len(out)}) for i, size in enumerate(emitted.scalars)}
    interpret(emitted.source, [numbers, out], sizes)
    assert torch.equal(torch.where(numbers.isnan(), out & 0x7F, out), wanted)


@pytest.mark.parametrize(("arch", "runs_on"), [(80, 80), (89, 89), (80, 90), (90, 90), (100, 100)])
def test_an_instruction_rounds_to_8_bits_where_there_is_one(arch, runs_on, tmp_path):
    source = triton.emit(coded()[0]).source
    found = disassemble(compile_cubin(source, arch, runs_on), tmp_path)
    rounding = [name for name in found if "E4M3" in name]
    assert bool(rounding) == (arch >= 90)
    assert not any("F16" in name for name in found), "what is rounded twice differs"


def test_a_torch_that_gives_nan_for_what_is_too_large(monkeypatch, tmp_path):
    monkeypatch.setattr(e4m3, "_saturates", lambda: False)
    module = optimized(
        Function(lambda x: x.to(torch.float8_e4m3fn).view(torch.uint8) + 0), tmp_path
    )
    x = torch.tensor([464.0, -464.0, 464.1, -465.0, 1e9, -torch.inf, 448.0, 1.0])
    assert module(x).tolist() == [0x7E, 0xFE, 0x7F, 0xFF, 0x7F, 0xFF, 0x7E, 0x38]


HALVES = torch.arange(65536).to(torch.int32).to(torch.int16)
NEAR_CODES = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
GIVEN = {
    "float32": torch.cat([FLOATS, *(NEAR_CODES * f for f in (1, 1 - 2**-23, 1 + 2**-23, 1.0625))]),
    "float16": HALVES.view(torch.float16),
    "bfloat16": HALVES.view(torch.bfloat16),
}
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("dtype", GIVEN)
def test_kernels_round_to_8_bits_as_torch_does(dtype, device, tmp_path):
    x = GIVEN[dtype].to(device)
    eager = Function(lambda x: x.to(torch.float8_e4m3fn).view(torch.uint8) + 0)
    module = optimized(Function(eager.function), tmp_path)
    found, wanted = module(x), eager(x)
    are_numbers = x.isfinite()
    assert torch.equal(found[are_numbers], wanted[are_numbers])
    assert torch.equal(found[~are_numbers] & 0x7F, wanted[~are_numbers] & 0x7F)  # but signs of NaN
    assert strop.explain(module).calls == {}


def test_rounded_rows_reach_a_product_in_their_own_type(tmp_path):
    def product(x, weight):
        rows = (x * 2).clamp(-448, 448).to(torch.float8_e4m3fn).reshape(-1, 16)
        one = torch.ones((), dtype=torch.float32)
        codes = weight.to(torch.float8_e4m3fn)
        return torch._scaled_mm(rows, codes.t(), one, one, out_dtype=torch.bfloat16)

    eager, module = Function(product), optimized(Function(product), tmp_path)
    weight = torch.randn(32, 16)
    for rows in (16, 32):
        x = torch.randn(2, rows, 16)
        torch.testing.assert_close(module(x, weight), eager(x, weight), rtol=1e-2, atol=1e-2)
    assert strop.explain(module).calls == {"scaled_product": 1}


ALL = torch.arange(256).to(torch.uint8)
WIDE = torch.randint(0, 256, (6, 16), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
VIEWS = {
    "int8": lambda x: x.view(torch.int8),
    "uint8": lambda x: x.view(torch.int8).view(torch.uint8),
    "int16": lambda x: x.view(torch.int16),
    "int32": lambda x: x.view(torch.int32),
    "float16": lambda x: x.view(torch.float16),
    "bfloat16": lambda x: x.view(torch.bfloat16),
    "float32": lambda x: x.view(torch.float32),
    "of a part": lambda x: x[:, 2:4].view(torch.float16),
    "of words": lambda x: (x.view(torch.int16).to(torch.int32) << 16).view(torch.float32),
    "of halves": lambda x: (x.view(torch.int16) ^ 1).view(torch.float16),
}


def optimized(module, folder):
    return strop.optimize(module.eval(), options=Options(cache_dir=str(folder), strict=True))


@pytest.mark.parametrize("view", VIEWS)
def test_bytes_are_read_in_kernels(view, tmp_path):
    eager = Function(lambda x: VIEWS[view](x).double() * 2)
    module = optimized(Function(eager.function), tmp_path)
    for x in (WIDE, WIDE[:4]):
        torch.testing.assert_close(module(x), eager(x), rtol=0, atol=0, equal_nan=True)
    assert strop.explain(module).calls == {}


AGAIN = {
    "back": lambda x: x.view(torch.float16).view(torch.int16),
    "as before": lambda x: x.view(torch.float32).view(torch.uint8),
}


@pytest.mark.parametrize("view", AGAIN)
def test_bits_of_numbers_stay_what_they_are(view, tmp_path):
    eager = Function(lambda x: AGAIN[view](x) * 2)
    module = optimized(Function(eager.function), tmp_path)
    x = torch.arange(256).to(torch.uint8)
    x = torch.stack([x, 126 + x % 2], 1).reshape(-1, 16)  # nearly all are NaNs
    assert torch.equal(module(x), eager(x))


class Short(nn.Module):
    """A weight in floats of 8 bits, all there are, and what reads it."""

    def __init__(self, dtype, function):
        super().__init__()
        self.function = function
        self.register_buffer("weight", ALL.view(dtype).reshape(32, 8))

    def forward(self, x):
        return self.function(self, x)


READS = {
    "cast": lambda net, x: net.weight.to(x.dtype) + x,
    "turned": lambda net, x: net.weight.t().to(x.dtype) + x[:8, :1],
    "parts": lambda net, x: torch.cat([p.to(x.dtype) for p in net.weight.chunk(2)]) + x,
    "bytes": lambda net, x: net.weight.view(torch.uint8) + x,
    "twice": lambda net, x: (net.weight.to(torch.float16).to(x.dtype) + x, net.weight.float() * x),
}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("read", READS)
def test_weights_of_8_bits_are_decoded_in_kernels(read, dtype, tmp_path):
    module, eager = (Short(dtype, READS[read]).eval() for _ in range(2))
    optimized(module, tmp_path)
    x = torch.zeros(32, 8)
    torch.testing.assert_close(module(x), eager(x), rtol=0, atol=0, equal_nan=True)
    for net in (module, eager):
        net.weight.view(torch.uint8).add_(3)
    torch.testing.assert_close(module(x), eager(x), rtol=0, atol=0, equal_nan=True)
    assert strop.explain(module).calls == {}


IN_TORCH = {
    "product": lambda net, x: torch.ops.aten._scaled_mm(
        net.weight[:16].view(torch.uint8).view(net.weight.dtype).reshape(8, 16),
        net.weight[16:].reshape(8, 16).t(),
        x[0, 0] + 1,
        x[0, 0] + 1,
        out_dtype=torch.bfloat16,
    ),
    "given back": lambda net, x: (net.weight.t(), x + net.weight.float()),
    "another type": lambda net, x: net.weight.to(torch.float8_e5m2).float() + x,
}


@pytest.mark.parametrize("read", IN_TORCH)
def test_torch_gets_them_in_their_own_type(read, tmp_path):
    module, eager = (Short(torch.float8_e4m3fn, IN_TORCH[read]).eval() for _ in range(2))
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    x = torch.zeros(32, 8)
    for found, wanted in zip(_several(module(x)), _several(eager(x)), strict=True):
        assert (found.dtype, found.stride()) == (wanted.dtype, wanted.stride())
        torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


def _several(result):
    return result if isinstance(result, tuple) else (result,)

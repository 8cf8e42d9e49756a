"""What bitsandbytes has quantised to nf4 is decoded in kernels; a library of its name stands in."""

import importlib.util
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import strop
from strop.frontend.four_bits import NF4
from strop.options import Options

ROWS, COLUMNS, BLOCK = 24, 128, 64
COUNT = ROWS * COLUMNS
SCHEMAS = (
    "dequantize_4bit(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape,"
    " ScalarType dtype) -> Tensor",
    "dequantize_blockwise(Tensor A, Tensor absmax, Tensor code, int blocksize,"
    " ScalarType dtype) -> Tensor",
)


def dequantize_4bit(codes, absmax, block, kind, shape, dtype):
    """As the library computes it: the upper half of a byte comes first."""
    table = torch.tensor(NF4) if kind == "nf4" else torch.arange(16.0)
    flat = codes.reshape(-1).int()
    numbers = table[torch.stack([flat >> 4, flat & 15], 1).reshape(-1)][: math.prod(shape)]
    scales = absmax.repeat_interleave(block)[: len(numbers)]
    return (numbers * scales).reshape(shape).to(dtype)


def dequantize_blockwise(codes, absmax, table, block, dtype):
    scales = absmax.repeat_interleave(block)[: codes.numel()]
    return (table[codes.reshape(-1).int()] * scales).reshape(codes.shape).to(dtype)


@pytest.fixture(scope="module", autouse=True)
def library():
    if importlib.util.find_spec("bitsandbytes") is not None:
        pytest.skip("the library itself is here: test_libraries.py tests with it")
    made = torch.library.Library("bitsandbytes", "DEF")
    for schema in SCHEMAS:
        made.define(schema)
        name = schema.partition("(")[0]
        made.impl(name, globals()[name], "CPU")
    made.impl(
        "dequantize_4bit", lambda a, b, c, d, shape, dtype: a.new_empty(shape, dtype=dtype), "Meta"
    )
    made.impl(
        "dequantize_blockwise", lambda a, b, c, d, dtype: torch.empty_like(a, dtype=dtype), "Meta"
    )
    yield
    made._destroy()


class FourBits(nn.Module):
    def __init__(self, kind, *, is_nested, block=BLOCK, dtype=torch.float32):
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.kind, self.block, self.dtype, self.is_nested = kind, block, dtype, is_nested
        scales = -(-COUNT // block)
        codes = torch.randint(0, 256, (COUNT // 2, 1), dtype=torch.uint8, generator=made)
        self.register_buffer("codes", codes)
        self.register_buffer("absmax", torch.rand(scales, generator=made) / 8)
        short = torch.randint(0, 256, (scales,), dtype=torch.uint8, generator=made)
        self.register_buffer("short", short)
        self.register_buffer("table", torch.rand(256, generator=made))
        self.register_buffer("outer", torch.rand(scales // 8, generator=made))
        self.register_buffer("offset", torch.tensor(0.01))

    def forward(self, x):
        library, absmax = torch.ops.bitsandbytes, self.absmax
        if self.is_nested:
            absmax = library.dequantize_blockwise(
                self.short, self.outer, self.table, 8, torch.float32
            )
            absmax = absmax + self.offset
        shape = [ROWS, COLUMNS]
        weight = library.dequantize_4bit(
            self.codes, absmax, self.block, self.kind, shape, self.dtype
        )
        return F.linear(x, weight.to(x.dtype)), weight.clone()


def checked(module, folder):
    wanted = module.eval()(torch.eye(COLUMNS))
    strop.optimize(module, options=Options(cache_dir=str(folder), strict=True))
    found = module(torch.eye(COLUMNS))
    assert module.forward.counters.eager_calls == 0
    # scales of scales may be multiplied and added in one step
    last_bit = 4 * torch.finfo(module.dtype).eps if module.is_nested else 0
    torch.testing.assert_close(found[0], wanted[0], rtol=max(last_bit, 1e-6), atol=1e-6)
    torch.testing.assert_close(found[1], wanted[1], rtol=last_bit, atol=0)
    return strop.explain(module).calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
def test_nf4(is_nested, dtype, tmp_path):
    module = FourBits("nf4", is_nested=is_nested, dtype=dtype)
    assert checked(module, tmp_path) == {"linear": 1}


@pytest.mark.parametrize(
    ("kind", "block"), [("fp4", BLOCK), ("nf4", 2048)], ids=["other table", "shorter last block"]
)
def test_the_library_computes_others(kind, block, tmp_path):
    module = FourBits(kind, is_nested=False, block=block)
    name = "bitsandbytes.dequantize_4bit.default"
    assert checked(module, tmp_path) == {name: 1, "linear": 1}


def test_all_codes_have_their_numbers(tmp_path):
    module = FourBits("nf4", is_nested=False)
    module.codes[:8, 0] = torch.tensor([1, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF])
    module.absmax[0] = 1
    strop.optimize(module.eval(), options=Options(cache_dir=str(tmp_path), strict=True))
    _, weight = module(torch.zeros(2, COLUMNS))
    assert weight.flatten()[:16].tolist() == torch.tensor(NF4).tolist()

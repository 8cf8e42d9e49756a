"""Modules that torchao, quanto and diffusers' GGUF have quantised, where these are installed."""

import copy

import pytest
import torch
from torch import nn

import strop
from strop.frontend.clones import clone_structure
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.quantised.stand_ins import Net

ROWS = (5, 9, 2)
PRODUCT = "linear"
OF_CODES = "codes_"  # how kernels begin that make sums of products of codes
OF_BITSANDBYTES = {
    "bitsandbytes.dequantize_4bit.default",
    "bitsandbytes.dequantize_blockwise.default",
}


def check(module, folder, *, jumps=False):
    """``jumps``: whether rows are quantised too, so that a last bit may move a whole step."""
    eager, generator = clone_structure(module), torch.Generator().manual_seed(0)
    strop.optimize(module, options=Options(cache_dir=str(folder), strict=True))
    with torch.no_grad():
        for rows in ROWS:
            x = torch.randn(rows, 256, generator=generator)
            found, wanted = module(x), eager(x)
            error = (found - wanted).abs().max().item()
            assert error <= (2e-2 if jumps else 4e-3) * wanted.abs().max().item()
    report = strop.explain(module)
    assert module.forward.counters.eager_calls == 0
    assert module.forward.counters.fallbacks == {}
    assert report.num_graphs == 1
    kernels = report.components[0].latest.kernels
    products = sum(k.num_launches for k in kernels if k.name.startswith(OF_CODES))
    assert products + report.calls.get(PRODUCT, 0) == 2
    assert report.calls.keys() <= {PRODUCT} | OF_BITSANDBYTES
    return eager


def net():
    torch.manual_seed(0)
    return Net(width=256).eval().requires_grad_(False)


TORCHAO = {
    "Int8WeightOnlyConfig": {"version": 2},
    "Int8DynamicActivationInt8WeightConfig": {"version": 2},
    "Float8WeightOnlyConfig": {},
    "IntxWeightOnlyConfig": {"weight_dtype": torch.int4},
}


@pytest.mark.parametrize("name", TORCHAO)
def test_torchao(name, tmp_path):
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    module = net()
    quantization.quantize_(module, getattr(quantization, name)(**TORCHAO[name]))
    check(module, tmp_path, jumps="Dynamic" in name)


@pytest.mark.parametrize("name", ["qint8", "qint4", "qint2", "qfloat8"])
def test_quanto(name, tmp_path):
    quanto = pytest.importorskip("optimum.quanto", reason="needs optimum-quanto")
    module = net()
    quanto.quantize(module, weights=quanto.qtypes[name])
    quanto.freeze(module)
    check(module, tmp_path)


def in_four_bits(bitsandbytes, name, is_nested, *, packs):
    """``packs``: whether the library puts weights into another order in the first call, as it does
    where a CPU has AVX512 BF16."""
    module = net()
    for place in "ab":
        old = module.get_submodule(place)
        how = {"quant_type": name, "compress_statistics": is_nested}
        new = bitsandbytes.nn.Linear4bit(
            old.in_features, old.out_features, compute_dtype=torch.float32, **how
        )
        new.load_state_dict(old.state_dict())
        new.support_avx512bf16_for_cpu &= packs
        module._modules[place] = new.requires_grad_(False)
    return module.to("cpu").eval()


@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_bitsandbytes(name, is_nested, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    eager = check(module := in_four_bits(bitsandbytes, name, is_nested, packs=False), tmp_path)
    calls = strop.explain(module).calls
    assert OF_BITSANDBYTES.isdisjoint(calls) == (name == "nf4")  # fp4 is the library's
    state = module.a.weight.quant_state
    state.absmax = state.absmax.flip(0)  # is seen
    x = torch.randn(3, 256)
    with torch.no_grad():
        torch.testing.assert_close(module(x), eager(x), rtol=1e-4, atol=1e-4)
    assert module.forward.counters.eager_calls == 0


@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
@pytest.mark.parametrize("comes_first", ["eager", "compiled"])
def test_weights_that_bitsandbytes_packs(name, is_nested, comes_first, tmp_path):
    """They were taken for what they had been before, and results were wrong without a word."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    module, eager = (in_four_bits(bitsandbytes, name, is_nested, packs=True) for _ in range(2))
    if not module.a.support_avx512bf16_for_cpu:
        pytest.skip("needs a CPU with AVX512 BF16")
    x = torch.randn(5, 256)
    with torch.no_grad():
        wanted = eager(x)
        if comes_first == "eager":
            module(x)
        strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
        for _ in range(3):
            torch.testing.assert_close(module(x), wanted, rtol=1e-2, atol=1e-2)
        assert module.forward.counters.eager_calls == (comes_first == "compiled")
        for each in (module, eager):
            each.state_dict()  # takes the packing back
        wanted = eager(x)
        for _ in range(2):
            torch.testing.assert_close(module(x), wanted, rtol=1e-2, atol=1e-2)
        strop.restore(module)
        torch.testing.assert_close(module(x), wanted)


OF_INT8 = {"code_sums": 2, "mixed_product": 2}


def of_int8(bitsandbytes, dtype, **how):
    module = net()
    for place in "ab":
        old = module.get_submodule(place)
        new = bitsandbytes.nn.Linear8bitLt(
            old.in_features, old.out_features, has_fp16_weights=False, **how
        )
        new.load_state_dict(old.state_dict())
        new.bias.data = new.bias.data.to(dtype)
        module._modules[place] = new.requires_grad_(False).to("cpu").eval()
    module.norm.to(dtype)
    return module


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("threshold", [0.0, 6.0, 2.5])
def test_int8_of_bitsandbytes(threshold, dtype, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    module = of_int8(bitsandbytes, dtype, threshold=threshold)
    eager, generator = copy.deepcopy(module), torch.Generator().manual_seed(0)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    for rows in (*ROWS, 1):
        x = torch.randn(rows, 256, generator=generator)
        x[0, :3] = 9
        with torch.no_grad():
            found, wanted = module(x.to(dtype)), eager(x.to(dtype))
        assert found.dtype is dtype
        assert (found - wanted).abs().max() <= 2e-2 * wanted.abs().max()
    assert module.forward.counters.eager_calls == 0
    calls = OF_INT8 if threshold else {}
    assert strop.explain(module).calls == calls


def test_int8_of_bitsandbytes_in_and_out_of_eager(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    module, other = (of_int8(bitsandbytes, torch.float32, threshold=6.0) for _ in range(2))
    eager, x = copy.deepcopy(module), torch.randn(5, 256)
    other.a.weight.data.neg_()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))

    def agree():
        with torch.no_grad():
            found, wanted = module(x), eager(x)
        assert (found - wanted).abs().max() <= 2e-2 * wanted.abs().max()
        return found

    first = agree()
    module.load_state_dict(other.state_dict())
    eager = copy.deepcopy(other)
    loaded = agree()
    assert (loaded - first).abs().max() > 0.1
    strop.restore(module)  # eager moves codes and scales into the state of each layer
    agree()
    assert module.a.weight.CB is None
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    for net in (module, eager):
        net.a.state.SCB.mul_(2)
    assert (agree() - loaded).abs().max() > 0.1
    assert module.forward.counters.eager_calls == 0


def test_int8_of_bitsandbytes_that_is_not_quantised(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    module = nn.Sequential(bitsandbytes.nn.Linear8bitLt(64, 32)).eval().requires_grad_(False)
    eager, x = copy.deepcopy(module), torch.randn(3, 64, dtype=torch.float16)
    with torch.no_grad():
        strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
        assert torch.equal(module(x), eager(x))
    (reason,) = module.forward.counters.fallbacks
    assert "has_fp16_weights" in reason


# kind of blocks -> where the halves are in one that are scales
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


@pytest.mark.parametrize("name", SCALES)
def test_gguf(name, tmp_path):
    gguf = pytest.importorskip("gguf", reason="needs gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter, dequantize_gguf_tensor

    module, kind = net(), gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    for place in "ab":
        old = module.get_submodule(place)
        rows, columns = old.weight.shape
        codes = torch.randint(0, 256, (rows * columns // block, size), dtype=torch.uint8)
        for start in SCALES[name]:
            codes[:, start : start + 2] = torch.tensor([3e-4]).half().view(torch.uint8)
        new = GGUFLinear(columns, rows, True, compute_dtype=torch.float32)
        new.weight = GGUFParameter(codes.reshape(rows, -1), quant_type=kind)
        new.bias = old.bias
        module._modules[place] = new.requires_grad_(False)
    eager = check(module.eval(), tmp_path)
    wide = net().double()
    for place in "ab":  # in fp64 from the start: eager rounds each step to fp16
        own = eager.get_submodule(place)
        blocks = own.weight.as_tensor().reshape(-1, size)
        exact = _in_full(blocks, kind, block, size).reshape(own.out_features, own.in_features)
        wide.get_submodule(place).weight = nn.Parameter(exact, requires_grad=False)
        assert torch.allclose(
            exact.float(), dequantize_gguf_tensor(own.weight).float(), rtol=1e-2, atol=1e-2
        )
    x = torch.randn(64, 256)
    with torch.no_grad():
        assert_as_accurate_as_eager(module(x), eager(x), wide(x.double()))


def _in_full(blocks, kind, block, size):
    """Dequantise in fp64: the functions of diffusers, with scales that are wide."""
    from diffusers.quantizers.gguf.utils import dequantize_functions

    return dequantize_functions[kind](blocks, block, size, dtype=torch.float64).double()

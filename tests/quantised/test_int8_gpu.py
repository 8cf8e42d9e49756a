"""LLM.int8 on a GPU: which columns are multiplied apart is decided there, in a CUDA graph too."""

import copy

import pytest
import torch
from torch import nn

import strop
from strop.frontend import int8_layers
from strop.kernels.gemm.mixed_product import PANEL
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.quantised import int8_stand_in
from tests.quantised.int8_stand_in import CodedLinear, Codes, given, net
from tests.quantised.test_int8 import in_full

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
CUBLAS_BYTES = 32 << 20  # workspace of cuBLAS on Hopper: of each of two handles, on each stream


@pytest.fixture(autouse=True)
def the_layer_is_known(monkeypatch):
    names = frozenset((f"{int8_stand_in.__name__}.CodedLinear",))
    monkeypatch.setattr(int8_layers, "LAYERS", names)


def on_gpu(module):
    for part in module.modules():
        if isinstance(part, CodedLinear):
            codes, scales = part.weight.CB.cuda(), part.weight.SCB.cuda()
            part.weight = Codes(codes, codes, scales)
            if part.bias is not None:
                part.bias.data = part.bias.data.cuda()
    return module


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_values(threshold, dtype, tmp_path):
    module = on_gpu(net(dtype, threshold=threshold))
    eager = copy.deepcopy(module)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.inference_mode():
        for rows in (32, 32, 32, 64, 1, 2, 17):
            for larger in (0, 1, 40, 64):
                x = given(rows, 64, dtype=dtype, larger=larger).cuda()
                found, wanted = module(x), eager(x)
                bound = 2e-2 if dtype is torch.bfloat16 else 1e-2
                assert (found - wanted).abs().max() <= bound * wanted.abs().max().clamp(min=1)
    counters = module.forward.counters
    assert counters.eager_calls == 0
    assert counters.replays
    assert strop.explain(module).num_graphs == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("larger", [0, 1, 33, 1000, PANEL, PANEL + 1, PANEL + 128])
def test_it_is_as_near_as_eager(larger, dtype, tmp_path):
    torch.manual_seed(0)
    layer = CodedLinear(PANEL + 128, 272).eval().requires_grad_(False)
    layer.bias.data = layer.bias.data.to(dtype)
    layer = on_gpu(layer)
    eager = copy.deepcopy(layer)
    x = given(200, PANEL + 128, dtype=dtype, larger=larger).cuda()
    wanted = in_full(layer, x)
    strop.optimize(layer, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.inference_mode():
        for _ in range(3):  # the last is a replay
            assert_as_accurate_as_eager(layer(x), eager(x), wanted)


def test_replays_find_the_columns_anew(tmp_path):
    module = on_gpu(net())
    eager = copy.deepcopy(module)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.inference_mode():
        for column in (3, 60, 5, 0, 63, 7):
            x = torch.randn(48, 64, device="cuda").half().clamp(-5, 5)
            x[column % 48, column] = 30
            found, wanted = module(x), eager(x)
            assert (found - wanted).abs().max() <= 1e-2 * wanted.abs().max().clamp(min=1)
    assert module.forward.counters.replays


def test_no_weight_is_dequantised(tmp_path):
    count, width = 2, 12288
    torch.manual_seed(0)
    layers = [CodedLinear(width, width, bias=False) for _ in range(count)]
    stack = on_gpu(nn.Sequential(*layers).eval().requires_grad_(False))
    strop.optimize(stack, options=Options(cache_dir=str(tmp_path), strict=True))
    x = given(16, width).cuda()
    stack(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        stack(x)
    torch.cuda.synchronize()
    more = torch.cuda.max_memory_allocated() - before
    in_halves = width * width * 2
    assert in_halves > 6 * CUBLAS_BYTES
    assert more < 6 * CUBLAS_BYTES, "one weight in halves is more"


def test_the_library(tmp_path, monkeypatch):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    monkeypatch.setattr(int8_layers, "LAYERS", {"bitsandbytes.nn.modules.Linear8bitLt"})
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear8bitLt(256, 512, has_fp16_weights=False, threshold=6.0)
    module = nn.Sequential(layer).half().cuda().eval().requires_grad_(False)
    eager = copy.deepcopy(module)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.inference_mode():
        for rows in (64, 64, 64, 1, 5):
            for larger in (0, 3, 256):
                x = given(rows, 256, larger=larger).cuda()
                found, wanted = module(x), eager(x)
                assert (found - wanted).abs().max() <= 1e-2 * wanted.abs().max().clamp(min=1)
    assert module.forward.counters.eager_calls == 0
    strop.restore(module)
    x = given(9, 256).cuda()
    assert torch.equal(module(x), eager(x))

"""Linears in 8 bits on a GPU: values by the rule, CUDA graphs, and weights that change."""

from __future__ import annotations

import pytest
import torch

import strop
from strop.options import Options
from tests.passes import test_gated_codes as gated
from tests.quantised.small_models import given, in_torch, net, off
from tests.quantised.test_eight_bit import IN_BLOCKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def able(numerics):
    if numerics == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products of fp8")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numerics", ["int8", "fp8"])
@torch.inference_mode()
def test_values(numerics, dtype, tmp_path):
    able(numerics)
    module = net(dtype, width=128).cuda()
    exact, rule = in_torch(module, numerics, ()), in_torch(module, numerics, IN_BLOCKS)
    options = Options(cache_dir=str(tmp_path), strict=True, numerics=(numerics,))
    strop.optimize(module, options=options)
    for rows in (96, 96, 96, 33, 5):  # of which 5 rows are padded for a library
        x = given(rows, dtype, "cuda")
        wanted = exact(*x)
        assert off(module(*x), wanted) < 1.3 * off(rule(*x), wanted) + 4e-3
        assert off(module(*x), rule(*x)) < 0.06
    counters = module.forward.counters
    assert counters.eager_calls == 0
    assert counters.replays
    (graph,) = strop.explain(module).graphs
    assert len(graph.eight_bit) == len(IN_BLOCKS)


@pytest.mark.parametrize("numerics", ["int8", "fp8"])
@torch.no_grad()
def test_weights_are_never_stale_in_a_cuda_graph(numerics, tmp_path):
    able(numerics)
    module = net(torch.float16, width=128).cuda()
    exact, rule = in_torch(module, numerics, ()), in_torch(module, numerics, IN_BLOCKS)
    options = Options(cache_dir=str(tmp_path), strict=True, numerics=(numerics,))
    strop.optimize(module, options=options)
    x = given(64, torch.float16, "cuda")
    for _ in range(4):
        before = module(*x).clone()
    weight = module.blocks[0].q.weight
    changes = (
        lambda: weight.mul_(2),
        lambda: weight.data.mul_(2),
        lambda: weight.data[3:5].mul_(4),  # rows that are not the first
        lambda: setattr(weight, "data", weight.data / 3),
        lambda: module.load_state_dict({k: v * 1.25 for k, v in module.state_dict().items()}),
    )
    for change in changes:
        change()
        wanted = exact(*x)
        for _ in range(3):
            found = module(*x).clone()
            assert off(found, wanted) < 1.3 * off(rule(*x), wanted) + 4e-3
        assert off(found, before) > 1e-4
        before = found


@pytest.mark.parametrize("block", [gated.Block(320), gated.SwiGLU(320)], ids=["GEGLU", "SwiGLU"])
@torch.inference_mode()
def test_gates_at_the_end_of_a_product(block, tmp_path):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("multiplies by WGMMA")
    module = block.half().eval().cuda()
    xs = [torch.randn(2, rows, gated.DEPTH, device="cuda").half() for rows in (96, 96, 33)]
    found = [(module(x), gated.in_torch(module, x)) for x in xs]
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True, numerics=("fp8",)))
    for x, (exact, rule) in zip(xs, found, strict=True):
        assert off(module(x), exact) < 1.3 * off(rule, exact) + 4e-3
    assert strop.explain(module).calls["scaled_geglu"] == 1
    assert module.forward.counters.eager_calls == 0

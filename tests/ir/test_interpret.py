"""The interpreter against torch's own operators."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from strop.ir.interpret import run
from tests.codegen import kernels

F64 = torch.float64


def outputs(name: str, env: dict[str, int]) -> list[torch.Tensor]:
    sample = kernels.SAMPLES[name](F64)
    tensors = sample.tensors(env)
    run(sample.kernel, tensors, env)
    return tensors


def test_geglu():
    x, out = outputs("geglu", {"m": 7})
    value, gate = x.view(7, 640).chunk(2, dim=1)
    torch.testing.assert_close(out.view(7, 320), value * F.gelu(gate))


def test_layer_norm_with_a_side_store():
    x, residual, weight, bias, total, out = outputs("layer_norm", {"m": 5})
    torch.testing.assert_close(total, x + residual)
    expected = F.layer_norm(total.view(5, 320), (320,), weight, bias)
    torch.testing.assert_close(out.view(5, 320), expected)


def test_softmax():
    x, out = outputs("softmax", {"m": 3, "k": 11})
    torch.testing.assert_close(out.view(3, 11), x.view(3, 11).softmax(1))


def test_row_sum_divides_by_a_size():
    x, total, mean = outputs("row_sum", {"m": 3, "k": 11})
    torch.testing.assert_close(total, x.view(3, 11).sum(1))
    torch.testing.assert_close(mean, x.view(3, 11).mean(1))


def test_group_norm_in_two_kernels():
    env = {"n": 2, "h": 3, "w": 5}
    x, bias, temb, y, mean, rstd = outputs("group_norm_stats", env)
    expected = x.view(2, 15, 320) + bias + temb.view(2, 1, 320)
    torch.testing.assert_close(y.view(2, 15, 320), expected)
    sample = kernels.group_norm_silu(F64)
    tensors = sample.tensors(env)
    tensors[:3] = [y, mean, rstd]
    run(sample.kernel, tensors, env)
    nchw = expected.permute(0, 2, 1)
    expected = F.silu(F.group_norm(nchw, 32, tensors[3], tensors[4])).permute(0, 2, 1)
    torch.testing.assert_close(tensors[5].view(2, 15, 320), expected)


def test_cat_reads_nothing_where_the_guard_is_false():
    a, b, out = outputs("cat_channels", {"m": 7})
    torch.testing.assert_close(out.view(7, 63), torch.cat([a.view(7, 40), b.view(7, 23)], 1))


def test_upsample_and_layout():
    x, out = outputs("upsample_nearest", {"n": 2, "h": 3, "w": 5})
    nchw = x.view(2, 3, 5, 36).permute(0, 3, 1, 2)
    expected = F.interpolate(nchw, scale_factor=2).permute(0, 2, 3, 1)
    torch.testing.assert_close(out.view(2, 6, 10, 36), expected)
    x, out = outputs("nchw_to_nhwc", {"n": 2, "h": 3, "w": 5, "c": 4})
    torch.testing.assert_close(out.view(2, 15, 4), x.view(2, 4, 15).transpose(1, 2))


def test_casts_round():
    x, y, as_int, positive = outputs("casts", {"n": 100})
    expected = ((x * 3.1).half().double() + 1).bfloat16()
    torch.testing.assert_close(y, expected.double(), rtol=0, atol=0)
    assert torch.equal(as_int, expected.long())
    assert torch.equal(positive, expected > 0)


@pytest.mark.parametrize("name", kernels.SAMPLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_sample_writes_all_its_outputs(name: str, dtype: torch.dtype):
    sample = kernels.SAMPLES[name](dtype)
    for env in sample.envs:
        tensors = sample.tensors(env)
        run(sample.kernel, tensors, env)
        assert not any(tensor.isnan().any() for tensor in tensors)


def test_tensors_are_read_through_their_storage():
    sample = kernels.silu_flat(F64)
    x, out = torch.randn(4, 6, dtype=F64), torch.zeros(4, 6, dtype=F64)
    run(sample.kernel, [x[1:], out], {"n": 6})
    torch.testing.assert_close(out[0], F.silu(x[1]))

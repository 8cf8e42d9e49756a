"""Heads of keys are repeated where torch has no fused attention for fewer of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from strop.runtime.run.attention_calls import for_a_fused_kernel
from strop.runtime.run.library_calls import CUDA_ALLOCATING

BACKENDS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def operands(heads: int, *, masked: bool) -> list[Tensor]:
    mask = [torch.randn(2, 1, 5, 7)] if masked else []
    return [torch.randn(2, 6, 5, 16), *(torch.randn(2, heads, 7, 16) for _ in range(2)), *mask]


def wanted(inputs: list[Tensor], *, causal: bool = False) -> Tensor:
    q, k, v, *mask = inputs
    return F.scaled_dot_product_attention(
        q, k, v, mask[0] if mask else None, is_causal=causal, enable_gqa=True
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_are_repeated_where_nothing_is_fused(
    backend: SDPBackend, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: backend.value)
    inputs = operands(2, masked=masked)
    heads = 6 if backend is SDPBackend.MATH else 2
    assert [x.shape[1] for x in for_a_fused_kernel(inputs, False, None)[:3]] == [6, heads, heads]
    attend = CUDA_ALLOCATING["attention"]({"causal": not masked, "scale": 0.25})
    torch.testing.assert_close(attend(inputs), wanted(inputs, causal=not masked))


def test_as_many_heads_are_never_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(torch, "_fused_sdp_choice", refuse)
    inputs = operands(6, masked=True)
    assert for_a_fused_kernel(inputs, False, None) is inputs


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fewer_heads_on_a_gpu(dtype: torch.dtype, masked: bool) -> None:
    inputs = [x.to("cuda", dtype) for x in operands(2, masked=masked)]
    attend = CUDA_ALLOCATING["attention"]({"causal": False, "scale": 0.25})
    exact = wanted([x.double() for x in inputs])
    error, eager = ((x.double() - exact).abs().max() for x in (attend(inputs), wanted(inputs)))
    assert error <= 2 * eager + torch.finfo(dtype).eps

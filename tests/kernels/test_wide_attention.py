"""Attention of wide heads: its row kernel in the interpreter and the compiler, and the whole."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.ir.dims import const, symbol
from strop.kernels.attention.exp_rows import exp_rows
from strop.options import Options
from strop.runtime.run import wide_attention
from strop.runtime.run.wide_attention import Part, WideAttention, chunk_of, is_wide
from strop.testing import assert_as_accurate_as_eager
from tests.codegen.test_triton_compile import compiled, disassemble, resources

pytest.importorskip("triton")
from strop.codegen.triton_interpreter import interpret

HALVES = (torch.float16, torch.bfloat16)
INF, NAN = float("inf"), float("nan")


def rows_of(scores: Tensor, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
    weights = torch.empty_like(scores, dtype=dtype)
    sums = scores.new_empty(scores.shape[0])
    rows, length = scores.shape
    source = exp_rows(dtype, scale, length)
    interpret(source, [scores, weights, sums], {"s0": length, "s1": rows})
    return weights, sums


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("length", [1, 48, 2048, 4099])
def test_rows(length: int, dtype: torch.dtype) -> None:
    scores = torch.randn(3, length) * 20
    weights, sums = rows_of(scores, dtype, 0.3)
    wanted = torch.exp(0.3 * (scores - scores.amax(1, keepdim=True)).double())
    torch.testing.assert_close(weights.double(), wanted, atol=1e-7, rtol=torch.finfo(dtype).eps)
    torch.testing.assert_close(sums, weights.float().sum(1))


def test_what_softmax_makes_nan_is_nan() -> None:
    scores = torch.tensor([[1.0, NAN], [1.0, INF], [-INF, -INF], [1.0, -INF], [0.0, 0.0]])
    weights, sums = rows_of(scores, torch.float16, 1.0)
    found = weights.float() / sums[:, None]
    assert torch.equal(found.isnan().any(1), scores.softmax(1).isnan().any(1))
    torch.testing.assert_close(found[3:], scores[3:].softmax(1))


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_rows_compile(arch: int, tmp_path: Path) -> None:
    cubin = compiled(exp_rows(torch.float16, 0.044, 4096), arch)
    if arch in (80, 90):
        registers, stack = resources(cubin, tmp_path)
        assert stack == 0
        assert registers <= 64
        found = Counter(disassemble(cubin, tmp_path))
        assert any(op.startswith("LDG.E.128") for op in found), found


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, list[int]]:
    """What the GPU computes, with its products in fp32 on this processor."""
    launches: list[int] = []

    def rows(
        self: WideAttention, scores: Tensor, weights: Tensor, sums: Tensor, scale: float
    ) -> None:
        source = exp_rows(weights.dtype, scale, scores.shape[-1])
        sizes = {"s0": scores.shape[-1], "s1": sums.numel()}
        interpret(source, [scores, weights, sums], sizes)
        launches.append(sums.numel())

    with (
        patch.object(WideAttention, "_exp_rows", rows),
        patch.object(
            wide_attention, "product", lambda a, b, out: torch.bmm(a.float(), b.float(), out=out)
        ),
    ):
        size = Part.most(q.shape, k.shape, v.shape, q.dtype).size_bytes
        memory = torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN
        call = WideAttention(scale, None, 0, memory)  # type: ignore[arg-type]
        return call((q, k, v)), launches


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("shape", "keys", "scale"), [((1, 1, 64), 64, None), ((2, 3, 40), 17, 0.1)]
)
def test_as_accurate_as_torch(
    shape: tuple[int, int, int], keys: int, scale: float | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    b, heads, queries = shape
    q = torch.randn(b, queries, heads, 264, dtype=dtype).transpose(1, 2)
    k, v = torch.randn(2, b, heads, keys, 264, dtype=dtype).unbind()
    found, launches = attend(q, k, v, scale)
    truth = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), scale=scale)
    eager = F.scaled_dot_product_attention(q, k, v, scale=scale)
    assert_as_accurate_as_eager(found, eager, truth)
    assert launches == [b * heads * queries]


def test_a_few_queries_at_a_time() -> None:
    q, k, v = torch.randn(3, 1, 2, 300, 264, dtype=torch.float16).unbind()
    whole, _ = attend(q, k, v)
    with patch.object(wide_attention, "SCORES_BYTES", 4 * 2 * 300 * 150):
        parts, launches = attend(q, k, v)
    assert launches == [2 * 128, 2 * 128, 2 * 44]
    assert torch.equal(whole, parts)


def test_chunks() -> None:
    assert chunk_of(4096, 4096) == 4096  # 64 MB of scores
    assert chunk_of(16384, 16384) == 4096
    assert chunk_of(65536, 65536) == 1024
    assert chunk_of(10**6, 10**6) == 128
    assert chunk_of(7, 10**6) == 7


WIDE = {"causal": False, "scale": None}
SHAPE = (symbol("b"), const(1), symbol("n"), const(512))


@pytest.mark.parametrize(
    ("attrs", "shapes", "dtype", "expected"),
    [
        (WIDE, [SHAPE] * 3, torch.float16, True),
        (WIDE, [SHAPE] * 3, torch.bfloat16, True),
        (WIDE, [SHAPE] * 3, torch.float32, False),
        (WIDE, [SHAPE] * 4, torch.float16, False),  # with a mask
        (WIDE | {"causal": True}, [SHAPE] * 3, torch.float16, False),
        (WIDE | {"scale": -1.0}, [SHAPE] * 3, torch.float16, False),
        (WIDE, [(*SHAPE[:3], const(256))] * 3, torch.float16, False),
        (WIDE, [(*SHAPE[:3], const(300))] * 3, torch.float16, False),
    ],
)
def test_which_calls(attrs, shapes, dtype, expected) -> None:
    assert is_wide(attrs, shapes, dtype) == expected


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.heads = nn.Linear(width, 3 * width), heads

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("heads", [1, 2])
def test_on_a_gpu(heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Attention(512 * heads, heads).cuda().to(dtype).eval().requires_grad_(False)
    exact = Attention(512 * heads, heads).cuda().double()
    exact.load_state_dict(module.state_dict())
    inputs = [
        torch.randn(b, n, 512 * heads, device="cuda", dtype=dtype)
        for b, n in ((1, 4096), (3, 1000), (2, 37))
    ]
    with torch.no_grad():
        wanted = [(module(x), exact(x.double())) for x in inputs]
        for most in (256 << 20, 1 << 20):
            with patch.object(wide_attention, "SCORES_BYTES", most):
                strop.optimize(module, options=Options(strict=True))
                for x, (eager, truth) in zip(inputs, wanted, strict=True):
                    for _ in range(3):  # step by step, captured, replayed
                        assert_as_accurate_as_eager(module(x), eager, truth)
                assert not strop.explain(module).fallbacks
                strop.restore(module)

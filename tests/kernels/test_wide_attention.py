"""Attention of wide heads: its row kernel in the interpreter and the compiler, and the whole."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.ir.device import CPU, Device
from strop.ir.dims import const, symbol
from strop.kernels import library
from strop.kernels.attention import wide
from strop.kernels.attention.exp_rows import exp_rows
from strop.kernels.attention.wide import ROW, chunk_of
from strop.kernels.kernel import FASTEST, NEVER, RESULT, Launch, Launches, Torch
from strop.options import Options
from strop.runtime.run import launched_calls as executor
from strop.runtime.run.launched_calls import scratch_bytes
from strop.testing import assert_as_accurate_as_eager
from tests.codegen.test_triton_compile import compiled, disassemble, resources
from tests.gpus import A100, H100, RTX_5090
from tests.kernels.interpreted import Interpreted
from tests.kernels.launching import PLAIN, attends, call, launched, problem, refuse

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


# The products of half precision into fp32, which torch has on GPUs alone.
IN_FP32 = {
    "scores": lambda q, k, out: torch.bmm(q.float(), k.float().transpose(1, 2), out=out),
    "weighted": lambda weights, v, out: torch.bmm(weights.float(), v.float(), out=out),
}


def launches_of(asked: Any) -> Launches:
    found = ROW.launch(asked, H100)
    assert found is not None
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, list[int]]:
    """What the GPU computes, with its products in fp32 on this processor, and the rows of each
    launch between them."""
    kernels: Any = Interpreted()
    with patch.dict(executor.TORCH, IN_FP32):
        ready = launched(launches_of(attends(q, k, v, scale)), kernels)
        out = ready.allocating(refuse)((q, k, v))
    assert set(kernels.ran) == {"exp_rows"}
    assert not any(kernels.early)  # a library's product is the launch before each of them
    return out, [bound.scalars[1] for bound in kernels.bound]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("shape", "keys", "scale", "launches"),
    [
        ((1, 1, 64), 64, None, [64]),
        ((2, 3, 40), 17, 0.1, [3 * 40] * 2),
        ((3, 1, 40), 17, None, [3 * 40]),
        ((1, 2, 33), 50, None, [2 * 33]),
    ],
)
def test_as_accurate_as_torch(
    shape: tuple[int, int, int],
    keys: int,
    scale: float | None,
    launches: list[int],
    dtype: torch.dtype,
) -> None:
    """All heads of a picture at once, or all pictures of one head."""
    torch.manual_seed(0)
    b, heads, queries = shape
    q = torch.randn(b, queries, heads, 264, dtype=dtype).transpose(1, 2)
    k, v = torch.randn(2, b, heads, keys, 264, dtype=dtype).unbind()
    found, ran = attend(q, k, v, scale)
    truth = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), scale=scale)
    eager = F.scaled_dot_product_attention(q, k, v, scale=scale)
    assert_as_accurate_as_eager(found, eager, truth)
    assert ran == launches
    assert found.transpose(1, 2).is_contiguous()


def test_values_may_have_another_width() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 2, 20, 264, dtype=torch.float16).unbind()
    v = torch.randn(2, 2, 20, 24, dtype=torch.float16)
    found, _ = attend(q, k, v)
    assert found.shape == (2, 2, 20, 24)
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert_as_accurate_as_eager(found, F.scaled_dot_product_attention(q, k, v), truth)


@pytest.mark.parametrize(("batch", "heads"), [(1, 2), (2, 1), (2, 2)])
def test_a_few_queries_at_a_time(batch: int, heads: int) -> None:
    q, k, v = torch.randn(3, batch, heads, 300, 264, dtype=torch.float16).unbind()
    whole, _ = attend(q, k, v)
    with patch.object(wide, "SCORES_BYTES", 4 * 2 * 300 * 150):
        parts, launches = attend(q, k, v)
    pictures = batch if heads > 1 else 1
    assert launches == [2 * 128, 2 * 128, 2 * 44] * pictures
    assert torch.equal(whole, parts)


def test_operands_may_have_any_strides() -> None:
    """Slices of one product, heads that share their keys, and numbers that lie apart."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 40, 3, 2, 264, dtype=torch.float16).permute(2, 0, 3, 1, 4)
    wanted, _ = attend(*(x.contiguous() for x in (q, k, v)))
    assert torch.equal(attend(q, k, v)[0], wanted)
    assert torch.equal(attend(q, k.mT.contiguous().mT, v)[0], wanted)
    shared = k[:, :1].expand(-1, 2, -1, -1)
    assert torch.equal(attend(q, shared, v)[0], attend(q, shared.contiguous(), v)[0])


def test_the_library_does_what_lies_at_odd_addresses() -> None:
    q, k, v = torch.randn(3, 1, 1, 20, 264, dtype=torch.float16).unbind()
    moved = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    kernels, answer = Interpreted(), torch.zeros(1)
    ready = launched(launches_of(attends(moved, k, v)), kernels)
    with patch.dict(executor.TORCH, dict.fromkeys(executor.TORCH, refuse)):
        assert ready.allocating(lambda inputs: answer)((moved, k, v)) is answer
    assert not kernels.ran


@pytest.mark.parametrize("most", [256 << 20, 4 * 2 * 300 * 150])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_what_is_launched(batch: int, heads: int, most: int) -> None:
    """Each query of each head is computed once; parts share their working memory."""
    shape = (batch, heads, 300, 512)
    with patch.object(wide, "SCORES_BYTES", most):
        launches = launches_of(problem("attention", shape, shape, shape, **PLAIN))
    kinds = [part.name if isinstance(part, Torch) else part.source.name for part in launches.parts]
    rounds, rest = divmod(len(kinds), 4)
    assert kinds == ["scores", "exp_rows", "weighted", "divided"] * rounds
    assert not rest
    assert rounds == (batch if heads > 1 else 1) * len(range(0, 300, launches.scratch[0].shape[1]))
    done = torch.zeros(batch, heads, 300)
    for scores, part, _, last in zip(*[iter(launches.parts)] * 4, strict=True):
        assert isinstance(part, Launch)
        assert part.scalars[1] == math.prod(part.operands[0].shape[:2])
        assert scores.operands[0].piece == last.operands[2].piece
        assert last.operands[2].number == RESULT
        piece = done[..., None]
        for dim, begin, *length in last.operands[2].piece:
            piece = piece.narrow(dim, begin, *length) if length else piece.select(dim, begin)
        piece += 1
    assert torch.equal(done, torch.ones_like(done))
    assert (launches.result, launches.order) == (shape, (0, 2, 1, 3))
    together = heads if heads > 1 else batch
    queries = launches.scratch[0].shape[1]
    sizes = (300 * 4, 300 * 2, 4, 512 * 4)  # scores, weights, their sums, and sums of values
    assert scratch_bytes(launches) == sum(
        -(-together * queries * size // 256) * 256 for size in sizes
    )


def test_chunks() -> None:
    assert chunk_of(4096, 4096) == 4096  # 64 MB of scores
    assert chunk_of(16384, 16384) == 4096
    assert chunk_of(65536, 65536) == 1024
    assert chunk_of(10**6, 10**6) == 128
    assert chunk_of(7, 10**6) == 7


SHAPE = (symbol("b"), const(1), symbol("n"), const(512))


@pytest.mark.parametrize(
    ("attrs", "shapes", "dtype", "reason"),
    [
        (PLAIN, [SHAPE] * 3, torch.float16, ""),
        (PLAIN, [SHAPE] * 3, torch.bfloat16, ""),
        (PLAIN, [SHAPE] * 3, torch.float32, "computes fp16 and bf16"),
        (PLAIN, [SHAPE] * 4, torch.float16, "without a mask"),
        ({**PLAIN, "causal": True}, [SHAPE] * 3, torch.float16, "without a mask"),
        ({**PLAIN, "scale": -1.0}, [SHAPE] * 3, torch.float16, "a positive scale"),
        (PLAIN, [(*SHAPE[:3], const(256))] * 3, torch.float16, "heads above 256"),
        (PLAIN, [(*SHAPE[:3], const(300))] * 3, torch.float16, "multiples of 8"),
        (PLAIN, [SHAPE, SHAPE, (*SHAPE[:3], const(20))], torch.float16, "multiples of 8"),
        (PLAIN, [SHAPE, SHAPE[2:], SHAPE[2:]], torch.float16, "(B, H, S, D)"),
    ],
)
def test_which_calls(attrs, shapes, dtype, reason: str) -> None:
    for device in (A100, H100, RTX_5090):
        found = ROW.supports(call("attention", *shapes, dtype=dtype, **attrs), device)
        assert reason in found
        assert bool(reason) == bool(found)
    given = call("attention", *shapes, dtype=dtype, **attrs)
    assert ROW.supports(given, CPU) == "runs on GPUs"


@pytest.mark.parametrize(
    ("q", "k", "v", "cost"),
    [
        ((2, 2, 64, 512), (2, 2, 77, 512), (2, 2, 77, 512), FASTEST),
        ((2, 2, 64, 512), (2, 2, 77, 512), (2, 2, 77, 64), FASTEST),
        ((2, 2, 64, 512), (1, 2, 77, 512), (1, 2, 77, 512), NEVER),
        ((2, 2, 64, 512), (2, 1, 77, 512), (2, 1, 77, 512), NEVER),
        ((2, 2, 64, 512), (2, 2, 77, 512), (2, 2, 78, 512), NEVER),
        ((2, 2, 64, 512), (2, 2, 77, 512), (2, 1, 77, 512), NEVER),
        ((0, 1, 2, 512), (0, 1, 2, 512), (0, 1, 2, 512), NEVER),
        ((2, 2, 64, 512), (2, 2, 0, 512), (2, 2, 0, 512), NEVER),
    ],
)
def test_what_is_broadcast_or_empty_is_for_the_library(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], cost: float
) -> None:
    asked = problem("attention", q, k, v, **PLAIN)
    assert ROW.cost_us(asked, H100) == cost
    chosen = library.select(asked.call, asked, H100).kernel
    assert chosen == ("wide_attention" if cost == FASTEST else "sdpa")


@pytest.mark.parametrize("device", [A100, H100, RTX_5090], ids=lambda device: device.name)
def test_rows_are_known_before(device: Device) -> None:
    """Their kernel has two forms, by the length of a row."""
    asked, seen = call("attention", *[SHAPE] * 3, **PLAIN), set()
    known = list(library.forms(asked, device))
    assert len(known) == len(set(known)) == 2
    for queries in (64, 77, 1024, 4099, 16384):
        choice = library.select(asked, asked.at({"b": 2, "n": queries}), device)
        assert choice.kernel == "wide_attention"
        assert set(choice.sources) <= set(known)
        seen |= set(choice.sources)
    assert seen == set(known)


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
            library.select.cache_clear()
            with patch.object(wide, "SCORES_BYTES", most):
                strop.optimize(module, options=Options(strict=True))
                for x, (eager, truth) in zip(inputs, wanted, strict=True):
                    for _ in range(3):  # step by step, captured, replayed
                        assert_as_accurate_as_eager(module(x), eager, truth)
                assert not strop.explain(module).fallbacks
                strop.restore(module)
        library.select.cache_clear()

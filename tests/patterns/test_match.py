"""Where patterns match, where not, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.errors import PatternError
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import Function
from tests.patterns.searches import (
    Block,
    attention,
    declare,
    matched,
    norm_silu,
    optimized,
    reasons,
    rms_by_hand,
    statistics,
    swiglu,
    unit,
)

# matches


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_graph_for_every_size(dtype: torch.dtype, cache: str) -> None:
    eager, ours = Block(), Block().to(dtype)
    _, kernel = declare(norm_silu)
    optimized(ours, cache, check=True)
    shapes = [(2, 4, 8, 8), (1, 4, 16, 8), (3, 4, 4, 12), (2, 4, 5, 7), (4, 4, 8, 8)]
    half, exact = Block().to(dtype), eager.double()
    for shape in shapes:
        x = torch.randn(shape).to(dtype)
        with torch.no_grad():
            assert_as_accurate_as_eager(ours(x), half(x), exact(x.double()))
    assert ours.forward.variants.num_captures == 1
    assert ours.forward.counters.findings == []
    sides = [((b, 16, h, w), (16,), (16,)) for b, _, h, w in shapes]
    assert kernel.calls == [(*s, eps) for s in sides for eps in (1e-6, 1e-3)]
    assert matched(ours) == ["Kernel"] * 2
    assert reasons(ours) == ["differs at gelu in Block: silu expected, gelu found"]


HEADS = 4


def heads(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (
        t.view(t.shape[0], t.shape[1], HEADS, -1).transpose(1, 2) for t in (x @ w).chunk(3, -1)
    )
    return attention(q, k, v).transpose(1, 2).reshape(x.shape)


# what is written otherwise, and yet the same
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "operands change places": (swiglu, lambda x, y: y * F.silu(x), ((3, 6, 5), (3, 6, 5))),
    "pieces of one tensor": (swiglu, lambda x: F.silu(x[:, :8]) * x[:, 8:], ((3, 16),)),
    "views behind": (swiglu, lambda x, y: swiglu(x, y).t().reshape(-1), ((3, 16), (3, 16))),
    "a folded result": (swiglu, lambda x, y: swiglu(x, y).view(-1, 2).sum(0), ((3, 8), (3, 8))),
    "the same twice": (swiglu, lambda x: swiglu(x, x) + 1, ((3, 16),)),
    "in a module's way": (swiglu, lambda x, y: nn.SiLU()(x).mul(y), ((3, 16), (3, 16))),
    "heads of attention": (attention, heads, ((2, 8, 32), (32, 96))),
    "a size's root": (attention, lambda q, k, v: attention(q, k, v) + 1, ((2, 4, 8, 16),) * 3),
    "a root that others read": (
        attention,
        lambda q, k, v: attention(q, k, v) * q.shape[-1] ** 0.5,
        ((2, 4, 8, 16),) * 3,
    ),
    "two results": (statistics, lambda x: [r + 1 for r in statistics(x)], ((3, 16),)),
    "another eps": (rms_by_hand, lambda x, w: rms_by_hand(x, w, eps=0.1), ((2, 3, 8), (8,))),
    "in each other": (swiglu, lambda x, y: swiglu(swiglu(x, y), y), ((3, 16), (3, 16))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_written_otherwise(case: str, dtype: torch.dtype, cache: str) -> None:
    search, function, shapes = CASES[case]
    _, kernel = declare(search, name="mine")
    module = optimized(Function(function), cache, check=True)
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    torch.testing.assert_close(module(*given), function(*given), rtol=2e-2, atol=2e-2)
    count = 2 if case == "in each other" else 1
    assert matched(module) == ["mine"] * count
    assert len(kernel.calls) == count
    assert module.forward.counters.findings == []
    assert reasons(module) == []


NEAR: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...], str]] = {
    "a reader inside": (
        swiglu,
        lambda x, y: (swiglu(x, y), F.silu(x) + 1),
        ((3, 8), (3, 8)),
        "its silu is read elsewhere, by add in Function",
    ),
    "a result inside": (
        swiglu,
        lambda x, y: (swiglu(x, y), F.silu(x)),
        ((3, 8), (3, 8)),
        "its silu is a result of the graph as well",
    ),
    "another number": (
        unit,
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
        ((2, 8),),
        "differs at add in Function: operand 1e-06 expected, 1e-05 found",
    ),
    "another dim": (
        unit,
        lambda x: x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6),
        ((2, 8),),
        "differs at mean in Function: dims=(1,) expected, (0,) found",
    ),
    "another type inside": (
        unit,
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, True, dtype=torch.float64) + 1e-6),
        ((2, 8),),
        "differs at mean in Function: ",
    ),
    "a number for a size": (
        attention,
        lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) / 4.0, -1) @ v,
        ((2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16)),
        "it has no sqrt(d0_3)",
    ),
    "a result of the graph": (
        rms_by_hand,
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        ((2, 8), (8,)),
        "differs behind mul in Function: mul expected, a result of the graph",
    ),
}


@pytest.mark.parametrize("case", NEAR)
def test_near_miss(case: str, cache: str) -> None:
    search, function, shapes, reason = NEAR[case]
    _, kernel = declare(search)
    module = optimized(Function(function), cache)
    given = [torch.randn(shape) for shape in shapes]
    torch.testing.assert_close(module(*given), function(*given))
    assert len(reasons(module)) == 1
    assert reasons(module)[0].startswith(reason)
    assert matched(module) == kernel.calls == []


def test_another_number_of_groups(cache: str) -> None:
    _, kernel = declare(norm_silu)
    module = optimized(nn.Sequential(nn.GroupNorm(2, 16), nn.SiLU()), cache)
    module(torch.randn(2, 16, 4, 4))
    (reason,) = reasons(module)
    sizes = "float32[b, 4, 1, 1] expected, float32[b, 2, 1, 1] found"
    assert reason == f"differs at mean in 0: {sizes}"
    assert not kernel.calls


def test_nothing_alike_is_no_near_miss(cache: str) -> None:
    declare(rms_by_hand)
    module = optimized(Function(lambda x: (x * 2).relu()), cache)
    module(torch.randn(3, 8))
    assert reasons(module) == []


WHEN: dict[str, tuple[Callable[..., Any], str | None]] = {
    "yes": (lambda gate, up: gate.shape[1] == 8 and not up.is_weight, None),
    "no": (lambda gate, up: gate.dtype is torch.bfloat16, "when said no"),
    "text": (lambda gate, up: f"{gate.ndim} dims on {gate.device}", "when said: 2 dims on cpu"),
    "symbolic, for all": (lambda gate, up: gate.shape[0] >= 1 and gate.shape[0] > 0, None),
    "symbolic": (
        lambda gate, up: gate.shape[0] <= 4,
        "when asks for b <= 4, which is not the same for all sizes",
    ),
}


@pytest.mark.parametrize("case", WHEN)
def test_when(case: str, cache: str) -> None:
    when, reason = WHEN[case]
    declare(swiglu, when=when)

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Linear(4, 16)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.both(x).chunk(2, -1)
            return swiglu(gate, up)

    module = optimized(Halves(), cache)
    module(torch.randn(2, 4))
    assert reasons(module) == ([] if reason is None else [reason])
    assert len(matched(module)) == (reason is None)


def test_what_when_returns_and_raises(cache: str) -> None:
    pattern, _ = declare(swiglu, when=lambda gate, up: 1)
    module = optimized(Function(swiglu), cache)
    with pytest.raises(PatternError, match="when returned 1; it returns True, or False or a text"):
        module(torch.randn(2, 8), torch.randn(2, 8))
    pattern.remove()
    declare(swiglu, when=lambda gate, up: gate.size)
    with pytest.raises(AttributeError, match="size") as caught:
        module(torch.randn(2, 8), torch.randn(2, 8))
    (note,) = caught.value.__notes__
    assert (
        note == "raised by when of the pattern 'Kernel', for (float32[b, d1_1], float32[b, d1_1])"
    )

"""Own kernels in the place of subgraphs: where they match, where not and why, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.errors import PatternError
from strop.patterns import registry
from strop.patterns.pattern import Pattern
from strop.runtime import aot
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import Function


@pytest.fixture(autouse=True)
def no_patterns() -> Iterator[None]:
    assert not registry.active()
    yield
    for pattern in registry.active():
        pattern.remove()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


class Kernel:
    """A replacement that runs torch and notes each call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, list[tuple[Any, ...]]()

    def __call__(self, *tensors: Tensor, **attributes: Any) -> Any:
        self.calls.append((*(tuple(t.shape) for t in tensors), *attributes.values()))
        return self.function(*tensors, **attributes)


def norm_silu(x: Tensor, w: Tensor, b: Tensor, *, eps: float = 1e-5) -> Tensor:
    return F.silu(F.group_norm(x, 4, w, b, eps))


def rms_by_hand(x: Tensor, w: Tensor, *, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.softmax(-1), x.sum(-1)


SIZES = {
    norm_silu: ((2, 8, 4, 4), (8,), (8,)),
    rms_by_hand: ((2, 8), (8,)),
    unit: ((2, 8),),
    swiglu: ((2, 8), (2, 8)),
    attention: ((2, 4, 8, 16),) * 3,
    statistics: ((2, 8),),
}


def declare(search: Callable[..., Any], replace: Callable[..., Any] | None = None, **more: Any
            ) -> tuple[Pattern, Kernel]:  # fmt: skip
    kernel = Kernel(replace or search)
    example = [torch.empty(shape) for shape in SIZES[search]]
    return strop.pattern(search, kernel, example=example, **more), kernel


def optimized(module: nn.Module, cache: str, **more: Any) -> Any:
    options = strop.Options(cache_dir=cache, strict=True, **more)
    return strop.optimize(module.eval().requires_grad_(False), options=options)


def matched(module: Any, number: int = 0) -> list[str]:
    """The names in the calls of a graph."""
    steps = module.forward.variants.all[number].program.call_steps
    return [dict(step.attrs)["name"] for step in steps if step.op == "pattern"]


def reasons(module: Any) -> list[str]:
    compiled = module.forward.variants.all[-1].compiled
    return [miss.reason for miss in compiled.patterns.misses]


class Block(nn.Module):
    """Two norms with another eps each, and one with another activation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 16, 3, padding=1)
        self.first, self.second = nn.GroupNorm(4, 16, eps=1e-6), nn.GroupNorm(4, 16, eps=1e-3)
        self.third = nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.second(F.silu(self.first(self.conv(x)))))
        return F.gelu(self.third(y))


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
        swiglu, lambda x, y: (swiglu(x, y), F.silu(x) + 1), ((3, 8), (3, 8)),
        "its silu is read elsewhere, by add in Function",
    ),
    "a result inside": (
        swiglu, lambda x, y: (swiglu(x, y), F.silu(x)), ((3, 8), (3, 8)),
        "its silu is a result of the graph as well",
    ),
    "another number": (
        unit, lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5), ((2, 8),),
        "differs at add in Function: operand 1e-06 expected, 1e-05 found",
    ),
    "another dim": (
        unit, lambda x: x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6), ((2, 8),),
        "differs at mean in Function: dims=(1,) expected, (0,) found",
    ),
    "another type inside": (
        unit, lambda x: x * torch.rsqrt(x.pow(2).mean(-1, True, dtype=torch.float64) + 1e-6),
        ((2, 8),), "differs at mean in Function: ",
    ),
    "a fixed size": (
        attention, lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) / 4.0, -1) @ v,
        ((2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16)),
        "search cannot be traced for these arguments: it holds for arguments of the shape",
    ),
    "a result of the graph": (
        rms_by_hand, lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        ((2, 8), (8,)), "differs behind mul in Function: mul expected, a result of the graph",
    ),
}  # fmt: skip


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
    with pytest.raises(AttributeError, match="size"):
        module(torch.randn(2, 8), torch.randn(2, 8))


# several patterns, and for how long


def test_the_first_one_takes_what_it_finds(cache: str) -> None:
    declare(swiglu, name="whole")
    strop.pattern(F.silu, lambda x: F.silu(x), example=[torch.empty(2)], name="part")
    module = optimized(Function(lambda x, y: swiglu(x, y) + F.silu(y)), cache)
    module(torch.randn(2, 8), torch.randn(2, 8))
    assert sorted(matched(module)) == ["part", "whole"]


def test_removal_and_return(cache: str) -> None:
    pattern, kernel = declare(swiglu)
    module = optimized(Function(swiglu), cache)
    given = torch.randn(2, 8), torch.randn(2, 8)
    made = [module(*given) for _ in range(3)]
    pattern.remove()
    pattern.remove()
    assert len(kernel.calls) == 3
    made += [module(*given) for _ in range(3)]
    assert len(kernel.calls) == 3
    assert [v.from_disk for v in module.forward.variants.all] == [False, False]
    with pattern:
        made.append(module(*given))
    assert len(kernel.calls) == 4
    made.append(module(*given))
    assert len(kernel.calls) == 4
    assert module.forward.variants.num_captures == 2
    assert strop.explain(module).num_recompiles == 0
    for result in made:
        torch.testing.assert_close(result, swiglu(*given))


class Gated(nn.Module):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate, up)


def test_stored_plans(tmp_path: Path) -> None:
    """Loaded where the pattern is in force, and only there."""
    given = torch.randn(2, 8), torch.randn(2, 8)

    def used() -> tuple[bool, list[str]]:
        module = optimized(Gated(), str(tmp_path))
        torch.testing.assert_close(module(*given), swiglu(*given))
        return module.forward.variants.all[0].from_disk, matched(module)

    assert used() == (False, [])
    with declare(swiglu, name="a")[0]:
        assert used() == (False, ["a"])
    assert used() == (True, [])
    again, kernel = declare(swiglu, name="a")
    assert used() == (True, ["a"])
    assert len(kernel.calls) == 1, "the replacement of this process"
    again.remove()
    for other in ({"name": "b"}, {"name": "a", "when": lambda gate, up: True}):
        with declare(swiglu, **other)[0]:
            assert used() == (False, [other["name"]])
    with declare(swiglu, name="a", when=lambda gate, up: "never")[0]:
        assert used() == (False, [])


def test_other_threads_see_one_state(cache: str) -> None:
    """Declared and removed while others call: results are right, programs those of their keys."""
    module = optimized(Function(lambda x, y: swiglu(x, y) * 2), cache)
    given, wrong = (torch.randn(2, 8), torch.randn(2, 8)), list[Any]()
    expected, stop = swiglu(*given) * 2, threading.Event()

    def call() -> None:
        while not stop.is_set():
            if not torch.allclose(module(*given), expected, atol=1e-5):
                wrong.append("result")

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        declare(swiglu)[0].remove()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    for (structure, *_), variants in module.forward.variants.variants.items():
        for variant in variants:
            names = [dict(s.attrs)["name"] for s in variant.program.call_steps]
            assert names == [pattern.name for pattern in structure[1]]


def test_numerics_by_name(cache: str) -> None:
    declare(swiglu, lambda gate, up: gate.clamp(0) * up, numerics="relu_for_silu")
    given = torch.randn(2, 8), torch.randn(2, 8)
    plain = optimized(Function(swiglu), cache, check=True)
    torch.testing.assert_close(plain(*given), swiglu(*given))
    assert reasons(plain) == [
        "numerics='relu_for_silu' is not allowed: Options(numerics=(...,)) lists it"
    ]
    quick = optimized(Function(swiglu), cache, check=True, numerics=("relu_for_silu",))
    torch.testing.assert_close(quick(*given), given[0].clamp(0) * given[1])
    assert quick.forward.counters.findings == []


def test_an_inexact_one_is_found(cache: str) -> None:
    declare(swiglu, lambda gate, up: swiglu(gate, up) * 1.001)
    module = optimized(Function(swiglu), cache, check=True)
    module(torch.randn(64, 80), torch.randn(64, 80))
    (finding,) = module.forward.counters.findings
    assert "pattern Kernel of Function, is inaccurate" in finding


def test_disabled(cache: str) -> None:
    _, kernel = declare(swiglu)
    module = optimized(Function(swiglu), cache, disable=("patterns",))
    module(torch.randn(2, 8), torch.randn(2, 8))
    assert not kernel.calls


# torch.compile


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[aot.AotLog]:
    torch._dynamo.reset()
    monkeypatch.setattr(aot, "AOT_LOG", aot.AotLog())
    yield aot.AOT_LOG
    torch._dynamo.reset()


def test_torch_compile(dynamo: aot.AotLog, cache: str) -> None:
    layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())

    def gelu_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, b))

    kernel = Kernel(gelu_linear)
    example = torch.empty(2, 4), torch.empty(8, 4), torch.empty(8)
    pattern = strop.pattern(gelu_linear, kernel, example=example)
    fast = torch.compile(layers, backend="strop", options={"cache_dir": cache, "strict": True})
    with torch.no_grad():
        for rows in (2, 3, 5, 9):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(fast(x), layers(x))
        assert len(dynamo.records) == 2, "fixed sizes, then any"
        assert len(kernel.calls) == 8
        pattern.remove()
        torch.testing.assert_close(fast(x), layers(x))
        assert len(kernel.calls) == 8
    with pattern:  # for the backward the value before the activation is a result
        fast(x).sum().backward()
    misses = dynamo.records[-2].compiled.patterns.misses
    assert [m.reason for m in misses] == ["its linear is a result of the graph as well"] * 2
    assert not dynamo.fallbacks


# what a replacement returns and raises

WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "shape": (
        lambda gate, up: gate[:1],
        r"result 0 of replace is float32\[1, 8\] on cpu, search gives float32\[2, 8\] on cpu for"
        r" \(float32\[2, 8\], float32\[2, 8\]\)",
    ),
    "dtype": (
        lambda gate, up: gate.half(),
        r"float16\[2, 8\] on cpu, search gives float32\[2, 8\]",
    ),
    "kind": (lambda gate, up: 3, "a int, not a tensor"),
    "count": (lambda gate, up: (gate, up), "a tuple, not a tensor"),
    "mutation": (lambda gate, up: gate.mul_(up) + 0, "replace wrote into an argument"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_result(case: str, cache: str) -> None:
    replace, message = WRONG[case]
    declare(swiglu, replace, name="mine")
    module = optimized(Function(swiglu), cache)
    with pytest.raises(PatternError, match=message) as caught:
        module(torch.randn(2, 8), torch.randn(2, 8))
    assert "'mine'" in str(caught.value)


def test_its_own_exception(cache: str) -> None:
    def broken(gate: Tensor, up: Tensor) -> Tensor:
        if gate.shape[0] == 3:
            raise ZeroDivisionError("three")
        return swiglu(gate, up)

    declare(swiglu, broken, name="broken")
    module = optimized(Function(swiglu), cache)
    for rows in (2, 3, 2):
        given = torch.randn(rows, 8), torch.randn(rows, 8)
        if rows == 3:
            with pytest.raises(ZeroDivisionError, match="three") as caught:
                module(*given)
            assert "pattern 'broken'" in caught.value.__notes__[0]
        else:
            torch.testing.assert_close(module(*given), swiglu(*given))


def test_a_returned_argument_is_copied(cache: str) -> None:
    strop.pattern(F.relu, lambda x: x, example=[torch.empty(2)], name="identity")
    module = optimized(Function(lambda x: F.relu(x + 1)), cache)
    x = torch.rand(3, 4)
    first, second = module(x), module(-x)
    torch.testing.assert_close((first, second), (x + 1, 1 - x))


def test_arguments_are_dense_unless_told(cache: str) -> None:
    seen: list[tuple[int, ...]] = []

    def noted(x: Tensor) -> Tensor:
        seen.append(x.stride())
        return F.silu(x)

    for contiguous in (True, False):
        example = [torch.empty(2)]
        with strop.pattern(F.silu, noted, example=example, contiguous=contiguous):
            module = optimized(Function(lambda x: F.silu(x.t())), cache)
            x = torch.randn(3, 5)
            torch.testing.assert_close(module(x), F.silu(x.t()))
    assert seen == [(3, 1), (1, 5)]


def test_images_stay_as_they_lie(cache: str) -> None:
    """Between convolutions in channels-last order, if the kernel can take it."""
    _, kernel = declare(norm_silu, contiguous=False)
    seen = []
    kernel.function = lambda x, w, b, eps: (seen.append(x.stride()), norm_silu(x, w, b, eps=eps))[1]
    layers = nn.Sequential(nn.Conv2d(4, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 4, 3))
    x = torch.randn(2, 4, 8, 8)
    expected = layers(x).detach()
    module = optimized(layers, cache, check=True)
    torch.testing.assert_close(module(x), expected)
    assert seen == [(16 * 36, 1, 16 * 6, 16)]
    kernels = module.forward.variants.all[0].program.kernel_steps
    assert [step.ops for step in kernels].count(("copy",)) == 1, "the argument's alone"
    assert module.forward.counters.findings == []


def test_inference_mode(cache: str) -> None:
    _, kernel = declare(swiglu)
    module = optimized(Function(swiglu), cache)
    with torch.inference_mode():
        given = torch.randn(2, 8), torch.randn(2, 8)
        torch.testing.assert_close(module(*given), swiglu(*given))
    assert len(kernel.calls) == 1


def test_the_same_declared_twice(cache: str) -> None:
    """As a notebook does: the first one runs until it is removed."""
    (first, mine), (second, other) = declare(swiglu), declare(swiglu)
    assert first.key == second.key
    module = optimized(Function(swiglu), cache)
    given = torch.randn(2, 8), torch.randn(2, 8)
    for removed, kernel in ((None, mine), (first, other)):
        if removed:
            removed.remove()
        module(*given)
        assert len(kernel.calls) == 1


def test_results_without_elements(cache: str) -> None:
    _, kernel = declare(statistics)
    module = optimized(Function(lambda x: [r * 2 for r in statistics(x.relu())]), cache)
    module(torch.randn(2, 3, 8))
    assert [tuple(r.shape) for r in module(torch.randn(0, 3, 8))] == [(0, 3, 8), (0, 3)]
    assert len(kernel.calls) == 1


# declarations that can never match

EMPTY, MANY = torch.empty(2, 8), torch.zeros(4, 2, 8)
BAD: dict[str, tuple[Callable[..., Any], Any, dict[str, Any], str]] = {
    "untraceable": (
        lambda x: x * float(x.sum()), None, {}, r"cannot be traced with the example \(x\[2, 8\]\)"
    ),
    "nothing computed": (lambda x: x.t(), None, {}, "result 0 of search is a view or a cast"),
    "no tensor": (lambda x: 3, None, {}, "has to return a tensor"),
    "a dictionary": (lambda x: {"a": x + 1}, None, {}, "has to return a tensor"),
    "an argument unread": (lambda x, y: x + 1, None, {}, "search does not read y"),
    "apart": (lambda x, y: (x + 1, y + 1), None, {}, "no result of search depends on all"),
    "writes": (lambda x: x.mul_(2) + 1, None, {}, "writes into an argument"),
    "random": (lambda x: x + torch.randn(2, 8), None, {}, "search draws random numbers"),
    "a tensor of its own": (lambda x: x + MANY, None, {}, "makes tensors of its own"),
    "few examples": (
        lambda x, y: x + y, None, {"example": [EMPTY]}, r"takes 2 tensors \(x, y\).* not \(Tensor\)"
    ),
    "no example": (lambda x: x + 1, None, {"example": EMPTY}, "not a Tensor"),
    "sizes for tensors": (lambda x: x + 1, None, {"example": (2, 8)}, r"not \(int, int\)"),
    "stars": (lambda *xs: xs[0] + 1, None, {}, "name each tensor"),
    "a keyword": (lambda x, *, how="a": x + 1, None, {}, "numbers with a default: how"),
    "other arguments": (lambda x: x + 1, lambda: None, {}, r"replace has to take \(x\)"),
    "built in": (torch.sigmoid, None, {"example": [EMPTY]}, "give a Python function"),
    "no function": (lambda x: x + 1, 3, {}, "replace is 3, whose arguments cannot be told"),
    "numerics": (lambda x: x + 1, None, {"numerics": "a b"}, "numerics='a b'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_declaration(case: str) -> None:
    search, replace, more, message = BAD[case]
    count = search.__code__.co_argcount if hasattr(search, "__code__") else 0
    more = {"example": [EMPTY] * count, "name": "mine"} | more
    with pytest.raises(PatternError, match=message) as caught:
        strop.pattern(search, replace or search, **more)
    assert "'mine'" in str(caught.value)
    assert not registry.active()


# explain


def test_explain(cache: str) -> None:
    declare(norm_silu, name="norm_silu")
    declare(attention, name="unused")
    module = optimized(Block(), cache, record=True)
    module(torch.randn(2, 4, 8, 8))
    report = strop.explain(module)
    used, unused = report.graphs[0].patterns
    assert (used.name, used.origins) == ("norm_silu", ("first", "second"))
    assert used.misses == (("third", "differs at gelu in Block: silu expected, gelu found"),)
    assert (unused.name, unused.origins, unused.misses) == ("unused", (), ())
    assert report.calls["pattern norm_silu"] == 2
    assert report.num_opaque_calls == 0
    text = str(report)
    assert "2x pattern norm_silu  <- first and 1 more" in text
    assert "not in third: differs at gelu in Block: silu expected, gelu found" in text
    assert "0x pattern unused" in text
    assert "norm_silu: 2 matches, 1 near misses" in report.html
    assert "silu expected, gelu found" in report.html
    assert "after patterns" in report.html
    fresh = optimized(Block(), cache)
    fresh(torch.randn(2, 4, 8, 8))
    (row,) = strop.explain(fresh).graphs[0].patterns
    assert fresh.forward.variants.all[0].from_disk
    assert (row.name, len(row.origins), row.misses) == ("norm_silu", 2, ())


def test_a_program_of_another_process(tmp_path: Path, cache: str) -> None:
    """A dump runs by itself only where its patterns are declared."""
    with pytest.raises(PatternError, match="'mine', which this process has not declared"):
        registry.find("0" * 32, "mine")
    with declare(swiglu, name="mine")[0]:
        module = optimized(Function(swiglu), cache, dump=str(tmp_path))
        module(torch.randn(2, 8), torch.randn(2, 8))
    (folder,) = tmp_path.iterdir()
    assert "call   pattern mine(" in (folder / "program.txt").read_text()
    assert "pattern(in0, in1" in (folder / "02_after_patterns.txt").read_text()

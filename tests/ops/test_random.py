"""Randomness: dropout in kernels, random tensors in torch, and never a number baked into a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.codegen import cpp, triton
from strop.codegen.triton_interpreter import interpret
from strop.ir.philox import uniform
from strop.options import Options
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.cubin import compile_cubin
from strop.runtime.build.native import NativeKernels
from tests.codegen import kernels
from tests.codegen.cpp_launch import launch
from tests.e2e import tiny

I64, F32 = torch.int64, torch.float32
SAMPLE = kernels.pointwise("uniform", [I64, I64], F32)
COUNT = 1000
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def optimized(function: Callable[..., Any], folder: Path, **options: Any) -> Any:
    options = {"cache_dir": str(folder), "strict": True} | options
    return strop.optimize(Function(function).eval(), options=Options(**options))


# the generator


def test_the_numbers_are_philox() -> None:
    """The first word of the published vector for zeros throughout."""
    found = uniform(torch.tensor(0), torch.tensor(0))
    assert found.item() == pytest.approx(0x6627E8D5 / 2**31, rel=1e-6)


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(-(2**63), 2**63 - 1, (COUNT,), generator=generator) for _ in range(2)]
    drawn[1][:100] = torch.arange(100)
    drawn[1][100:200] = torch.arange(2**32 - 50, 2**32 + 50)
    return drawn


def test_cpp_draws_the_same_bits(tmp_path: Path) -> None:
    emitted, out = cpp.emit(SAMPLE.kernel), torch.empty(COUNT)
    native = NativeKernels(DiskCache(tmp_path))
    tensors = [*operands(), out]
    launch(native.build([emitted.source])[emitted.source], emitted, tensors, {"n": COUNT})
    assert torch.equal(out, uniform(*operands()))


def test_triton_draws_the_same_bits() -> None:
    emitted, out = triton.emit(SAMPLE.kernel), torch.empty(COUNT)
    sizes = {f"s{i}": size.eval({"n": COUNT}) for i, size in enumerate(emitted.scalars)}
    interpret(emitted.source, [*operands(), out], sizes)
    assert torch.equal(out, uniform(*operands()))


def test_triton_compiles_it() -> None:
    assert compile_cubin(triton.emit(SAMPLE.kernel).source, 90).code


# dropout


def dropped(x: Tensor) -> tuple[Tensor, Tensor]:
    first = F.dropout(x * 2, 0.3, training=True)
    return first, F.dropout(x + 1, 0.75, training=True)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_has_the_right_distribution(device: str, tmp_path: Path) -> None:
    module = optimized(dropped, tmp_path)
    x = torch.ones(400, 500, device=device)
    torch.manual_seed(0)
    drawn = [module(x) for _ in range(3)]
    for p, value, results in zip((0.3, 0.75), (2.0, 2.0), zip(*drawn, strict=True), strict=True):
        for result in results:
            kept = result != 0
            torch.testing.assert_close(result[kept], torch.full_like(result[kept], value / (1 - p)))
            deviation = (p * (1 - p) / x.numel()) ** 0.5
            assert abs(kept.float().mean().item() - (1 - p)) < 5 * deviation
            for dim, others in ((0, 500), (1, 400)):  # rows and columns alike
                spread = (kept.float().mean(dim) - (1 - p)).std().item()
                assert spread == pytest.approx((p * (1 - p) * others / x.numel()) ** 0.5, rel=0.2)
    masks = [result != 0 for pair in drawn for result in pair]
    for n, mask in enumerate(masks):
        for other in masks[:n]:
            agreeing = (mask == other).float().mean().item()
            assert agreeing < 0.75, "calls and layers draw numbers of their own"


@pytest.mark.parametrize("device", DEVICES)
def test_the_seed_of_torch_decides(device: str, tmp_path: Path) -> None:
    x = torch.randn(30, 40, device=device)
    runs = []
    for _ in range(2):  # the second module comes from disk
        module = optimized(dropped, tmp_path)
        module(x)
        torch.manual_seed(5)
        runs.append([t.clone() for _ in range(4) for t in module(x)])
    assert all(map(torch.equal, *runs))
    assert not torch.equal(runs[0][0], runs[0][2])
    assert module.forward.variants.all[0].from_disk
    if device == "cuda":
        assert module.forward.counters.replays >= 4, "a graph draws anew at each replay"


def test_dropout_is_part_of_its_kernel(tmp_path: Path) -> None:
    module = optimized(lambda x: F.dropout(F.silu(x), 0.5, training=True) + 1, tmp_path)
    module(torch.randn(8, 8))
    (variant,) = module.forward.variants.all
    assert [step.op for step in variant.program.call_steps] == ["aten"]  # the seeds
    assert len(variant.program.kernel_steps) == 1


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_the_ends(p: float, tmp_path: Path) -> None:
    module = optimized(lambda x: F.dropout(x, p, training=True), tmp_path)
    x = torch.tensor([1.0, -2.0, float("inf")])
    torch.testing.assert_close(module(x), F.dropout(x, p, training=True), equal_nan=True)


def test_in_eval_mode_nothing_is_left_of_it(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU()).eval()
    strop.optimize(module, options=tiny.options(strict=True))
    with torch.no_grad():
        assert torch.equal(module(torch.ones(2, 8)), module(torch.ones(2, 8)))
    (variant,) = module.forward.variants.all
    assert not any(step.op == "aten" for step in variant.program.call_steps)


def test_training_through_dropout() -> None:
    """The mask of the forward is that of the backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5)).train()
    fast = torch.compile(copy.deepcopy(module), backend="strop", options={"strict": True})
    x = torch.randn(32, 16, requires_grad=True)
    y = fast(x)
    y.sum().backward()
    kept = (y != 0).float() * 2
    torch.testing.assert_close(x.grad, kept @ module[0].weight, rtol=1e-4, atol=1e-5)
    assert 0.4 < (y != 0).float().mean() < 0.6
    assert not torch.equal(fast(x), y)


# tensors that are random themselves

RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(3, 5, device=x.device) + x,
    "randn": lambda x: torch.randn(x.shape, device=x.device) * x,
    "rand_like": lambda x: torch.rand_like(x) + x,
    "randn_like": lambda x: torch.randn_like(x) + x,
    "randint": lambda x: torch.randint(0, 9, (3, 5), device=x.device) + x,
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)) + x,
    "normal_": lambda x: torch.empty_like(x).normal_() + x,
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1) + x,
    # numbers that are the defaults of the call in place, but not of the other form
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5) + x,
    "bernoulli_ of 0.2": lambda x: torch.empty_like(x).bernoulli_(0.2) + x,
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(torch.sigmoid(x)) + x,
    "normal_ of 0 and 2": lambda x: torch.empty_like(x).normal_(0, 2) + x,
    "uniform_ of 0 and 1": lambda x: torch.empty_like(x).uniform_(0, 1) + x,
    "exponential_": lambda x: torch.empty_like(x).exponential_(1) + x,
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.5) + x,
    "cauchy_": lambda x: torch.empty_like(x).cauchy_() + x,
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(1, 0.5) + x,
    "random_": lambda x: torch.empty_like(x).random_(7) + x,
    # of 15 rows, whole ones: of 3 two draws are the same too often
    "dropout1d": lambda x: F.dropout1d(x.reshape(15, 1), 0.5, training=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "two": lambda x: torch.rand_like(x) - torch.rand_like(x),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RANDOM)
def test_random_tensors_are_eagers(name: str, device: str, tmp_path: Path) -> None:
    """Fresh in each call, in eager's order: the same seed gives eager's own numbers."""
    module = optimized(RANDOM[name], tmp_path, strict=False)
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(device)
    module(x)
    for seed in (1, 2):
        torch.manual_seed(seed)
        found = [module(x) for _ in range(3)]
        torch.manual_seed(seed)
        for result in found:
            torch.testing.assert_close(result, RANDOM[name](x))
        assert not torch.equal(found[0], found[1])
    assert module.forward.counters.eager_calls == 0, module.forward.counters.fallbacks


class Owned(nn.Module):
    """Draws from a generator that is its own, or everybody's."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.own = [generator]

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(3, 5, generator=self.own[0])


def test_a_generator_is_respected() -> None:
    """A plan cannot hold one: eager draws from it, and says so."""
    generator = torch.Generator()
    module = strop.optimize(Owned(generator).eval(), options=tiny.options())
    x = torch.ones(3, 5)
    for seed in (1, 2):
        generator.manual_seed(seed)
        found = [module(x), module(x)]
        generator.manual_seed(seed)
        assert torch.equal(found[0], x + torch.rand(3, 5, generator=generator))
        assert torch.equal(found[1], x + torch.rand(3, 5, generator=generator))
    (reason,) = module.forward.counters.fallbacks
    assert "Generator" in reason

"""A hundred steps with everything in them, against fp64: no worse than torch's fused optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from strop import train
from strop.bench import models
from tests.train import judge

STEPS = 100
SOME_STEPS = 45  # where the arithmetic was judged before, and only the checks are new
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
# Equal arithmetic in another order is a few percent better or worse; a wrong formula is not.
MARGIN = 1.1


@cache
def expected(steps: int) -> judge.Run:
    return judge.judge(steps, judge.INFINITE.__contains__)


@cache
def peer(steps: int, device: str) -> judge.Run:
    return judge.torch_run(steps, device)


@pytest.mark.parametrize("kind", [train.GradScaler, torch.amp.GradScaler], ids=["strop", "torch"])
def test_loop(kind: type[torch.amp.GradScaler], device: str) -> None:
    steps = STEPS if kind is train.GradScaler else SOME_STEPS
    run, _ = judge.strop_run(steps, device, kind=kind)
    torchs, true = peer(steps, device), expected(steps)
    assert run.scales == torchs.scales
    assert len(set(run.scales)) > 5, "the scale has grown and backed off"
    for step, (norm, exact) in enumerate(zip(run.norms, true.norms, strict=True)):
        assert step in judge.INFINITE or norm == pytest.approx(exact, rel=1e-6)
    for name in ("params", "averages"):
        ours, theirs = (judge.errors(getattr(r, name), getattr(true, name)) for r in (run, torchs))
        for a, b in zip(ours, theirs, strict=True):
            assert a <= MARGIN * b, (name, ours, theirs)


@pytest.mark.parametrize("grads", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_another_type(grads: torch.dtype, device: str) -> None:
    """The judge's gradients fit in bf16; in fp16 the small ones round."""
    if not hasattr(torch.nn.Parameter(torch.zeros(1)), "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    steps = 12
    true = expected(steps)
    run, _ = judge.strop_run(steps, device, grads=grads)
    limit = 1e-6 if grads == torch.bfloat16 else 1e-4
    assert max(judge.errors(run.params, true.params)) < limit


# ---- the 686 parameters of Stable Diffusion 1.5's UNet, each width a part of its own -------------

PART = 64
CHANCE = 4.0  # standard errors; of two errors' ratio, which come from n numbers, it is 1 / sqrt(n)
EPS32 = torch.finfo(torch.float32).eps
# What a tensor may be off after 100 steps, whatever torch is: the norm, of which all tensors have a
# share in their clip, is added up in another order.
FEW_ULP = 8 * EPS32


@cache
def _shapes() -> tuple[tuple[int, ...], ...]:
    """The last layers first, so that gradients overflow in tensors of a few numbers."""
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        params = list(diffusers.UNet2DConditionModel(**models.SD15_UNET).parameters())
    assert len(params) == 686
    return tuple(tuple(n if n <= 4 else -(-n // PART) for n in p.shape) for p in reversed(params))


def _drawn(seed: int, sizes: Sequence[float]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator) * sizes[number % len(sizes)]
        for number, shape in enumerate(_shapes())
    ]


def _parameters(dtype: torch.dtype, device: str, seed: int = 0) -> list[nn.Parameter]:
    drawn = _drawn(seed, (0.02, 0.5, 1.0, 0.0, 0.1))
    return [nn.Parameter(value.to(device, dtype)) for value in drawn]


def _gradients(step: int) -> list[Tensor]:
    return _drawn(1000 + step, (1.0, 1e-3, 1.0, 1e-6, 30.0, 0.1, 0.0))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def place(request: pytest.FixtureRequest) -> str:
    """Where the parameters are: Triton's interpreter would take a minute for four steps."""
    return str(request.param)


@pytest.mark.nightly
def test_loop_over_a_unet(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``test_loop``: the skipped steps and the scales are those of torch's scaler."""
    monkeypatch.setattr(judge, "parameters", _parameters)
    monkeypatch.setattr(judge, "gradients", _gradients)
    true = judge.judge(STEPS, judge.INFINITE.__contains__)
    (run, _), torchs = judge.strop_run(STEPS, place), judge.torch_run(STEPS, place)
    assert run.scales == torchs.scales
    assert len(set(run.scales)) > 5, "the scale has grown and backed off"
    limits = [MARGIN + CHANCE / math.sqrt(math.prod(shape)) for shape in _shapes()]
    for name in ("params", "averages"):
        ours, theirs = (judge.errors(getattr(r, name), getattr(true, name)) for r in (run, torchs))
        assert torch.tensor(ours).norm() <= 1.05 * torch.tensor(theirs).norm()
        worse = [
            (a, b)
            for a, b, limit in zip(ours, theirs, limits, strict=True)
            if a > max(limit * b, FEW_ULP)
        ]
        assert not worse, (name, worse)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """fp64, on the CPU."""
    return torch.cat([t.detach().flatten().cpu() for t in tensors]).double()


@pytest.mark.nightly
def test_a_step_is_within_two_ulp(place: str) -> None:
    """Of each parameter, beside the formula in fp64 from the states that this step found. The ulp
    is that of the largest numbers which the step adds up: they may cancel."""
    params, lr = _parameters(torch.float32, place), judge.LR
    optimizer = train.FusedAdamW(params, lr=lr, weight_decay=judge.DECAY, max_grad_norm=1.0)
    m = v = torch.zeros(sum(p.numel() for p in params), dtype=torch.float64)
    for step in range(1, STEPS + 1):
        for p, grad in zip(params, _gradients(step), strict=True):
            p.grad = grad.to(place)
        before, g = _flat(params), _flat(_gradients(step))
        optimizer.step()
        g *= min(1.0, judge.MAX_NORM / (float(g.norm()) + 1e-6))
        size, m, v = (
            0.9 * m.abs() + 0.1 * g.abs(),
            0.9 * m + 0.1 * g,
            0.999 * v + 0.001 * g.square(),
        )
        rate = lr / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + judge.EPS)
        found, exact = _flat(params), before * (1 - lr * judge.DECAY) - rate * m
        ulp = EPS32 * (torch.maximum(before.abs(), found.abs()) + rate * size)
        off = (found - exact).abs() / ulp.clamp(min=1e-45)
        assert off.max() <= 2, (step, float(off.max()))
        states = [optimizer.state[p] for p in params]
        m, v = (_flat(state[name] for state in states) for name in ("exp_avg", "exp_avg_sq"))


# ---- rounding at random --------------------------------------------------------------------------

DRAWS = 1 << 20


def _rounded(x: Tensor, device: str, seed: int) -> Tensor:
    """To bf16, by a step from zero."""
    p = nn.Parameter(torch.zeros_like(x, dtype=torch.bfloat16, device=device))
    p.grad_dtype = torch.float32
    p.grad = -x.to(device)
    train.FusedSGD([p], lr=1.0, stochastic_rounding=True, seed=seed).step()
    return p.detach().float().cpu()


def test_a_million_draws_have_no_bias(place: str) -> None:
    """To four sigma: all together, by how near the neighbours are, by size, and beside the draw
    before. Numbers of both signs over 20 decades."""
    generator = torch.Generator().manual_seed(5)
    decades = torch.rand(DRAWS, generator=generator) * 20 - 10
    x = torch.randn(DRAWS, generator=generator) * 10**decades
    bits = x.view(torch.int32)
    low = (bits & ~0xFFFF).view(torch.float32)  # the neighbour that is nearer to zero
    high = ((bits & ~0xFFFF) + 0x10000).view(torch.float32)
    found = _rounded(x, place, seed=9)
    is_high = found == high
    assert (is_high | (found == low)).all()
    chance = (bits & 0xFFFF).double() / 0x10000
    off, spread = is_high.double() - chance, chance * (1 - chance)
    exponent = (bits >> 23) & 0xFF
    for group in (torch.zeros_like(exponent), (chance * 16).int(), exponent // 8):
        sums, variances = (
            torch.zeros(32, dtype=torch.float64).index_add_(0, group, part)
            for part in (off, spread)
        )
        assert (sums.abs() <= 4 * variances.sqrt()).all(), (sums / variances.sqrt()).tolist()
    pairs, variance = off[1:] * off[:-1], spread[1:] * spread[:-1]
    assert pairs.sum().abs() <= 4 * variance.sum().sqrt()
    other = _rounded(x, place, seed=10) == high
    assert 0.6 < (other == is_high).double().mean() < 0.7, "2/3 where seeds are independent"
    if place != "cpu":
        assert torch.equal(found, _rounded(x, "cpu", seed=9))

"""What the step does beside the update: averages, low-precision twins, random rounding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from strop import train
from strop.errors import OptionError
from tests.train import judge

SCHEDULES = {
    "plain": {"decay": 0.97},
    "warmup": {"decay": 0.9, "use_ema_warmup": True, "inv_gamma": 2.0, "power": 0.75},
    "late": {"decay": 0.8, "min_decay": 0.4, "update_after_step": 2},
}


def give(params: list[nn.Parameter], step: int, without: int) -> None:
    for i, (p, grad) in enumerate(zip(params, judge.gradients(step), strict=True)):
        p.grad = None if i == without or not p.requires_grad else grad.to(p.device, p.dtype)


@pytest.mark.parametrize("name", SCHEDULES)
def test_averages_are_those_of_diffusers(name: str, device: str) -> None:
    """With parameters that are frozen or without gradients; states go both ways in between."""
    ema_of = pytest.importorskip("diffusers.training_utils").EMAModel
    params = judge.parameters(torch.float64, device)
    schedule = train.EMASchedule(**SCHEDULES[name])
    optimizer = train.FusedAdamW(params, lr=0.1, ema_decay=schedule)
    assert optimizer.ema is not None
    theirs = ema_of(params, **SCHEDULES[name])
    for step in range(9):
        params[4].requires_grad_(step < 4)
        give(params, step, without=step % 2)
        optimizer.step()
        theirs.step(params)
        for a, b in zip(optimizer.ema.shadow_params, theirs.shadow_params, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-12)
        if step == 5:
            fresh = ema_of(params)
            fresh.load_state_dict(optimizer.ema.state_dict())
            optimizer.ema.load_state_dict(theirs.state_dict())
            fresh.shadow_params = [s.clone() for s in fresh.shadow_params]
            theirs = fresh
    assert optimizer.ema.optimization_step == theirs.optimization_step == 9
    if name == "late":
        assert theirs.cur_decay_value == schedule.decay_at(9)
    before = [p.detach().clone() for p in params]
    optimizer.ema.store(params)
    optimizer.ema.copy_to(params)
    assert all(map(torch.equal, params, optimizer.ema.shadow_params))
    optimizer.ema.restore(params)
    assert all(map(torch.equal, params, before))


def test_averages_of_another_model_are_refused() -> None:
    ema = train.FusedAdamW([nn.Parameter(torch.zeros(2))], ema_decay=0.9).ema
    with pytest.raises(OptionError, match="2 averages and the optimizer 1 parameter:"):
        ema.load_state_dict({"shadow_params": [torch.zeros(2)] * 2})


def test_averages_are_written_all_or_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = train.FusedAdamW(model[1].parameters(), ema_decay=0.9)
    assert optimizer.ema is not None
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(OptionError, match="2 tensors for 4 parameters"):
        optimizer.ema.copy_to(model.parameters())
    optimizer.ema.store(model[1].parameters())
    with pytest.raises(OptionError, match="2 tensors for 4 parameters"):
        optimizer.ema.restore(model.parameters())
    with pytest.raises(OptionError, match="differ from number 1 on"):
        optimizer.ema.load_state_dict({"shadow_params": [torch.zeros(2, 2), torch.zeros(1)]})
    with pytest.raises(OptionError, match="differ from number 0 on"):
        optimizer.ema.copy_to(reversed(list(model[1].parameters())))
    assert all(map(torch.equal, before, model.parameters()))


def test_a_cleared_state_is_a_new_one(device: str) -> None:
    moved = []
    for kind in (torch.optim.AdamW, train.FusedAdamW):
        weight = nn.Parameter(torch.zeros(3, device=device))
        optimizer = kind([weight], lr=0.1, weight_decay=0.0)
        for _ in range(20):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        optimizer.state.clear()
        before = weight.detach().clone()
        optimizer.step()
        moved.append(weight.detach() - before)
    torch.testing.assert_close(moved[1], moved[0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(6, 20), nn.Linear(20, 2), nn.Linear(6, 20)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.nn.functional.silu(self.a(x) + self.frozen(x)))


def test_twin(device: str) -> None:
    torch.manual_seed(0)
    net = Net().to(device)
    mine = [p for p in net.parameters() if p.requires_grad]
    optimizer = train.FusedAdamW(mine, lr=0.05, shadow_dtype=torch.bfloat16, max_grad_norm=1.0)
    twin = optimizer.shadow(net)
    x = torch.randn(8, 6, device=device).bfloat16()
    losses = []
    for _ in range(8):
        loss = twin(x).float().square().mean()
        loss.backward()
        assert net.a.weight.grad is None
        assert twin.a.weight.grad.dtype == torch.bfloat16
        optimizer.step()
        optimizer.zero_grad()
        assert twin.a.weight.grad is None
        losses.append(float(loss.detach()))
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            assert p.dtype == torch.float32
            # The interpreter cuts what GPUs round.
            torch.testing.assert_close(q.float(), p, rtol=2**-7, atol=0)
    assert losses[-1] < losses[0] / 4
    twin(x).float().sum().backward()
    net(x.float()).sum().backward()
    with pytest.raises(OptionError, match="its shadow have a gradient each"):
        optimizer.step()
    with torch.no_grad():
        net.a.weight.fill_(3.0)
    optimizer.refresh_shadows()
    assert torch.equal(twin.a.weight, torch.full_like(twin.a.weight, 3.0))


def test_a_twin_needs_a_type() -> None:
    net = Net()
    with pytest.raises(OptionError, match="no shadow_dtype"):
        train.FusedSGD(net.parameters()).shadow(net)


def test_random_rounding(device: str) -> None:
    """Unbiased to four sigma, to one of the two neighbours, the same bits on every device."""
    count = 2048
    step = torch.linspace(0.0, 2**-7, count)  # one unit in the last place of a bf16 in [1, 2)

    def rounded(seed: int, device: str) -> torch.Tensor:
        p = nn.Parameter(torch.ones(count, dtype=torch.bfloat16, device=device))
        optimizer = train.FusedSGD([p], lr=1.0, stochastic_rounding=True, seed=seed)
        p.grad_dtype = torch.float32
        p.grad = -step.to(device)
        optimizer.step()
        return p.detach().float().cpu() - 1.0

    draws = torch.stack([rounded(seed, device) for seed in range(6)])
    assert set(draws.unique().tolist()) == {0.0, 2**-7}
    ups = draws.double() * 2**7
    chance = step.double() * 2**7
    sigma = (chance * (1 - chance)).sum().mul(len(draws)).sqrt()
    assert abs(float((ups - chance).sum() / sigma)) < 4
    halves = ups[:, count // 4 : count // 2].mean(), ups[:, count // 2 : 3 * count // 4].mean()
    assert [float(h) for h in halves] == pytest.approx([0.375, 0.625], abs=4 * 0.5 / 3072**0.5)
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(rounded(3, device), draws[3])


def test_random_rounding_keeps_infinities(device: str) -> None:
    p = nn.Parameter(torch.tensor([1.0, 1.0, 1.0], dtype=torch.bfloat16, device=device))
    p.grad = torch.tensor([float("inf"), float("-inf"), float("nan")]).to(p)
    train.FusedSGD([p], lr=1.0, stochastic_rounding=True).step()
    assert p.isnan().tolist() == [False, False, True]
    assert p[:2].tolist() == [float("-inf"), float("inf")]


def test_norm_is_measured_without_a_clip(device: str) -> None:
    p = nn.Parameter(torch.zeros(3, device=device))
    optimizer = train.FusedSGD([p], lr=1.0, max_grad_norm=float("inf"))
    p.grad = torch.tensor([2.0, 3.0, 6.0], device=device)
    optimizer.step()
    assert float(optimizer.grad_norm) == 7.0
    assert p.tolist() == [-2.0, -3.0, -6.0]


def test_a_norm_that_is_infinite_does_as_torch_does(device: str) -> None:
    a, b = (nn.Parameter(torch.zeros(2, device=device)) for _ in range(2))
    for p in (a, b):
        p.grad = torch.tensor([float("inf"), 1.0], device=device)
    nn.utils.clip_grad_norm_([a], 1.0)
    torch.optim.SGD([a], lr=1.0).step()
    train.FusedSGD([b], lr=1.0, max_grad_norm=1.0).step()
    torch.testing.assert_close(b, a, equal_nan=True)


@pytest.mark.parametrize("kind", [train.GradScaler, torch.amp.GradScaler], ids=["strop", "torch"])
def test_scaler_with_two_optimizers_and_unscale(
    kind: type[torch.amp.GradScaler], device: str
) -> None:
    """One optimizer overflows, the other steps; unscale_ before the step is seen."""
    first, second = (nn.Parameter(torch.ones(2, device=device)) for _ in range(2))
    optimizers = (
        train.FusedSGD([first], lr=1.0, max_grad_norm=1.0),
        train.FusedSGD([second], lr=1.0),
    )
    scaler = kind(device, init_scale=8.0, growth_interval=1)
    for overflow in (True, False):
        scaler.scale(torch.zeros((), device=device))
        first.grad = torch.tensor([float("inf") if overflow else 24.0, 32.0], device=device)
        second.grad = torch.tensor([8.0, 0.0], device=device) * scaler.get_scale() / 8
        scaler.unscale_(optimizers[1])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (4.0 if overflow else 8.0)
    assert first.tolist() == pytest.approx([1 - 0.6, 1 - 0.8], rel=1e-5)  # 6, 8 unscaled by 4
    assert second.tolist() == [-1.0, 1.0]


def test_averages_without_any_gradient(device: str) -> None:
    p = nn.Parameter(torch.tensor([2.0, 4.0], device=device))
    optimizer = train.FusedAdamW([p], ema_decay=0.5, max_grad_norm=1.0)
    assert optimizer.ema is not None
    for value in (1.0, 3.0):  # decays of 0 and 2/11
        with torch.no_grad():
            p.fill_(value)
        optimizer.step()
    assert optimizer.ema.shadow_params[0].tolist() == pytest.approx([3 - 2 * 2 / 11] * 2)
    assert float(optimizer.grad_norm) == 0.0

"""A loop that is written by hand beside ``compile_step``: from one state, with the same draws."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop import train

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Dropout, a buffer that training writes, and a weight that only some calls use."""

    make_norm: type[nn.Module] = nn.BatchNorm1d

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 3)
        self.norm, self.dropout = self.make_norm(12), nn.Dropout(0.3)
        self.extra = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        y = self.down(self.dropout(F.silu(self.norm(self.up(x)))))
        return y * self.extra if extra else y


class SmoothNet(Net):
    """Of what is compiled."""

    make_norm = nn.LayerNorm


@dataclass
class Case:
    """A training. ``sizes``: of the batches, in turn."""

    optimizer: Callable[..., torch.optim.Optimizer] = train.FusedAdamW
    arguments: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    scaler: type[torch.amp.GradScaler] | None = None
    sizes: tuple[int, ...] = (5,)
    scheduled: bool = False
    autocast: bool = False
    extra: Callable[[int], bool] = lambda number: False
    overflows: tuple[int, ...] = ()
    steps: int = 9
    device: str = "cpu"
    make: Callable[[], nn.Module] = Net

    @property
    def is_torchs(self) -> bool:
        """Whether a graph needs the learning rate as a tensor."""
        return self.optimizer.__module__.startswith("torch")


class Training:
    """The state of one side."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case, self.net = case, case.make().to(case.device)
        rate = {"lr": torch.tensor(0.05, device=case.device) if case.is_torchs else 0.05}
        self.optimizer = case.optimizer(self.net.parameters(), **rate, **case.arguments)
        self.optimizer._warned_capturable_if_run_uncaptured = True  # one of both sides has no graph
        self.scaler = case.scaler and case.scaler(
            case.device, init_scale=2.0**10, growth_interval=3
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda n: 1 / (n + 1) if case.scheduled else 1.0
        )
        self.losses: list[Tensor] = []

    def loss(self, x: Tensor, target: Tensor, extra: bool = False) -> Tensor:
        with self.autocast():
            guess = self.net(x, extra)
        return F.mse_loss(guess.float(), target)

    def autocast(self) -> AbstractContextManager[Any]:
        return (
            torch.autocast(self.case.device, torch.bfloat16)
            if self.case.autocast
            else nullcontext()
        )

    def by_hand(self, number: int, batch: Batch) -> None:
        loss = self.loss(*batch, extra=self.case.extra(number))
        self.losses.append(loss.detach())
        share = loss / self.case.accumulate
        (share if self.scaler is None else self.scaler.scale(share)).backward()
        if (number + 1) % self.case.accumulate:
            return
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        found = {f"net.{k}": v for k, v in self.net.state_dict().items()}
        for name, p in self.net.named_parameters():
            found |= {f"{name}/{k}": v for k, v in self.optimizer.state[p].items()}
            found |= {} if p.grad is None else {f"{name}/grad": p.grad}
        if self.scaler is not None:
            found["scale"] = torch.tensor(self.scaler.get_scale())
        norm = getattr(self.optimizer, "grad_norm", None)
        return found if norm is None else found | {"norm": norm}


def batch_of(case: Case, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    size = case.sizes[number % len(case.sizes)]
    x = torch.randn(size, 6, generator=generator)
    target = torch.full((size, 3), float("inf") if number in case.overflows else 1.0)
    return x.to(case.device), target.to(case.device)


def compare(case: Case) -> Any:
    """Both ways, from one state with the same random numbers; the step that ran."""
    hand, ours = Training(case), Training(case)
    step = train.compile_step(
        ours.loss, ours.optimizer, accumulate=case.accumulate, scaler=ours.scaler
    )
    for number in range(case.steps):
        batch = batch_of(case, number)
        torch.manual_seed(number)
        hand.by_hand(number, batch)
        torch.manual_seed(number)
        ours.losses.append(step(*batch, extra=case.extra(number)))
        expected, found = hand.state(), ours.state()
        assert expected.keys() == found.keys(), number
        for name, value in expected.items():
            assert torch.equal(value.nan_to_num(7), found[name].nan_to_num(7)), (number, name)
        assert torch.equal(hand.losses[-1], ours.losses[-1])
        assert not ours.losses[-1].requires_grad
        for one in (hand, ours) if (number + 1) % case.accumulate == 0 else ():
            one.schedule.step()
    assert len({float(loss) for loss in ours.losses if loss.isfinite()}) > case.steps // 2
    return step


EXTRAS = {"max_grad_norm": 0.1, "ema_decay": 0.9}
CASES = {
    "plain": Case(arguments=EXTRAS),
    "schedule": Case(arguments=EXTRAS, scheduled=True),
    "accumulation": Case(arguments=EXTRAS, accumulate=3, scheduled=True, steps=13),
    "shapes": Case(arguments=EXTRAS, sizes=(5, 4, 5, 7), steps=14),
    "shapes_accumulated": Case(arguments=EXTRAS, sizes=(5, 4, 7), accumulate=2, steps=16),
    "no_extras": Case(optimizer=train.FusedSGD, arguments={"momentum": 0.9}),
    "weights_come_and_go": Case(
        arguments=EXTRAS, extra=lambda n: n % 3 == 2, accumulate=2, steps=14, scheduled=True
    ),
    "autocast": Case(arguments=EXTRAS, autocast=True),
    "scaler": Case(arguments=EXTRAS, scaler=train.GradScaler, overflows=(1, 5, 6), steps=10),
    "torchs_scaler": Case(
        arguments=EXTRAS, scaler=torch.amp.GradScaler, accumulate=2, overflows=(3, 9), steps=12
    ),
}


def rounded_at_random(device: str, graph: bool) -> list[Tensor]:
    """Weights and averages after steps that draw a new seed each."""
    torch.manual_seed(0)
    module = nn.Linear(16, 32).to(device, torch.bfloat16)
    optimizer = train.FusedAdamW(
        module.parameters(), lr=1e-4, stochastic_rounding=True, seed=3, ema_decay=0.9
    )
    step = train.compile_step(lambda x: module(x).float().square().mean(), optimizer, graph=graph)
    x = torch.ones(4, 16, device=device, dtype=torch.bfloat16)
    for _ in range(6):
        step(x)
    assert optimizer.ema is not None
    assert optimizer.counts == (6, 6)
    assert step.report().replays == (4 if graph else 0)
    return [*module.parameters(), *optimizer.ema.shadow_params]

"""Whole steps from CUDA graphs: the bits of the loop that is written by hand."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop import train
from strop.bench import timer
from strop.errors import CaptureError, OptionError, UnsupportedError
from tests.train.judge import no_waiting
from tests.train.stepping import (
    CASES,
    EXTRAS,
    Case,
    SmoothNet,
    batch_of,
    compare,
    rounded_at_random,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    torch._dynamo.reset()


def compiled() -> nn.Module:
    return strop.optimize(SmoothNet(), train=True, options=strop.Options(strict=True))


TORCHS = {"capturable": True, "weight_decay": 0.1}
ON_GPU = {
    **CASES,
    "torchs_optimizer": Case(torch.optim.AdamW, TORCHS, scheduled=True, accumulate=2, steps=12),
    "torchs_fused": Case(
        torch.optim.AdamW,
        {**TORCHS, "fused": True},
        overflows=(3, 9),
        scaler=torch.amp.GradScaler,
        scheduled=True,
    ),
    "compiled": Case(arguments=EXTRAS, make=compiled, scheduled=True, sizes=(5, 4), steps=12),
    "compiled_accumulated": Case(
        arguments=EXTRAS, make=compiled, accumulate=2, sizes=(5, 9, 4), scheduled=True, steps=20
    ),
    "compiled_autocast": Case(
        arguments=EXTRAS, make=compiled, autocast=True, scaler=train.GradScaler, overflows=(4,)
    ),
}


@pytest.mark.parametrize("name", ON_GPU)
def test_as_by_hand(name: str) -> None:
    """Weights, buffers, states, averages, scale and loss of every call, with dropout."""
    case = replace(ON_GPU[name], device="cuda")
    report = compare(case).report()
    assert report.replays > 0
    assert report.plain_runs + report.replays == case.steps
    assert report.stale == 0
    assert 0 < report.captures <= report.buckets


class Picture(nn.Module):
    """Convolutions, group norm and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 32, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)
        self.norm, self.qkv = nn.GroupNorm(8, 32), nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.first(x)))
        b, c, h, w = y.shape
        q, k, v = self.qkv(y.flatten(2).transpose(1, 2)).view(b, h * w, 3, 4, 8).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        # the backward pass of fused attention adds in no fixed order
        mixed = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1) @ v
        return self.last(y + mixed.transpose(1, 2).reshape(b, h * w, c).mT.reshape(b, c, h, w))


class Pictures:
    """A training of one, with noise of a generator of its own."""

    def __init__(self, graph: bool, compiled: bool) -> None:
        torch.manual_seed(0)
        net = Picture().cuda().to(memory_format=torch.channels_last)
        self.net = strop.optimize(net, train=True) if compiled else net
        self.source = torch.Generator("cuda").manual_seed(3)
        self.optimizer = train.FusedAdamW(net.parameters(), lr=1e-3, **EXTRAS)
        self.step = train.compile_step(self.loss, self.optimizer, graph=graph)

    def loss(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, device=x.device, generator=self.source)
        with torch.autocast("cuda", torch.bfloat16):
            guess = self.net(x + noise)
        return F.mse_loss(guess.float(), noise)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sizes_in_turn(compiled: bool) -> None:
    """Working memory grows behind the first graphs, which still replay from theirs."""
    ours, plain = Pictures(True, compiled), Pictures(False, compiled)
    sides = [8, 8, 8, 16, 8, 16, 24, 24, 16, 8, 24, 8, 16]
    for number, side in enumerate(sides):
        x = torch.randn(2, 4, side, side, generator=torch.Generator().manual_seed(number)).cuda()
        found, expected = ours.step(x), plain.step(x)
        assert torch.equal(found, expected), (number, float(found), float(expected))
    for name, value in plain.net.state_dict().items():
        assert torch.equal(ours.net.state_dict()[name], value), name
    report = ours.step.report()
    assert (report.captures, report.plain_runs) == (3, 6)
    assert report.replays == len(sides) - 6


def test_the_host_never_waits() -> None:
    case = replace(CASES["accumulation"], device="cuda", accumulate=2, scaler=train.GradScaler)
    one = _training(case)
    batches = [batch_of(case, 0) for _ in range(14)]
    for batch in batches[:6]:
        one.step(*batch)
    captures = one.step.report().captures
    with no_waiting():
        for number, batch in enumerate(batches[6:]):
            one.step(*batch)
            if number % 2:
                one.schedule.step()
    assert one.step.report().captures == captures == 2


def _training(case: Case) -> Any:
    from tests.train.stepping import Training

    one = Training(case)
    one.step = train.compile_step(
        one.loss, one.optimizer, accumulate=case.accumulate, scaler=one.scaler
    )
    return one


def test_replays_take_no_memory() -> None:
    one = _training(Case(arguments=EXTRAS, accumulate=2, device="cuda"))
    sizes = []
    for number in range(20):
        one.step(*batch_of(one.case, number))
        torch.cuda.synchronize()
        sizes.append(timer.allocated(torch.device("cuda")))
    assert sizes[19] == sizes[17] == sizes[11]


def test_a_loss_outlives_the_next_steps() -> None:
    one = _training(Case(arguments=EXTRAS, device="cuda"))
    losses = [one.step(*batch_of(one.case, 0)) for _ in range(6)]
    values = [float(loss) for loss in losses]
    assert len(set(values)) == 6
    assert values == [float(loss) for loss in losses]


def test_other_work_between_replays() -> None:
    """Evaluation on the caller's stream, a checkpoint that is loaded, storage that moves."""
    ends = []
    for graph in (True, False):
        one = _training(Case(arguments=EXTRAS, device="cuda", scheduled=True))
        if not graph:
            one.step = train.compile_step(one.loss, one.optimizer, graph=False)
        kept, seen = one.net.state_dict(), []
        kept = {name: value.clone() for name, value in kept.items()}
        for number in range(14):
            torch.manual_seed(number)
            one.step(*batch_of(one.case, number))
            if number == 5:
                one.net.load_state_dict(kept)
            if number == 8:
                one.net.down.weight.data = one.net.down.weight.data.clone()
            with torch.no_grad():
                one.net.eval()
                seen.append(one.net(batch_of(one.case, 99)[0]))
                one.net.train()
        ends.append([*seen, *one.net.state_dict().values()])
        assert one.step.report().stale == int(graph)
    assert all(map(torch.equal, *ends))


def test_a_frozen_encoder_in_the_loss() -> None:
    """An optimised module without gradients: it runs inside of the graph, not from its own."""
    ends = []
    for graph in (True, False):
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 16))
        strop.optimize(encoder.cuda().eval().requires_grad_(False))
        head = nn.Linear(16, 1).cuda()

        def loss_fn(tokens: Tensor, encoder: nn.Module = encoder, head: nn.Module = head) -> Tensor:
            with torch.no_grad():
                states = encoder(tokens)
            return head(states).square().mean()

        optimizer = train.FusedAdamW(head.parameters(), lr=0.1)
        tokens = torch.arange(24, device="cuda").reshape(3, 8)
        with torch.no_grad():
            for _ in range(3):
                encoder(tokens)  # on another stream, from a graph in the end
        step = train.compile_step(loss_fn, optimizer, graph=graph)
        ends.append([step(tokens + number) for number in range(6)])
        assert step.report().replays == (4 if graph else 0)
    assert all(map(torch.equal, *ends))


def reads(x: Tensor) -> Tensor:
    return x * 2 if x.detach().sum().item() > 0 else x


def masked(x: Tensor) -> Tensor:
    return x[x > -1e9]


def copied(x: Tensor) -> Tensor:
    return x * torch.arange(2.0).to(x.device)


SEEDS = itertools.count()


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(next(SEEDS))
    return x + torch.randn_like(x)


def chosen_on_the_host(x: Tensor) -> Tensor:
    return x * random.random()


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad.sum().item()


@pytest.mark.parametrize(
    ("what", "named"),
    [
        (reads, r"_local_scalar_dense.*in reads: return x \* 2"),
        (masked, r"aten.index.*in masked: return x\[x > "),
        (copied, r"_to_copy.*in copied: .*between the CPU and the GPU"),
        (seeded, r"in seeded: torch.manual_seed"),
        (chosen_on_the_host, "draws random numbers on the host: random"),
        (Reading.apply, r"in backward: return grad \*"),
    ],
    ids=["item", "mask", "host copy", "seed", "host draws", "backward"],
)
def test_what_no_graph_can_hold(what: Callable[[Tensor], Tensor], named: str) -> None:
    """Operator and line are named, and the process goes on: with graphs of other steps, with
    random numbers, and with this step without a graph."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).cuda()
    loss_fn = partial(_mean, net, what)
    x = torch.ones(4, 3, device="cuda")
    step = train.compile_step(loss_fn, train.FusedSGD(net.parameters(), lr=0.01))
    step(x)
    with pytest.raises(CaptureError, match="graph=False") as caught:
        step(x)
    assert re.search(named, str(caught.value)), str(caught.value)
    plain = train.compile_step(loss_fn, train.FusedSGD(net.parameters(), lr=0.01), graph=False)
    assert plain(x).isfinite()
    good = train.compile_step(partial(_mean, net, abs), train.FusedSGD(net.parameters(), lr=0.01))
    losses = {float(good(x)) for _ in range(8)}
    assert good.report().replays == 6
    assert len(losses) > 4, "dropout draws the same numbers again"


def _mean(net: nn.Module, what: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return what(net(x)).square().mean()


def test_seeds_decide_what_replays_draw() -> None:
    """torch.manual_seed between calls: equal seeds, equal dropout."""
    p = nn.Parameter(torch.arange(4096.0, device="cuda"))
    step = train.compile_step(lambda: F.dropout(p, 0.5).mean(), train.FusedSGD([p], lr=0.0))
    drawn = []
    for seed in (1, 2, 3, 1, 2, 3):
        torch.manual_seed(seed)
        drawn.append(float(step()))
    assert drawn[:3] == drawn[3:]
    assert len(set(drawn)) == 3


def test_tensors_on_the_cpu_are_refused() -> None:
    p = nn.Parameter(torch.ones(3, device="cuda"))
    step = train.compile_step(lambda x: (p * x).sum(), train.FusedSGD([p]))
    with pytest.raises(OptionError, match="tensor 0 of the arguments is on cpu and not on cuda:0"):
        step(torch.ones(3))


def test_inside_of_another_capture() -> None:
    p = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = train.FusedSGD([p])
    step = train.compile_step(lambda: p.square().sum(), optimizer)
    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        p.detach().add_(0)
        with pytest.raises(UnsupportedError, match="inside of a capture"):
            step()


def test_rounding_at_random() -> None:
    assert all(map(torch.equal, rounded_at_random("cuda", True), rounded_at_random("cuda", False)))

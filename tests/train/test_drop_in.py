"""Fused optimizers in place of torch's: every argument and every kind of parameter, in fp64."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop import train
from strop.errors import OptionError, UnsupportedError
from tests.train import judge

F64 = torch.float64
Kind = type[torch.optim.Optimizer]
PAIRS: dict[str, tuple[Kind, Kind, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, train.FusedAdamW, {}),
    "adamw_arguments": (
        torch.optim.AdamW,
        train.FusedAdamW,
        {"betas": (0.8, 0.99), "eps": 1e-4, "weight_decay": 0.3, "maximize": True},
    ),
    "adamw_hints": (torch.optim.AdamW, train.FusedAdamW, {"foreach": False, "capturable": False}),
    "adam": (torch.optim.Adam, train.FusedAdam, {}),
    "adam_l2": (torch.optim.Adam, train.FusedAdam, {"weight_decay": 0.1}),
    "adam_no_momentum": (torch.optim.Adam, train.FusedAdam, {"betas": (0.0, 0.9)}),
    "sgd": (torch.optim.SGD, train.FusedSGD, {}),
    "sgd_l2": (torch.optim.SGD, train.FusedSGD, {"weight_decay": 0.1, "maximize": True}),
    "sgd_momentum": (torch.optim.SGD, train.FusedSGD, {"momentum": 0.9, "dampening": 0.3}),
    "sgd_nesterov": (torch.optim.SGD, train.FusedSGD, {"momentum": 0.9, "nesterov": True}),
}


def give(params: Sequence[Tensor], step: int, without: Sequence[int] = ()) -> None:
    grads = judge.gradients(step)
    for i, p in enumerate(params):
        grad = grads[i % len(grads)].to(p.device, p.dtype)
        p.grad = None if i in without or not p.requires_grad else grad


def twice(device: str, dtype: torch.dtype = F64) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return judge.parameters(dtype, device), judge.parameters(dtype, device)


def same(found: Sequence[Tensor], expected: Sequence[Tensor], rtol: float = 1e-9) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=rtol, atol=rtol * 1e-3)


@pytest.mark.parametrize("name", PAIRS)
def test_training(name: str, device: str) -> None:
    """Two groups, a schedule, a clip, gradients that come and go, a group that comes late."""
    theirs, ours, arguments = PAIRS[name]
    a, b = twice(device)
    optimizers = []
    for params, make in ((a, theirs), (b, ours)):
        more = {} if make is theirs else {"max_grad_norm": 0.7, "ema_decay": 0.9}
        groups = [{"params": params[:2]}, {"params": params[2:5], "lr": 0.02, "weight_decay": 0.2}]
        optimizer = make(groups, lr=0.01, **arguments, **more)
        optimizers.append((params, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.2)))
    params = a[:5]
    for step in range(6):
        if step == 3:
            for every, optimizer, _ in optimizers:
                optimizer.add_param_group({"params": every[5:], "lr": 0.05})
            params = a
        for every, optimizer, schedule in optimizers:
            every[4].requires_grad_(step != 4)
            give(every[: len(params)], step, without=[step % 3])
            if every is a:
                norm = nn.utils.clip_grad_norm_(every[: len(params)], 0.7)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert float(optimizers[1][1].grad_norm) == pytest.approx(float(norm), rel=1e-6)
    same(b, a)


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum", "sgd"])
def test_state_dicts(name: str, device: str) -> None:
    """Training goes on in the other optimizer, both ways, through a file."""
    theirs, ours, arguments = PAIRS[name]
    a, b = twice(device)
    first, second = theirs(a, lr=0.01, **arguments), ours(b, lr=0.01, **arguments)
    for step in range(6):
        for params, optimizer in ((a, first), (b, second)):
            give(params, step, without=[2])
            optimizer.step()
        if step == 2:
            states = [pickle.loads(pickle.dumps(o.state_dict())) for o in (first, second)]
            first, second = theirs(a, lr=9.0, **arguments), ours(b, lr=9.0, **arguments)
            first.load_state_dict(states[1])
            second.load_state_dict(states[0])
    same(b, a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_is_exact(dtype: torch.dtype, device: str) -> None:
    """From a state dict, from a pickle and from a copy, with random rounding and averages."""

    def loop(optimizer: train.FusedAdamW, params: Sequence[Tensor], steps: range) -> None:
        for step in steps:
            give(params, step)
            optimizer.step()

    def make(params: Sequence[Tensor]) -> train.FusedAdamW:
        return train.FusedAdamW(
            params, lr=1e-2, ema_decay=0.9, max_grad_norm=1.0, stochastic_rounding=True, seed=5
        )

    a, b = twice(device, dtype)
    first, second = make(a), make(b)
    loop(first, a, range(6))
    loop(second, b, range(3))
    copied, (c, third) = copy.deepcopy(b), copy.deepcopy((b, second))
    saved = pickle.loads(pickle.dumps(second.state_dict()))
    resumed = make(copied)
    resumed.load_state_dict(saved)
    for params, optimizer in ((copied, resumed), (c, third), (b, second)):
        loop(optimizer, params, range(3, 6))
        for found, true in zip(params, a, strict=True):
            assert torch.equal(found, true)
        for found, true in zip(optimizer.ema.shadow_params, first.ema.shadow_params, strict=True):
            assert torch.equal(found, true)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


PICTURE = torch.arange(2 * 3 * 4 * 5, dtype=F64).reshape(2, 3, 4, 5) / 60 - 1
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "channels_last": (channels_last, channels_last),
    "channels_last_parameter": (channels_last, torch.Tensor.contiguous),
    "channels_last_gradient": (torch.Tensor.contiguous, channels_last),
    "transposed": (lambda x: x.contiguous().mT, lambda x: x.contiguous().mT),
    "gaps": (lambda x: x.repeat(1, 1, 1, 2)[..., ::2], lambda x: x.repeat(1, 1, 1, 2)[..., ::2]),
    "unaligned": (
        lambda x: torch.cat((x[0, 0, 0, :1], x.flatten()))[1:].view(x.shape),
        lambda x: torch.cat((x[0, 0, 0, :1], x.flatten()))[1:].view(x.shape),
    ),
    "expanded_gradient": (torch.Tensor.contiguous, lambda x: x[:1, :1, :1, :1].expand(x.shape)),
    "one_by_one": (
        lambda x: x.reshape(8, 15, 1, 1).contiguous(memory_format=torch.channels_last),
        lambda x: x.reshape(8, 15, 1, 1),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, device: str) -> None:
    of_parameter, of_gradient = LAYOUTS[name]
    values = PICTURE.to(device)
    a = nn.Parameter(of_parameter(values).clone(memory_format=torch.contiguous_format))
    b = nn.Parameter(of_parameter(values))
    assert (
        name in ("gaps", "one_by_one", "unaligned") or b.stride() == of_parameter(values).stride()
    )
    first, second = torch.optim.AdamW([a], lr=0.1), train.FusedAdamW([b], lr=0.1, ema_decay=0.9)
    for step in range(3):
        a.grad = of_gradient(values * (step + 1) - 1).clone(memory_format=torch.contiguous_format)
        b.grad = of_gradient(values * (step + 1) - 1)
        version = b._version
        first.step()
        second.step()
        assert b._version > version, "autograd and caches of weights must see the write"
    same([b], [a])


def test_memory_that_moves(device: str) -> None:
    """Parameters may get other memory, another layout or another state between steps."""
    a, b = (nn.Parameter(PICTURE.to(device).clone()) for _ in range(2))
    first, second = torch.optim.AdamW([a], lr=0.1), train.FusedAdamW([b], lr=0.1)
    for step in range(4):
        for p in (a, b):
            p.grad = torch.full_like(p, step - 1.2)
        first.step()
        second.step()
        if step == 0:
            b.data = channels_last(b.data)
        if step == 1:
            b.data = b.data.clone()
        if step == 2:
            for optimizer, p in ((first, a), (second, b)):
                optimizer.state[p]["exp_avg"] = torch.zeros_like(p)
    same([b], [a])


def test_half_parameters_have_fp32_states(device: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        p = nn.Parameter(torch.tensor([1.0, -3.0, 0.5], device=device, dtype=dtype))
        q = nn.Parameter(p.detach().double())
        mine, theirs = train.FusedAdamW([p], lr=0.1), torch.optim.AdamW([q], lr=0.1)
        p.grad = torch.tensor([0.1, 0.2, -0.3], device=device, dtype=dtype)
        q.grad = p.grad.double()
        mine.step()
        theirs.step()
        assert mine.state[p]["exp_avg"].dtype == torch.float32
        # The interpreter cuts what GPUs round.
        torch.testing.assert_close(p.double(), q, rtol=2 * torch.finfo(dtype).eps, atol=0)
        other = train.FusedAdamW([p])
        other.load_state_dict(mine.state_dict())
        assert torch.equal(other.state[p]["exp_avg"], mine.state[p]["exp_avg"])


def test_learning_rate_in_a_tensor(device: str) -> None:
    a, b = twice(device)
    rate = torch.tensor(0.5, device=device)
    first, second = torch.optim.AdamW(a, lr=0.01), train.FusedAdamW(b, lr=rate)
    for step in range(3):
        rate.fill_(0.01 * (step + 1))
        first.param_groups[0]["lr"] = float(rate)
        for params, optimizer in ((a, first), (b, second)):
            give(params, step)
            optimizer.step()
    same(b, a)


def test_closure_and_many_tiny_tensors(device: str) -> None:
    count = 2000 if device == "cuda" else 300
    values = torch.linspace(-1, 1, count, dtype=F64).to(device)
    a, b = ([nn.Parameter(x.clone().reshape(1)) for x in values] for _ in range(2))
    first, second = torch.optim.AdamW(a, lr=0.1), train.FusedAdamW(b, lr=0.1)
    for params, optimizer in ((a, first), (b, second)):

        def loss(params: list[nn.Parameter] = params) -> Tensor:
            optimizer.zero_grad()  # noqa: B023
            total = torch.cat(params).square().sum()
            total.backward()
            return total

        for _ in range(2):
            returned = optimizer.step(loss)
        assert float(returned.detach()) < float(values.square().sum())
    same(b, a)


def test_nothing_to_do() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = train.FusedAdamW([p], max_grad_norm=1.0)
    optimizer.step()
    assert torch.equal(p, torch.ones(3))
    assert "exp_avg" not in optimizer.state[p]


BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "lr": (ValueError, "lr is -1", {"lr": -1}),
    "lr_nan": (ValueError, "lr is nan", {"lr": math.nan}),
    "betas": (ValueError, r"betas\[1\] is 1", {"betas": (0.9, 1.0)}),
    "amsgrad": (UnsupportedError, "amsgrad=True is not built", {"amsgrad": True}),
    "differentiable": (UnsupportedError, "differentiable=True", {"differentiable": True}),
    "clip": (OptionError, "max_grad_norm is -1", {"max_grad_norm": -1}),
    "decay": (OptionError, "decay is 2", {"ema_decay": 2}),
    "shadow": (OptionError, "shadow_dtype is torch.int8", {"shadow_dtype": torch.int8}),
    "states": (UnsupportedError, "'fp32' and '8bit' are built", {"states": "4bit"}),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_are_checked(name: str) -> None:
    kind, message, arguments = BAD[name]
    with pytest.raises(kind, match=message):
        train.FusedAdamW([nn.Parameter(torch.zeros(1))], **arguments)


def test_gradients_are_checked() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match=r"sparse gradient .*\(4, 2\).*SparseAdam"):
        train.FusedAdamW(embedding.parameters()).step()
    p = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    p.grad = torch.zeros_like(p)
    with pytest.raises(UnsupportedError, match=r"complex64"):
        train.FusedAdamW([p]).step()
    p = nn.Parameter(torch.zeros(2, device="meta"))
    p.grad = torch.zeros_like(p)
    with pytest.raises(UnsupportedError, match="no fused step for the device meta"):
        train.FusedAdamW([p]).step()

"""What only a GPU shows: no waiting, capture, streams, memory that is given back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from strop import train
from strop.errors import UnsupportedError
from tests.train import judge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make(**more: object) -> tuple[list[nn.Parameter], train.FusedAdamW]:
    params = judge.parameters(torch.float32, "cuda")
    extras = {"max_grad_norm": 1.0, "ema_decay": 0.99} | more
    return params, train.FusedAdamW(params, lr=torch.tensor(1e-2, device="cuda"), **extras)


def on_gpu(step: int) -> list[torch.Tensor]:
    return [g.cuda() for g in judge.gradients(step)]


def test_the_host_never_waits() -> None:
    """With a scaler, a schedule, and gradients whose memory is new."""
    params, optimizer = make()
    plain = train.FusedSGD([nn.Parameter(torch.ones(5, device="cuda"))], lr=0.1, momentum=0.9)
    scaler = train.GradScaler("cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1 / (step + 1))
    every = [on_gpu(step) for step in range(5)]
    for step, grads in enumerate(every):
        scaler.scale(torch.zeros((), device="cuda"))
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        plain.param_groups[0]["params"][0].grad = torch.ones(5, device="cuda")
        if step < 2:
            scaler.step(optimizer)
            plain.step()
        else:
            with no_waiting():
                scaler.step(optimizer)
                plain.step()
        scaler.update()
        schedule.step()


class Loop:
    """Steps whose gradients come from a backward pass; the learning rate falls."""

    def __init__(self) -> None:
        self.params, self.optimizer = make()
        self.factors = [torch.zeros_like(p) for p in self.params]

    def feed(self, step: int) -> None:
        torch._foreach_copy_(self.factors, on_gpu(step))
        self.optimizer.param_groups[0]["lr"].fill_(1e-2 / (step + 1))

    def run(self) -> None:
        products = [(p * f).sum() for p, f in zip(self.params, self.factors, strict=True)]
        torch.stack(products).sum().backward()
        self.optimizer.step()

    def eager(self, step: int) -> None:
        self.feed(step)
        self.optimizer.zero_grad()
        self.run()


def test_capture() -> None:
    """A replay does what a step does, also with other steps between replays."""
    expected, found = Loop(), Loop()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(8):
            expected.eager(step)
        for step in range(3):
            found.eager(step)
        found.optimizer.zero_grad()
        with torch.cuda.graph(graph, stream=stream):
            found.run()
        grads = [p.grad for p in found.params]
        for step in range(3, 8):
            if step == 5:
                found.eager(step)
            else:
                found.feed(step)
                graph.replay()
    torch.cuda.synchronize()
    assert all(g is not None for g in grads)
    first, second = expected.optimizer, found.optimizer
    assert first.ema is not None
    assert second.ema is not None
    assert first.ema.optimization_step == second.ema.optimization_step == 8
    averages = zip(first.ema.shadow_params, second.ema.shadow_params, strict=True)
    for x, y in (*zip(expected.params, found.params, strict=True), *averages):
        assert torch.equal(x, y)
    assert torch.equal(first.grad_norm, second.grad_norm)


def test_capture_of_a_first_step_is_refused() -> None:
    params, optimizer = make()
    params[3].grad = torch.ones_like(params[3])
    optimizer.step()
    params[4].grad = torch.ones_like(params[4])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedError, match="run one step with the same gradients"):  # noqa: SIM117
        with torch.cuda.graph(graph):
            optimizer.step()


def test_no_memory_is_kept_by_a_step() -> None:
    params, optimizer = make()
    sizes = []
    for step in range(4):
        for p, g in zip(params, on_gpu(step), strict=True):
            p.grad = g
        optimizer.step()
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[3] == sizes[1]


def test_sums_do_not_depend_on_the_run() -> None:
    p = nn.Parameter(torch.zeros(3_000_000, device="cuda"))
    p.grad = torch.randn(3_000_000, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    optimizer = train.FusedSGD([p], max_grad_norm=1.0)
    norms = set()
    for _ in range(5):
        optimizer.step()
        norms.add(float(optimizer.grad_norm))
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(float(p.grad.double().norm()), rel=2e-7)


def test_more_than_2_31_elements() -> None:
    count = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 5 * count:
        pytest.skip("needs 11 GB of device memory")
    p = nn.Parameter(torch.ones(count, device="cuda", dtype=torch.bfloat16))
    p.grad = torch.zeros_like(p)
    places = [0, 2**31 - 1, 2**31, count - 1]
    p.grad[places] = 3.0
    optimizer = train.FusedSGD([p], lr=1.0, max_grad_norm=3.0)
    optimizer.step()
    assert float(optimizer.grad_norm) == 6.0
    torch.testing.assert_close(p[places].cpu(), torch.full((4,), -0.5, dtype=torch.bfloat16))
    assert float(p[5]) == float(p[-2]) == 1.0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_are_refused() -> None:
    params = [nn.Parameter(torch.ones(2, device=f"cuda:{i}")) for i in range(2)]
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(UnsupportedError, match="works on one device"):
        train.FusedAdamW(params).step()

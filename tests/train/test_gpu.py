"""What only a GPU shows: no waiting, capture, streams, memory that is given back."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import strop
from strop import train
from strop.errors import UnsupportedError
from strop.ir.program import Program
from strop.runtime.run import library_warm_up
from strop.train import quantized
from tests.train import judge
from tests.train.judge import no_waiting
from tests.train.test_quantized import learn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(params=["fp32", "8bit"])
def states(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How moments are kept; the parameters here are small."""
    monkeypatch.setattr(quantized, "LEAST", 1)
    return str(request.param)


def make(**more: object) -> tuple[list[nn.Parameter], train.FusedAdamW]:
    params = judge.parameters(torch.float32, "cuda")
    extras = {"max_grad_norm": 1.0, "ema_decay": 0.99} | more
    return params, train.FusedAdamW(params, lr=torch.tensor(1e-2, device="cuda"), **extras)


def on_gpu(step: int) -> list[torch.Tensor]:
    return [g.cuda() for g in judge.gradients(step)]


def test_the_host_never_waits(states: str) -> None:
    """With a scaler, a schedule, and gradients whose memory is new."""
    params, optimizer = make(states=states)
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

    def __init__(self, states: str) -> None:
        self.params, self.optimizer = make(states=states)
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


def test_capture(states: str) -> None:
    """A replay does what a step does, also with other steps between replays."""
    expected, found = Loop(states), Loop(states)
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
    for x, y in zip(expected.params, found.params, strict=True):
        mine, true = second.state[y], first.state[x]
        assert mine.keys() == true.keys()
        assert all(torch.equal(mine[key], true[key]) for key in mine)


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


def test_no_memory_is_kept_by_a_step(states: str) -> None:
    gc.collect()  # what earlier tests left in cycles would go meanwhile
    params, optimizer = make(states=states)
    sizes = []
    for step in range(4):
        for p, g in zip(params, on_gpu(step), strict=True):
            p.grad = g
        optimizer.step()
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[3] == sizes[1]


def test_8_bits_on_both_devices() -> None:
    """Codes are the CPU's but where rounding puts a value beyond an edge; equal in every run."""

    def run(device: str) -> dict[str, torch.Tensor]:
        source = torch.Generator().manual_seed(1)
        p = nn.Parameter(torch.randn(300, 1000, generator=source).to(device))
        optimizer = train.FusedAdamW([p], max_grad_norm=1.0, states="8bit")
        for _ in range(3):
            sizes = 10 ** (-6 * torch.rand(p.shape, generator=source))
            p.grad = (torch.randn(p.shape, generator=source) * sizes).to(device)
            optimizer.step()
        found = {k: v.cpu() for k, v in optimizer.state[p].items() if k != "block_order"}
        return {**found, "param": p.detach().cpu()}

    expected, found, again = run("cpu"), run("cuda"), run("cuda")
    for key, value in found.items():
        assert torch.equal(value, again[key]), key
        if value.dtype == torch.uint8:
            off = (value.int() - expected[key].int()).abs()
            assert int(off.max()) <= 1
            assert int(off.sum()) <= 0.002 * off.numel()
        elif key != "param":
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-12)
    far = (found["param"] - expected["param"]).abs() > 1e-5
    assert int(far.sum()) <= 0.002 * far.numel()


def test_8_bits_take_2_bytes_a_parameter() -> None:
    """Both moments and their scales, and no more while a step runs."""
    count = 1 << 24
    p = nn.Parameter(torch.ones(count, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = train.FusedAdamW([p], states="8bit", max_grad_norm=1.0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    assert 2 * count * (1 + 4 / 256) <= used <= 2 * count * (1 + 4 / 256) + (4 << 20)


def test_a_model_learns_with_8_bits() -> None:
    fine, coded = (sum(learn(s, seed, "cuda") for seed in range(3)) for s in ("fp32", "8bit"))
    assert coded == pytest.approx(fine, rel=0.04)


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


def test_libraries_are_called_while_kernels_are_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of the forward alone: another thread runs the backward."""
    primed, own = [], library_warm_up.prime

    def prime(program: Program, *args: object) -> int:
        primed.append(program)
        return own(program, *args)

    monkeypatch.setattr(library_warm_up, "prime", prime)
    torch.manual_seed(0)
    layers = (nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 8, 3))
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(2, 8, 24, 20, device="cuda")
    model(x).square().mean().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    strop.optimize(model, train=True, options=strop.Options(cache_dir=str(tmp_path)))
    model(x).square().mean().backward()
    for p, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-2, atol=1e-4)
    assert len(primed) == 1
    assert {"capture", "partition", "libraries", "kernels"} <= set(
        strop.explain(model).stage_seconds()
    )

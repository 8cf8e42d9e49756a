"""On a GPU weights are streamed beside what is computed, and take no more memory than they may."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.errors import OptionError, UnsupportedError
from strop.runtime.run.growing_memory import held_bytes
from tests.e2e import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
WIDTH, DEPTH = 2048, 10
SPARE = 80 << 20  # bytes of working memory, scratch and what libraries keep


class Block(nn.Module):
    """A block in which a product reads its weights before what comes before it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.conv = nn.Conv2d(128, 128, 3, padding=1)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = torch.tanh(self.q(y)) * torch.tanh(self.k(y)) + torch.tanh(self.v(y))
        y = y + torch.tanh(self.conv(y.view(-1, 128, 4, 4))).view_as(y)
        return x + 0.1 * self.out(y)


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(DEPTH))).half().eval().requires_grad_(False)


def inputs(rows: int) -> Tensor:
    x = torch.randn(rows, WIDTH, generator=torch.manual_seed(rows))
    return x.half().to("cuda")


def size_of(net: nn.Module) -> int:
    return sum(w.nbytes for w in net.parameters())


def budgeted(net: Any, share: float) -> Any:
    budget_bytes = int(share * size_of(net))
    return strop.optimize(net, options=tiny.options(strict=True, weights_budget_bytes=budget_bytes))


@pytest.mark.parametrize("rows", [1, 8, 512])
def test_values_are_those_of_a_resident_model(rows: int) -> None:
    x = inputs(rows)
    resident = strop.optimize(
        model().to("cuda"), options=tiny.options(strict=True, cuda_graphs=False)
    )
    expected = [resident(x + n) for n in range(6)]
    strop.restore(resident)
    del resident
    for share in (0.3, 0.7):
        net = budgeted(model(), share)
        results = [net(x + n) for n in range(6)]  # nobody waits between them
        assert all(map(torch.equal, results, expected)), "bit for bit"
        strop.restore(net)


@pytest.mark.parametrize("start", ["cpu", "cuda"])
def test_weights_take_no_more_than_they_may(start: str) -> None:
    net, x, share = model(), inputs(64), 0.4
    size = size_of(net)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    device = x.device
    before = torch.cuda.memory_allocated(device) + held_bytes(device)
    net = budgeted(net.to(start), share)
    if start == "cuda":
        net(x)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(4):
        net(x)
    peak = torch.cuda.max_memory_allocated(device) + held_bytes(device) - before
    assert share * size * 0.5 < peak < share * size + SPARE
    strop.restore(net)
    assert {w.device.type for w in net.parameters()} == {start}


def test_writes_on_both_sides_are_seen() -> None:
    net, twin, x = budgeted(model(), 0.5), model().to("cuda"), inputs(64)
    for number in range(8):
        torch.testing.assert_close(net(x), twin(x), rtol=2e-2, atol=2e-2)  # fp16, DEPTH blocks
        places = {w.device.type for w in net.parameters()}
        assert places == {"cpu", "cuda"}, "each weight has one place"
        block = number % DEPTH
        for each in (net, twin):
            each[block].q.weight.data.mul_(0.25)  # at once, beside what the GPU still does
            each[-1 - block].out.weight.mul_(-0.5)
    state = {name: value * 0.5 for name, value in twin.state_dict().items()}
    for each in (net, twin):
        each.load_state_dict(state)
    torch.testing.assert_close(net(x), twin(x), rtol=2e-2, atol=2e-2)
    net.to("cuda")
    torch.testing.assert_close(net(x), twin(x), rtol=2e-2, atol=2e-2)
    assert {w.device.type for w in net.parameters()} == {"cpu", "cuda"}
    strop.restore(net)


def check_on_streams(net: Any, x: Tensor) -> None:
    """Calls on streams of the user give the bits of those on one."""
    expected = [net(x + n) for n in range(6)]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(3)], []
    for number in range(6):
        with torch.cuda.stream(streams[number % 3]):
            results.append(net(x + number))
    torch.cuda.synchronize()
    assert all(map(torch.equal, results, expected))


def test_streams_take_turns() -> None:
    net, x = budgeted(model(), 0.4), inputs(64)
    check_on_streams(net, x)


@pytest.mark.alone
def test_copies_run_beside_what_is_computed() -> None:
    net, x = budgeted(model(), 0.4), inputs(6144)
    resident = strop.optimize(model().to("cuda"), options=tiny.options(cuda_graphs=False))

    def milliseconds(run: Any) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()
        run()
        torch.cuda.synchronize()
        begin.record()
        for _ in range(3):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 3

    (dispatcher,) = strop.api.dispatchers_of(net).values()
    streamed, alone = milliseconds(lambda: net(x)), milliseconds(lambda: resident(x))
    plan = dispatcher.budget._plan
    host = torch.empty(plan.streamed_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    bus = milliseconds(lambda: there.copy_(host, non_blocking=True))
    print(f"streamed {streamed:.2f} ms, resident {alone:.2f} ms, bus {bus:.2f} ms")
    assert streamed < alone + 0.6 * bus, (streamed, alone, bus)


def test_what_torch_could_not_run_is_refused() -> None:
    net, x = budgeted(model(), 0.4), inputs(8)
    net(x)
    net.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="keeps weights on the host"):
        net(x)
    net.requires_grad_(False)
    with pytest.raises(UnsupportedError, match="keeps weights on the host"):
        net(x.cpu())
    graph = torch.cuda.CUDAGraph()
    net(x)
    torch.cuda.synchronize()
    with pytest.raises(OptionError, match="cannot be captured"), torch.cuda.graph(graph):
        net(x)

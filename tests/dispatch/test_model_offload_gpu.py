"""On a GPU weights that come back lie where they were, so CUDA graphs are captured once, and the
GPU's memory is free in between."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from accelerate import cpu_offload_with_hook
from torch import Tensor, nn

import strop
from strop.dispatch import model_offload
from strop.runtime.run import cuda_graphs
from strop.runtime.run.growing_memory import held_bytes
from strop.runtime.run.workspace import rest_on
from tests.e2e import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
WIDTH, DEPTH = 1024, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.conv = nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.q(x)) * torch.tanh(self.k(x)) + torch.tanh(self.v(x))
        return y + torch.tanh(self.conv(y.view(-1, 64, 4, 4))).view_as(y)


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(DEPTH))).half().eval().requires_grad_(False)


def test_graphs_outlive_offloading_and_memory_does_not() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(8, WIDTH, generator=torch.manual_seed(1)).half().to(device)
    resident = strop.optimize(model().to(device), options=tiny.options(strict=True))
    expected = [resident(x) for _ in range(3)][-1].clone()
    strop.restore(resident)
    del resident
    net = strop.optimize(model(), options=tiny.options(strict=True))
    size = sum(w.nbytes for w in net.parameters())
    _, handle = cpu_offload_with_hook(net, device)
    pool, places, copies = cuda_graphs.pool_of(device), [], []
    for _ in range(5):
        for _ in range(3):
            assert torch.equal(net(x), expected), "bit for bit as a resident model"
        places.append([w.data_ptr() for w in net.parameters()])
        copies.append(pool.num_captures)
        gc.collect()
        loaded = torch.cuda.memory_allocated(device) + held_bytes(device)
        handle.offload()
        free = torch.cuda.memory_allocated(device) + held_bytes(device)
        assert loaded - free > 0.95 * size
    weights = model_offload.known_offload(net)
    assert weights is not None
    assert weights.num_copied_back <= 2
    assert places[2] == places[3] == places[4]
    assert copies[2] == copies[4], "no graph is captured anew"
    strop.restore(net)


def test_writes_on_the_gpu_reach_the_host_and_writes_there_the_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(8, WIDTH, generator=torch.manual_seed(1)).half().to(device)
    net = strop.optimize(model(), options=tiny.options(strict=True))
    _, handle = cpu_offload_with_hook(net, device)
    twin = model().to(device)
    for number in range(6):
        torch.testing.assert_close(net(x), twin(x), rtol=2e-2, atol=2e-2)  # fp16, DEPTH blocks
        if number == 2:
            for each in (net, twin):
                each[3].q.weight.data.mul_(0.25)
        handle.offload()
        if number == 4:
            for each in (net, twin):
                each[5].v.weight.data.mul_(-0.5)
        pairs = zip(net.parameters(), twin.parameters(), strict=True)
        assert all(torch.equal(own, its.cpu()) for own, its in pairs)


def test_graphs_serve_behind_a_rest_of_working_memory() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(8, WIDTH, generator=torch.manual_seed(1)).half().to(device)
    net = strop.optimize(model().to(device), options=tiny.options(strict=True))
    expected = [net(x) for _ in range(3)][-1].clone()
    pool = cuda_graphs.pool_of(device)
    captures, held = pool.num_captures, held_bytes(device)
    for _ in range(3):
        rest_on(torch.device("cuda"))
        assert held_bytes(device) < held
        assert torch.equal(net(x), expected)
        assert held_bytes(device) <= held
    assert pool.num_captures == captures
    strop.restore(net)


def test_a_graph_of_somebody_else_keeps_its_working_memory() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(8, WIDTH, generator=torch.manual_seed(1)).half().to(device)
    net = strop.optimize(model().to(device), options=tiny.options(strict=True))
    side, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        expected = net(x).clone()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, stream=side):
        captured = net(x)
    for _ in range(2):
        rest_on(device)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)
    strop.restore(net)


def test_weights_that_are_moved_away_leave_the_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(8, WIDTH, generator=torch.manual_seed(1)).half().to(device)
    net = strop.optimize(model(), options=tiny.options(strict=True))
    size = sum(w.nbytes for w in net.parameters())
    for _ in range(3):
        net.to(device)
        results = [net(x) for _ in range(3)]
        assert all(torch.equal(result, results[0]) for result in results)
        gc.collect()
        loaded = torch.cuda.memory_allocated(device) + held_bytes(device)
        net.to("cpu")
        gc.collect()
        free = torch.cuda.memory_allocated(device) + held_bytes(device)
        assert loaded - free > 0.95 * size
    strop.restore(net)

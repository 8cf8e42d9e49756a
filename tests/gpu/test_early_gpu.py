"""Launches that begin before the one before has ended: the same results, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from strop.codegen.triton import emit
from strop.runtime.build.cubin import compile_cubin
from strop.runtime.build.driver import BoundLaunch, load
from tests.codegen.kernels import SAMPLES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs an NVIDIA GPU with programmatic dependent launch",
    ),
]

LENGTH = 64
Chain = list[BoundLaunch]


def chain(buffers: list[torch.Tensor], early: bool) -> Chain:
    """silu from each buffer into the next, round and round: every launch reads what the last one
    wrote, and writes what the one before that read."""
    emitted = emit(SAMPLES["silu_flat"](torch.float32).kernel)
    major, minor = torch.cuda.get_device_capability()
    function = load(compile_cubin(emitted.source, 10 * major + minor))
    scalars = [buffers[0].numel()]
    grid = [size.eval({"s0": scalars[0]}) for size in emitted.source.grid]
    stream = torch.cuda.current_stream().cuda_stream
    pairs = [(buffers[i % 3], buffers[(i + 1) % 3]) for i in range(LENGTH)]
    return [
        function.bind([a.data_ptr(), b.data_ptr()], scalars, grid, stream, early=early)
        for a, b in pairs
    ]


def in_a_row(launches: Chain) -> None:
    for launch in launches:
        launch()


def with_a_side_stream(launches: Chain) -> None:
    """A launch between an event that it waits for and one that others wait for."""
    own, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for number, launch in enumerate(launches):
        if number % 8 == 0:
            side.wait_stream(own)
            with torch.cuda.stream(side):
                torch.zeros(1 << 16, device="cuda")
            own.wait_stream(side)
        launch()


@pytest.mark.parametrize("in_graph", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("run", [in_a_row, with_a_side_stream])
@pytest.mark.parametrize("numel", [1_000, 300_000])
def test_early_launches_change_nothing(run: Callable[[Chain], None], numel: int, in_graph: bool):
    torch.manual_seed(0)
    start, results = torch.randn(numel, device="cuda"), []
    for early in (False, True):
        buffers = [start.clone() for _ in range(3)]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            launches = chain(buffers, early)
            if in_graph:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    run(launches)
                graph.replay()
            else:
                run(launches)
        torch.cuda.synchronize()
        results.append(buffers)
    for in_turn, early_too in zip(*results, strict=True):
        assert torch.equal(in_turn, early_too)
        assert not torch.equal(in_turn, start)

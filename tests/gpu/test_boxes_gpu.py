"""Boxes moved by the tensor memory accelerator, launched by Strop."""

from __future__ import annotations

import pytest
import torch

from strop.runtime.build.cubin import compile_cubin
from strop.runtime.build.driver import BoundLaunch, load
from tests.codegen.boxes import COLS, expected, shifted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs an NVIDIA GPU with a tensor memory accelerator",
    ),
]


def bound(
    x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor, shift: int, stream: int
) -> BoundLaunch:
    source = shifted(x.dtype)
    major, minor = torch.cuda.get_device_capability()
    function = load(compile_cubin(source, 10 * major + minor))
    grid = [size.eval({"s0": len(out)}) for size in source.grid]
    views = [(t.shape, t.stride()) for t in (x, out)]
    pointers = [t.data_ptr() for t in (x, factor, out)]
    return function.bind(pointers, [len(out), shift], grid, stream, views=views)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shift", [0, 5, -37, 1000])
def test_zeros_come_from_outside_and_nothing_goes_there(dtype: torch.dtype, shift: int) -> None:
    memory = torch.randn(60, 2 * COLS, device="cuda").to(dtype)
    x = memory[:41, COLS:]  # rows of another stride, and no multiple of a box
    target = torch.full((60, COLS), 7.0, device="cuda", dtype=dtype)
    factor = torch.full((), 2.0, device="cuda", dtype=dtype)
    bound(x, factor, target[:41], shift, torch.cuda.current_stream().cuda_stream)()
    assert torch.equal(target[:41], expected(x, 2.0, shift))
    assert bool((target[41:] == 7.0).all())


def test_pointers_are_patched_between_launches_and_graphs_keep_theirs() -> None:
    first, second = torch.randn(2, 64, COLS, device="cuda")
    factor, (one, two) = torch.ones((), device="cuda"), torch.zeros(2, 64, COLS, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    launch = bound(first, factor, one, 3, stream.cuda_stream)
    with torch.cuda.graph(graph, stream=stream):
        launch()
    launch.set_pointer(0, second.data_ptr())
    launch.set_pointer(2, two.data_ptr())
    with torch.cuda.stream(stream):
        launch()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(one, expected(first, 1.0, 3))
    assert torch.equal(two, expected(second, 1.0, 3))

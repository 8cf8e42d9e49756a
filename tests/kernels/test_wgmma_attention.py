"""Attention in PTX: what the assembler makes of it, and on a GPU its results."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strop.errors import CodegenError
from strop.ir.device import GpuTarget
from strop.ir.source import KernelSource
from strop.kernels.attention.moves import RESULT
from strop.kernels.attention.wgmma import KINDS, WgmmaLayout, wgmma_attention
from strop.kernels.attention.wgmma_tiles import WgmmaTile
from strop.kernels.tuned import tuned
from strop.runtime.build import compilers as builds
from strop.runtime.build.cubin import cache_key
from strop.runtime.build.loader import kernel_loader
from tests.codegen.test_triton_compile import TOOLS, compiled, disassemble, resources
from tests.gpus import H100
from tests.kernels.launching import attends, by_tile, launched, refuse
from tests.kernels.test_ptx_kernels import attended, heads
from tests.kernels.test_tma_attention import judge

pytest.importorskip("triton")

TIMES = tuned(H100).attention
IN_USE = [
    (head, tile)
    for head in TIMES.least_queries
    for tile in TIMES.tiles(head)
    if isinstance(tile, WgmmaTile)
]


def judge_assembled(source: KernelSource, programs: int, tmp_path: Path) -> None:
    """Without a spill, within a processor's memory, and with products that do not wait for each
    other, of which ptxas would tell. ``programs``: on a processor."""
    cubin = compiled(source, 90)
    assert cubin.early
    assert cubin.boxes[3].sizes == RESULT
    assert resources(cubin, tmp_path)[1] == 0
    assert programs * (cubin.shared + 1024) <= 227 * 1024
    text = tmp_path / "kernel.ptx"
    text.write_text(source.text)
    said = subprocess.run(
        [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", text, "-o", "/dev/null"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert "serialized" not in said
    assert "0 bytes spill stores" in said


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(("head", "tile"), IN_USE, ids=str)
def test_assembles(head: int, tile: WgmmaTile, dtype: torch.dtype, tmp_path: Path) -> None:
    judge_assembled(wgmma_attention(head, head**-0.5, tile, dtype), tile.programs, tmp_path)


def test_the_loop_is_what_it_should_be(tmp_path: Path) -> None:
    """The next scores are begun with the results, and the wait for those comes behind the
    exponentials; scaling and subtracting are one instruction, and nobody asks for maxima but where
    sums are large."""
    tile = WgmmaTile(4, 80, 3)
    order = disassemble(compiled(wgmma_attention(40, 0.2, tile, torch.float16), 90), tmp_path)
    waits = [n for n, op in enumerate(order) if op.startswith("WARPGROUP.DEPBAR")]
    products = [n for n, op in enumerate(order) if op.startswith("HGMMA")]
    assert len(waits) == 4
    begin, end = waits[1], waits[2]  # of the loop: scores are there, results are there
    assert len([n for n in products if waits[0] < n < begin]) == 3 + tile.keys // 16
    scores = tile.keys // 2  # of a thread
    votes = [n for n in range(begin, end) if order[n] == "VOTE.ANY"]
    assert len(votes) == 2  # whether sums are large, and too large
    usual = order[begin : votes[0]]
    assert usual.count("MUFU.EX2") == sum(op.startswith("FFMA") for op in usual) == scores
    assert not any(re.match(r"FMNMX|SHFL|HMMA|LDS", op) for op in usual)
    rare = order[votes[1] : end]
    assert sum(op.startswith("HMMA") for op in rare) == 3 * tile.keys // 8
    assert not any(re.match(r"(LDL|STL|LDG)\b", op) for op in order)


def test_parts_of_shared_memory_do_not_meet() -> None:
    for head, tile in IN_USE:
        layout = WgmmaLayout(head, tile)
        starts = (0, layout.keys_at, layout.values_at, layout.queries_full)
        sizes = (
            layout.parts * layout.queries * 128,
            tile.stages * layout.block,
            tile.stages * layout.block,
            8 * (1 + 4 * tile.stages),
        )
        for (start, size), after in zip(
            zip(starts, sizes, strict=True), (*starts[1:], layout.shared), strict=True
        ):
            assert start + size == after
        assert all(start % 1024 == 0 for start in starts)  # where lines are mixed


def test_what_the_assembler_refuses_is_named() -> None:
    source = wgmma_attention(40, 0.2, WgmmaTile(4, 80, 3), torch.float16)
    text = source.text.replace("wgmma.fence.sync.aligned", "wgmma.fences")
    worker = builds.Worker()
    try:
        with pytest.raises(CodegenError, match=r"wgmma_attention.*wgmma") as caught:
            worker.compile(replace(source, text=text), GpuTarget(90))
        assert "ptxas" in str(caught.value)
    finally:
        worker.dismiss()
        worker.wait()
    assert cache_key(source, GpuTarget(90)) != cache_key(replace(source, text=text), GpuTarget(90))


needs_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an NVIDIA GPU of sm_90",
)
OF_HEADS = {  # batch, heads, queries, keys
    40: ((2, 8, 4096, 4096), (2, 3, 1000, 333), (1, 1, 64, 80), (1, 2, 1, 81), (3, 1, 700, 161)),
    64: ((2, 5, 1000, 77), (1, 1, 1, 1), (2, 2, 130, 80), (2, 20, 1024, 1024)),
    80: ((2, 8, 1024, 1024), (2, 3, 777, 1001), (1, 2, 70, 129), (3, 1, 5, 257)),
    72: ((2, 16, 1024, 1024), (1, 3, 70, 333)),
    96: ((2, 16, 1024, 1024), (1, 3, 70, 333)),
    128: ((2, 8, 1024, 1024), (1, 3, 70, 333)),
    160: (),
}


def of_tile(tile: WgmmaTile, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kernels = kernel_loader("cuda", 0, "", 0)
    stream = torch.cuda.current_stream().cuda_stream
    found = launched(by_tile(tile, attends(q, k, v)), kernels, stream)
    return found.allocating(refuse)((q, k, v))


def by_the_machine(tile: WgmmaTile, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    head = q.shape[-1]
    return attended(wgmma_attention(head, head**-0.5, tile, q.dtype), q, k, v, tile)


def operands(
    shape: Sequence[int], head: int, dtype: torch.dtype, device: str = "cuda"
) -> tuple[Tensor, ...]:
    return heads(shape, head, dtype, device)


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(("head", "tile"), IN_USE, ids=str)
def test_as_accurate_as_torch(head: int, tile: WgmmaTile, dtype: torch.dtype) -> None:
    for shape in OF_HEADS[head]:
        if tile.stages > 1 or shape[3] <= tile.keys:
            given = operands(shape, head, dtype)
            judge(of_tile(tile, *given), *given)
    few = operands((2, 3, 200, 77), head, dtype)
    judge(of_tile(tile, *few), *few)


def judge_large(run: Callable[..., Tensor], head: int, tile: WgmmaTile, device: str) -> None:
    """In one row all scores are very negative, in one very positive; in one a single key counts,
    and in others maxima grow from block to block, by less than what is let be, by more than it, and
    by more than fp32 has room for."""
    keys = 700 if tile.stages > 1 else 77
    q, k, v = (t.clone() for t in operands((1, 2, 100, keys), head, torch.float16, device))
    k[..., 0], q[:, :, :7] = 20.0, 0.0
    q[:, :, 0, 0], q[:, :, 1, 0] = -2000.0, 2000.0
    q[:, :, 2] = k[:, :, keys - 1] * 100
    k[..., 1] = torch.linspace(30, -30, keys, device=device)
    for row, by in enumerate((5.0, 40.0, 150.0, 2000.0), start=3):
        q[:, :, row, 1] = by  # the first block that is weighed is the last one
    found = run(tile, q, k, v)
    assert bool(found.isfinite().all())
    judge(found, q, k, v)


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize(("head", "tile"), IN_USE, ids=str)
def test_scores_may_be_large(head: int, tile: WgmmaTile) -> None:
    judge_large(of_tile, head, tile, "cuda")


@pytest.mark.parametrize(("head", "tile"), IN_USE, ids=str)
def test_scores_may_be_large_by_the_machine(head: int, tile: WgmmaTile) -> None:
    judge_large(by_the_machine, head, tile, "cpu")


def judge_nan(
    run: Callable[..., Tensor], head: int, tile: WgmmaTile, bad: float, device: str
) -> None:
    q, k, v = (t.clone() for t in operands((2, 1, 64, 77), head, torch.float16, device))
    q[:, :, 5, 0], k[0, :, 30, 0] = bad, bad  # of one picture all rows may be NaN
    found = run(tile, q, k, v)
    exact = (q.double() @ k.double().mT * head**-0.5).softmax(-1) @ v.double()
    assert torch.equal(found.isnan(), exact.isnan())
    assert not exact.isnan().all()
    assert exact.isnan().any()


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("head", "tile"), IN_USE[:2] + IN_USE[-1:], ids=str)
def test_what_softmax_makes_nan_is_nan(head: int, tile: WgmmaTile, bad: float) -> None:
    judge_nan(of_tile, head, tile, bad, "cuda")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("head", "tile"), IN_USE[:2] + IN_USE[-1:], ids=str)
def test_what_softmax_makes_nan_is_nan_by_the_machine(
    head: int, tile: WgmmaTile, bad: float
) -> None:
    judge_nan(by_the_machine, head, tile, bad, "cpu")


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize(("head", "tile"), IN_USE, ids=str)
def test_nothing_of_a_neighbour(head: int, tile: WgmmaTile) -> None:
    """What lies behind a head, or behind the last key, has no share, be it NaN; and nothing is
    written behind the last query."""
    given = operands((2, 2, 70, 77), head, torch.float16)
    around = torch.full((3, 2, 99, 4, head + 8), float("nan"), device="cuda", dtype=torch.float16)
    inner = around.transpose(2, 3)[:, :, 1:3, 3:80, :head]
    for target, source in zip(inner, given, strict=True):
        target[:, :, : source.shape[2]].copy_(source)
    found = of_tile(tile, inner[0][:, :, :70], *inner[1:])
    assert torch.equal(found, of_tile(tile, *given))


@pytest.mark.gpu
@needs_a_gpu
def test_in_a_graph_and_on_other_addresses() -> None:
    kernels, stream = kernel_loader("cuda", 0, "", 0), torch.cuda.Stream()
    shape, tile = (2, 8, 1024, 1024), WgmmaTile(3, 80, 3)
    like = operands(shape, 40, torch.float16, "meta")
    found = launched(by_tile(tile, attends(*like)), kernels, stream.cuda_stream)
    call = found.allocating(refuse)
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(2):
            given = operands(shape, 40, torch.float16)
            before = call(given)
            judge(before, *given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = call(given)
        captured.fill_(float("nan"))
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, before)

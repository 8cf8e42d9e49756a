"""Zeros for counters come from one allocation, and no two of them overlap."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.options import Options
from strop.runtime.run.graph_capture import _count_kernels
from strop.runtime.run.zeroed_scratch import ALIGNED, CHUNK, SET_ASIDE, SetAside, ZeroedScratch

CPU = torch.device("cpu")


def test_pieces_are_zero_aligned_and_apart() -> None:
    zeros = ZeroedScratch()
    pieces = [zeros.take(n % 7 + 1, dtype, CPU) for n in range(40) for dtype in KINDS]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        assert not piece.any()
        piece.fill_(number % 100 + 1)
    for number, piece in enumerate(pieces):
        assert (piece == number % 100 + 1).all()


def test_small_pieces_share_an_allocation_and_large_ones_do_not() -> None:
    zeros = ZeroedScratch()
    small = [zeros.take(3, torch.int32, CPU) for _ in range(20)]
    large = zeros.take(CHUNK, torch.int32, CPU)
    assert len({piece.untyped_storage().data_ptr() for piece in small}) == 1
    assert large.numel() == CHUNK
    assert large.untyped_storage().data_ptr() != small[0].untyped_storage().data_ptr()


def test_a_full_chunk_is_followed_by_another() -> None:
    zeros = ZeroedScratch()
    pieces = [zeros.take(1, torch.int64, CPU) for _ in range(CHUNK // ALIGNED + 1)]
    assert len({piece.untyped_storage().data_ptr() for piece in pieces}) == 2
    assert len({piece.data_ptr() for piece in pieces}) == len(pieces)


def test_zeros_are_set_aside_for_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    aside = SetAside()
    assert aside.take(64, CPU) is None
    for _ in range(3):
        aside.prepare(CPU)
    assert len(waits) == 1
    pieces = [aside.take(SET_ASIDE // 4, CPU) for _ in range(5)]
    assert pieces[4] is None
    for number, piece in enumerate(pieces[:4]):
        assert piece is not None
        assert not piece.any()
        piece.fill_(number + 1)
    aside.prepare(CPU)
    assert len(waits) == 2
    piece = aside.take(64, CPU)
    assert piece is not None
    assert not piece.any()


class Totals(nn.Module):
    """Adds up long columns, by programs that count who is last."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0) + x.amax(0)


@pytest.mark.gpu
def test_a_captured_call_has_no_launch_for_zeros(tmp_path: Path) -> None:
    module = strop.optimize(Totals().eval(), options=Options(cache_dir=str(tmp_path), strict=True))
    x, stream = torch.randn(20_000, 96, device="cuda"), torch.cuda.Stream()
    wanted = Totals()(x)
    with torch.no_grad():
        for _ in range(3):
            module(x)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, stream=stream):
            found = module(x)
    assert _count_kernels(graph) == module.forward.counters.launches
    graph.instantiate()
    for _ in range(3):
        found.zero_()
        graph.replay()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


KINDS = (torch.int32, torch.int64, torch.uint8)

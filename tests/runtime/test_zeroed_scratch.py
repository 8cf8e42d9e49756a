"""Zeros for counters come from one allocation, and no two of them overlap."""

from __future__ import annotations

import torch

from strop.runtime.run.zeroed_scratch import ALIGNED, CHUNK, ZeroedScratch

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


KINDS = (torch.int32, torch.int64, torch.uint8)

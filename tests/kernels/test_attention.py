"""Which kernel of ours does an attention."""

from __future__ import annotations

import pytest
import torch

from strop.ir.dims import const, symbol
from strop.kernels.attention.choice import (
    is_boxed,
    source_of,
    sources_anywhere,
    sources_at,
    tile_of,
)
from strop.kernels.attention.cross import KeysTile
from strop.kernels.attention.tma import Tile
from strop.kernels.attention.wgmma_tiles import WgmmaTile

WITH_QUERIES = Tile(64, 64, 3, 4, blocks=0, with_queries=True)
PLAIN = {"causal": False, "scale": None}
SHAPE = (symbol("b"), const(8), symbol("n"), const(40))


@pytest.mark.parametrize(
    ("attrs", "shapes", "dtype", "expected"),
    [
        (PLAIN, [SHAPE] * 3, torch.float16, True),
        (PLAIN, [SHAPE] * 3, torch.bfloat16, True),
        (PLAIN | {"scale": 0.5}, [SHAPE] * 3, torch.float16, True),
        (PLAIN, [SHAPE] * 3, torch.float32, False),
        (PLAIN, [SHAPE] * 4, torch.float16, False),  # with a mask
        (PLAIN | {"causal": True}, [SHAPE] * 3, torch.float16, False),
        (PLAIN | {"scale": -1.0}, [SHAPE] * 3, torch.float16, False),
        (PLAIN, [(*SHAPE[:3], const(72))] * 3, torch.float16, False),
        (PLAIN, [(*SHAPE[:3], symbol("d"))] * 3, torch.float16, False),
        (PLAIN, [SHAPE, SHAPE, (*SHAPE[:3], const(64))], torch.float16, False),
        (PLAIN, [SHAPE, SHAPE[2:], SHAPE[2:]], torch.float16, False),  # keys for all heads
    ],
)
def test_which_calls(attrs, shapes, dtype, expected) -> None:
    assert is_boxed(attrs, shapes, dtype) == expected


def test_which_tiles() -> None:
    assert tile_of(80, 16, 1024, 77) == WgmmaTile(1, 80, 1, 2)
    assert tile_of(80, 16, 4096, 77) == KeysTile(2, 80, 2)
    assert tile_of(80, 16, 1024, 100) == WITH_QUERIES
    assert tile_of(160, 16, 256, 256) == WITH_QUERIES
    assert tile_of(64, 40, 1024, 1024) == WgmmaTile(4, 64, 4, early=True)
    assert tile_of(64, 40, 4096, 77) == WgmmaTile(1, 80, 1, 5)
    assert tile_of(64, 40, 4096, 81) is None  # one step of that tile has 80 keys
    assert tile_of(40, 16, 4096, 77) == KeysTile(2, 80, 2)
    # of 80 keys the last 16 alone may be none
    assert tile_of(40, 16, 4096, 64) == Tile(128, 32, 4, 4, parts=1, blocks=0)
    assert tile_of(64, 20, 4096, 4096) == WgmmaTile(4, 64, 4, early=True)
    assert tile_of(64, 80, 1024, 1024) == WgmmaTile(4, 64, 4, early=True)
    assert tile_of(64, 16, 1024, 1024) is None  # of cuDNN's programs there is one a processor
    assert tile_of(128, 16, 64, 64) is None
    assert tile_of(64, 12, 128, 128) is None  # BERT's: not measured


def test_programs_run_in_rounds() -> None:
    """The longest is not always best: of 1536 queries 256 a program leave processors idle."""
    assert tile_of(40, 16, 4096, 4096) == WgmmaTile(4, 80, 4)
    assert tile_of(40, 16, 1536, 1536) == WgmmaTile(3, 80, 3)
    assert tile_of(40, 16, 1024, 1024) == WgmmaTile(2, 64, 4, 2)
    assert tile_of(80, 16, 1024, 1024) == WgmmaTile(2, 128, 3)
    assert tile_of(80, 16, 2304, 2304) == WgmmaTile(3, 64, 3, early=True)


def test_the_last_round_is_shared_out() -> None:
    """264 of 320 programs are two rounds of 132 processors, 56 are shared by 112 more."""
    shares = WgmmaTile(4, 64, 4).shares(20, 4096, 4096)
    assert shares.scalars == (264, 2, 376)
    assert (shares.rounds, shares.load) == (3, 2.7)
    assert WgmmaTile(4, 80, 4).shares(16, 4096, 4096).scalars == (256, 4, 256)
    assert not WgmmaTile(2, 64, 4, 2).is_shared
    assert not WgmmaTile(2, 80, 1).is_shared


@pytest.mark.parametrize("head", [40, 64, 80, 160])
def test_all_are_among_those_for_other_sizes(head: int) -> None:
    """They are built behind the first call: a new size waits for none of them."""
    attrs, everywhere = {"causal": False, "scale": None}, set()
    known = set(sources_anywhere(attrs, head, torch.float16))
    for batch in (1, 2, 8, 16):
        for side in (8, 12, 16, 24, 32, 48, 64, 72, 96, 128):
            for keys in (77, 154, side**2):
                q, k = (batch, 8, side**2, head), (batch, 8, keys, head)
                everywhere |= set(sources_at(attrs, (q, k, k), torch.float16))
    assert everywhere <= known
    assert all(
        source_of(head, head**-0.5, tile, torch.float16) in known
        for tile in (tile_of(head, 16, 1024, 77),)
        if tile
    )

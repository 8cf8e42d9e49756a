"""Which kernel of ours does an attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from strop.ir.dims import const, symbol
from strop.kernels import library
from strop.kernels.attention import rows
from strop.kernels.attention.cross import CrossTile
from strop.kernels.attention.times import AnyTile
from strop.kernels.attention.tma import TmaTile
from strop.kernels.attention.wgmma_tiles import WgmmaTile
from strop.kernels.kernel import NEVER, RESULT, Kernel, Launch, Lies
from strop.kernels.tuned import tuned
from tests.gpus import A100, H100, RTX_5090
from tests.kernels.launching import PLAIN, by_tile, call, measured, problem

OURS = (rows.WGMMA, rows.CROSS, rows.TMA)
WITH_QUERIES = TmaTile(64, 64, 3, 4, blocks=0, with_queries=True)
SHAPE = (symbol("b"), const(8), symbol("n"), const(40))


@pytest.fixture(autouse=True)
def _rules_alone() -> Iterator[None]:
    """Cases that were measured take the place of the rules."""
    with measured():
        yield


def tile_of(head: int, batch_times_heads: int, queries: int, keys: int) -> AnyTile | None:
    return rows.tile_of(head, batch_times_heads, queries, keys, H100)


@pytest.mark.parametrize("row", OURS, ids=lambda row: row.name)
@pytest.mark.parametrize(
    ("attrs", "shapes", "dtype", "reason"),
    [
        (PLAIN, [SHAPE] * 3, torch.float16, ""),
        (PLAIN, [SHAPE] * 3, torch.bfloat16, ""),
        ({**PLAIN, "scale": 0.5}, [SHAPE] * 3, torch.float16, ""),
        (PLAIN, [SHAPE] * 3, torch.float32, "computes fp16 and bf16, not torch.float32"),
        (PLAIN, [SHAPE] * 4, torch.float16, "computes attention without a mask"),
        (
            {**PLAIN, "causal": True},
            [SHAPE] * 3,
            torch.float16,
            "computes attention without a mask",
        ),
        ({**PLAIN, "scale": -1.0}, [SHAPE] * 3, torch.float16, "wants a positive scale"),
        (PLAIN, [(*SHAPE[:3], const(56))] * 3, torch.float16, "not measured for heads of 56"),
        (PLAIN, [(*SHAPE[:3], symbol("d"))] * 3, torch.float16, "heads have a known size"),
        (PLAIN, [SHAPE, SHAPE, (*SHAPE[:3], const(64))], torch.float16, "heads of 40, 64"),
        (PLAIN, [SHAPE, SHAPE[2:], SHAPE[2:]], torch.float16, "(B, H, S, D)"),  # keys for all heads
    ],
)
def test_which_calls(row: Kernel, attrs, shapes, dtype, reason) -> None:
    found = row.supports(call("attention", *shapes, dtype=dtype, **attrs), H100)
    assert reason in found
    assert bool(reason) == bool(found)


@pytest.mark.parametrize(
    ("row", "device", "reason"),
    [
        (rows.WGMMA, A100, "runs by WGMMA, which NVIDIA A100-SXM4-80GB lacks"),
        (rows.CROSS, RTX_5090, "runs by WGMMA, which NVIDIA GeForce RTX 5090 lacks"),
        (rows.TMA, A100, "runs by TMA, which NVIDIA A100-SXM4-80GB lacks"),
        (rows.TMA, RTX_5090, "was not measured for heads of 40 on NVIDIA GeForce RTX 5090"),
    ],
    ids=lambda given: getattr(given, "name", given),
)
def test_which_devices(row: Kernel, device, reason: str) -> None:
    assert row.supports(call("attention", *[SHAPE] * 3, **PLAIN), device) == reason


def test_which_tiles() -> None:
    assert tile_of(80, 16, 1024, 77) == WgmmaTile(1, 80, 1, 2)
    assert tile_of(80, 16, 4096, 77) == CrossTile(2, 80, 2)
    assert tile_of(80, 16, 1024, 100) == WITH_QUERIES
    assert tile_of(160, 16, 256, 256) == WITH_QUERIES
    assert tile_of(64, 40, 1024, 1024) == WgmmaTile(4, 64, 4, early=True)
    assert tile_of(64, 40, 4096, 77) == WgmmaTile(1, 80, 1, 5)
    assert tile_of(64, 40, 4096, 81) is None  # one step of that tile has 80 keys
    assert tile_of(40, 16, 4096, 77) == CrossTile(2, 80, 2)
    # of 80 keys the last 16 alone may be none
    assert tile_of(40, 16, 4096, 64) == TmaTile(128, 32, 4, 4, parts=1, blocks=0)
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
    shares = WgmmaTile(4, 64, 4).shares(20, 4096, 4096, 132)
    assert shares.scalars == (264, 2, 376)
    assert (shares.rounds, shares.load) == (3, 2.7)
    assert WgmmaTile(4, 80, 4).shares(16, 4096, 4096, 132).scalars == (256, 4, 256)
    assert not WgmmaTile(2, 64, 4, 2).is_shared
    assert not WgmmaTile(2, 80, 1).is_shared
    assert WgmmaTile(4, 64, 4).shares(20, 4096, 4096, 66).scalars != shares.scalars


@pytest.mark.parametrize("head", [40, 64, 72, 80, 96, 128, 160])
def test_all_are_among_those_for_other_sizes(head: int) -> None:
    """They are built behind the first call: a new size waits for none of them."""
    shape = (symbol("b"), const(8), symbol("n"), const(head))
    asked, everywhere = call("attention", *[shape] * 3, **PLAIN), set()
    known = set(library.forms(asked, H100))
    for batch in (1, 2, 8, 16):
        for side in (8, 12, 16, 24, 32, 48, 64, 72, 96, 128):
            for keys in (77, 154, side**2):
                q, k = (batch, 8, side**2, head), (batch, 8, keys, head)
                at = library.select(asked, problem("attention", q, k, k, **PLAIN), H100)
                tile = tile_of(head, batch * 8, side**2, keys)
                assert (tile is None) == (at.kernel == "sdpa") == (not at.sources)
                if tile is not None:
                    scale = head**-0.5
                    assert at.sources == (rows.source_of(head, scale, tile, torch.float16),)
                everywhere |= set(at.sources)
    assert everywhere
    assert everywhere <= known
    assert known == {
        rows.source_of(head, head**-0.5, tile, torch.float16)
        for tile in tuned(H100).attention.tiles(head)
    }


def test_each_row_runs_where_the_tile_is_its_own() -> None:
    q, few = (2, 8, 4096, 40), (2, 8, 77, 40)
    ours = {row.name: row.cost_us(problem("attention", q, few, few, **PLAIN), H100) for row in OURS}
    assert ours == {"wgmma_attention": NEVER, "cross_attention": 0.0, "tma_attention": NEVER}
    for row in (rows.WGMMA, rows.TMA):
        assert row.launch(problem("attention", q, few, few, **PLAIN), H100) is None


def test_a_model_of_rounds_is_compared_with_the_librarys() -> None:
    """Of heads for which both were measured; elsewhere a tile that was measured is the fastest."""
    q = (2, 20, 1024, 64)
    choice = library.select(
        call("attention", *[(2, 20, 1024, 64)] * 3, **PLAIN),
        problem("attention", q, q, q, **PLAIN),
        H100,
    )
    assert choice.kernel == "wgmma_attention"
    assert 0 < choice.cost_us < dict(choice.beaten)["sdpa"]
    small = (1, 16, 1024, 64)
    asked = problem("attention", small, small, small, **PLAIN)
    assert library.select(asked.call, asked, H100).kernel == "sdpa"


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 8, 4096, 40), (2, 1, 4096, 40), (2, 1, 4096, 40)),
        ((2, 8, 4096, 40), (1, 8, 4096, 40), (1, 8, 4096, 40)),
        ((2, 8, 4096, 40), (2, 8, 4096, 40), (2, 8, 77, 40)),
        ((2, 8, 0, 40), (2, 8, 4096, 40), (2, 8, 4096, 40)),
        ((2, 8, 4096, 40), (2, 8, 0, 40), (2, 8, 0, 40)),
        ((2**15, 2, 256, 40), (2**15, 2, 256, 40), (2**15, 2, 256, 40)),
    ],
    ids=["heads", "batch", "values", "no query", "no key", "too many heads"],
)
def test_sizes_that_do_not_match_are_for_the_library(q, k, v) -> None:
    asked = problem("attention", q, k, v, **PLAIN)
    choice = library.select(asked.call, asked, H100)
    assert choice.kernel == "sdpa"
    assert choice.launches is None
    assert dict(choice.beaten) == {row.name: NEVER for row in OURS}


def test_tensors_of_2_to_the_31_elements_are_for_the_library() -> None:
    for queries, is_ours in ((2**31 // 80 + 1, False), (2**29 // 80, True)):
        asked = problem("attention", *[(1, 2, queries, 40)] * 3, **PLAIN)
        assert (library.select(asked.call, asked, H100).launches is not None) == is_ours


@pytest.mark.parametrize(
    "tile",
    [WgmmaTile(4, 80, 4), CrossTile(2, 80, 2), TmaTile(128, 32, 4, 4, parts=1, blocks=0)],
    ids=str,
)
def test_what_is_launched(tile: AnyTile) -> None:
    """Four tensors by boxes; the result lies as the queries' merged heads do."""
    asked = problem("attention", (2, 8, 4096, 40), (2, 8, 77, 40), (2, 8, 77, 40), **PLAIN)
    launches = by_tile(tile, asked)
    assert launches is not None
    assert (launches.result, launches.order) == ((2, 8, 4096, 40), (0, 2, 1, 3))
    assert not launches.scratch
    (part,) = launches.parts
    assert isinstance(part, Launch)
    assert len(part.operands) == len(part.source.params)
    assert [operand.number for operand in part.operands[:4]] == [0, 1, 2, RESULT]
    assert all(o.lies is Lies.ROWS and o.view is not None for o in part.operands)
    assert part.scalars == rows.scalars_of(tile, 2, 8, 4096, 77, H100.sms)
    assert part.scalars[:4] == (4096, 77, 8, 16)


def test_fewer_multiprocessors_share_otherwise() -> None:
    small = replace(H100, name="a piece of an H100", sms=66)
    asked = problem("attention", *[(2, 10, 4096, 64)] * 3, **PLAIN)
    whole, piece = (by_tile(WgmmaTile(4, 64, 4), asked, device) for device in (H100, small))
    assert whole is not None
    assert piece is not None
    assert whole.sources == piece.sources
    assert whole != piece


def test_keys_of_fewer_dims_are_for_the_library() -> None:
    """Torch takes keys and values (S, D) for all heads; their number is asked for all the same."""
    asked = problem("attention", (2, 8, 64, 40), (64, 40), (64, 40), **PLAIN)
    choice = library.select(asked.call, asked, H100)
    assert (choice.kernel, choice.beaten) == ("sdpa", ())
    assert choice.cost_us > 0

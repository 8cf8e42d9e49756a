"""Our kernels in PTX by the machine that runs it on a CPU, and that none of the instructions that
order others can be left out: without it the machine finds a fault, or the result is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.ir.source import KernelSource
from strop.kernels.attention.rows import scalars_of
from strop.kernels.attention.wgmma import wgmma_attention
from strop.kernels.attention.wgmma_tiles import WgmmaTile
from strop.testing import assert_as_accurate_as_eager
from tests.gpus import H100
from tests.kernels import cluster_linear
from tests.kernels.ptx_machine import PtxError, launch
from tests.kernels.test_ptx_machine import kernel, run

F16, BF16 = torch.float16, torch.bfloat16


def heads(
    shape: Sequence[int], head: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """Slices of one product, as in a UNet."""
    batch, many, queries, keys = shape
    torch.manual_seed(sum(shape))
    merged = torch.randn(batch, max(queries, keys), 3, many, head, device=device).to(dtype)
    q, k, v = merged.permute(2, 0, 3, 1, 4)
    return q[:, :, :queries], k[:, :, :keys], v[:, :, :keys]


def attended(
    source: KernelSource,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile: WgmmaTile,
    seed: int = 0,
    shares: tuple[int, int, int] | None = None,
) -> Tensor:
    """On a CPU, instruction by instruction. ``shares``: others than those of the tile."""
    (batch, many, queries, head), keys = q.shape, k.shape[2]
    out = q.new_full((batch, queries, many, head), math.nan).transpose(1, 2)
    scalars = scalars_of(tile, batch, many, queries, keys, H100.sms)
    launch(source, (q, k, v, out), (*scalars[:4], *(shares or scalars[4:])), seed=seed)
    return out


def attend(
    source: KernelSource,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile: WgmmaTile,
    seed: int,
    shares: tuple[int, int, int] | None = None,
) -> None:
    """Raises unless it is as accurate as torch."""
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    eager = F.scaled_dot_product_attention(q, k, v)
    assert_as_accurate_as_eager(attended(source, q, k, v, tile, seed, shares), eager, exact)


@pytest.mark.parametrize(
    ("head", "tile", "shape", "dtype"),
    [
        (40, WgmmaTile(4, 80, 3), (1, 2, 130, 200), F16),
        (40, WgmmaTile(2, 64, 4), (2, 1, 70, 333), F16),
        (40, WgmmaTile(3, 80, 3), (1, 1, 1, 81), F16),
        (80, WgmmaTile(2, 128, 2), (1, 2, 70, 300), F16),
        (80, WgmmaTile(3, 64, 3), (1, 1, 200, 257), BF16),
        (64, WgmmaTile(1, 80, 1, 5), (2, 2, 70, 77), F16),
        (80, WgmmaTile(1, 80, 1, 2), (1, 2, 65, 80), BF16),
    ],
    ids=str,
)
def test_attention(head: int, tile: WgmmaTile, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    source, given = wgmma_attention(head, head**-0.5, tile, dtype), heads(shape, head, dtype)
    for seed in range(4):
        attend(source, *given, tile, seed)


@pytest.mark.parametrize("shares", [(2, 2, 6), (0, 1, 16), (3, 1, 7)], ids=str)
@pytest.mark.parametrize("keys", [60, 200])
def test_attention_shared_out(shares: tuple[int, int, int], keys: int) -> None:
    """Of two heads of 300 queries, 256 a program; some programs have none."""
    given, tile = heads((1, 2, 300, keys), 40, F16), WgmmaTile(4, 80, 3)
    source = wgmma_attention(40, 40**-0.5, tile, F16)
    for seed in range(2):
        attend(source, *given, tile, seed, shares)


def linear(tile: cluster_linear.Tile, rows: int, cols: int, depth: int) -> Callable[..., None]:
    torch.manual_seed(rows + cols)
    x, w = torch.randn(rows, depth).half(), (torch.randn(cols, depth) * depth**-0.5).half()
    down = -(-rows // (tile.rows * tile.down))
    across = -(-cols // (tile.cols * tile.across)) * tile.down * tile.across
    sizes = (rows, cols, -(-depth // 64), down, across)
    exact, eager = x.double() @ w.double().T, x @ w.T

    def call(source: KernelSource, seed: int) -> None:
        out = x.new_full((rows, cols), math.nan)
        launch(source, (x, w, out), sizes, seed=seed)
        assert_as_accurate_as_eager(out, eager, exact)

    return call


@pytest.mark.parametrize(
    ("tile", "shape"),
    [
        (cluster_linear.Tile(2, 160, 5), (256, 320, 256)),
        (cluster_linear.Tile(2, 160, 2, 2, 2), (256, 320, 256)),
        (cluster_linear.Tile(1, 80, 3, 4, 1), (200, 168, 200)),
        (cluster_linear.Tile(1, 80, 3, 1, 2), (100, 168, 328)),
    ],
    ids=str,
)
def test_linears_of_clusters(tile: cluster_linear.Tile, shape: tuple[int, int, int]) -> None:
    call, source = linear(tile, *shape), cluster_linear.cluster_linear(tile)
    for seed in range(3):
        call(source, seed)


ORDERS = re.compile(
    r"    (@!?%\w+ )?"
    r"(mbarrier|fence|bar\.|barrier|wgmma\.(fence|commit|wait)|setmaxnreg|cp\.async\.wait_all)"
)


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """Without one instruction that orders others, or with another count in it."""
    lines = text.split("\n")
    for n, line in enumerate(lines):
        if not ORDERS.match(line):
            continue
        behind = 2 if "try_wait" in line else 1  # and the jump back to it
        changed = [("without", [])]
        if found := re.search(r"expect_tx.*, (\d+);$", line):
            changed += [
                (f"{by:+}", [line[: found.start(1)] + f"{int(found[1]) + by};"])
                for by in (-128, 128)
            ]
        if found := re.search(r"wait_group.* (\d);$", line):
            changed.append(("+1", [line[: found.start(1)] + f"{int(found[1]) + 1};"]))
        if found := re.search(r"mbarrier\.init.*, (\d+);$", line):
            changed.append(("+1", [line[: found.start(1)] + f"{int(found[1]) + 1};"]))
        for what, new in changed:
            yield f"{line.strip()} {what}", "\n".join((*lines[:n], *new, *lines[n + behind :]))


def survivors(source: KernelSource, call: Callable[[KernelSource, int], None]) -> list[str]:
    """Mutants that no seed of three finds."""
    found = []
    for what, text in mutants(source.text):
        for seed in range(3):
            try:
                call(replace(source, text=text), seed)
            except (PtxError, AssertionError):
                break
        else:
            found.append(what)
    return found


def test_attention_needs_all_that_orders_it() -> None:
    given, tile = heads((1, 1, 100, 300), 80, F16), WgmmaTile(2, 64, 2)
    source = wgmma_attention(80, 80**-0.5, tile, F16)
    assert not survivors(source, lambda source, seed: attend(source, *given, tile, seed))


def test_a_count_that_is_too_low() -> None:
    """Stages are given back once all warps but one have read them, so that a few rounds later a
    whole group may lag behind; in the first rounds each group has somebody who has waited."""
    given, tile = heads((1, 1, 100, 900), 80, F16), WgmmaTile(2, 64, 2)
    source = wgmma_attention(80, 80**-0.5, tile, F16)
    counted = "shl.b32 %readers, %active, 2;\n"
    assert source.text.count(counted) == 1
    text = source.text.replace(counted, counted + "    sub.u32 %readers, %readers, 1;\n")
    for seed in range(3):
        with pytest.raises(PtxError, match=r"race|standstill|more arrivals"):
            attend(replace(source, text=text), *given, tile, seed)


def test_linears_need_all_that_orders_them() -> None:
    tile = cluster_linear.Tile(2, 80, 2, 2, 2)
    assert not survivors(cluster_linear.cluster_linear(tile), linear(tile, 256, 160, 328))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_a_product_of_one_warp(kind: str) -> None:
    """out (16, 8) = a @ b + c, all by their layouts in PTX's manual: a thread has pairs of a row of
    a, of a row of b, along the sum, and of a row of c."""
    dtype = {"f16": F16, "bf16": BF16}[kind]
    torch.manual_seed(0)
    a, b, c = torch.randn(16, 16).to(dtype), torch.randn(8, 16).to(dtype), torch.randn(16, 8)
    text = "shr.u32 %x9, %lane, 2;\n and.b32 %x8, %lane, 3;\n"
    places = [(0, 32, 0), (0, 32, 256), (0, 32, 16), (0, 32, 272), (1, 32, 0), (1, 32, 16)]
    for n, (param, row, offset) in enumerate(places):
        text += f"""\
    ld.param.u64 %a, [p{param}];
    mul.lo.u32 %x0, %x9, {row};
    mad.lo.u32 %x0, %x8, 4, %x0;
    cvt.u64.u32 %wide, %x0;
    add.u64 %a, %a, %wide;
    ld.global.b32 %x{n + 1}, [%a+{offset}];
"""
    text += """\
    ld.param.u64 %a, [p2];
    mul.lo.u32 %x0, %x9, 32;
    mad.lo.u32 %x0, %x8, 8, %x0;
    cvt.u64.u32 %wide, %x0;
    add.u64 %a, %a, %wide;
    add.u64 %out, %out, %wide;
"""
    text += "".join(
        f"    ld.global.f32 %o{n}, [%a+{n // 2 * 256 + n % 2 * 4}];\n" for n in range(4)
    )
    op, sums = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32", "{%o0, %o1, %o2, %o3}"
    text += f"    {op} {sums}, {{%x1, %x2, %x3, %x4}}, {{%x5, %x6}}, {sums};\n"
    text += "".join(
        f"    st.global.f32 [%out+{n // 2 * 256 + n % 2 * 4}], %o{n};\n" for n in range(4)
    )
    source = kernel(text, params=(dtype, dtype, torch.float32), out=torch.float32)
    found = run(source, torch.full((16, 8), math.nan), a, b, c)
    torch.testing.assert_close(found, a.float() @ b.float().T + c)

"""Attention of short sequences, masked and biased: in the interpreter and the compiler, and when it
is launched."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.kernels.attention import short_rows
from strop.kernels.attention.short import MaskedTile, Masking, ShortAttention, short_attention
from strop.kernels.kernel import Problem
from strop.testing import assert_as_accurate_as_eager
from tests.codegen.test_triton_compile import compiled, disassemble, resources
from tests.kernels.interpreted import Interpreted
from tests.kernels.launching import launched, refuse

pytest.importorskip("triton")

INF = float("inf")
SMALL, WIDE = MaskedTile(32, 32, 2, 4), MaskedTile(64, 64, 3, 4)
SHARED = MaskedTile(32, 64, 2, 4, batch=2)


def problem_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **attrs: Any) -> Problem:
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    given = {"causal": False, "scale": None, **attrs}
    shapes = tuple(tuple(x.shape) for x in tensors)
    kind = None if mask is None else mask.dtype
    return Problem("attention", tuple(sorted(given.items())), shapes, q.dtype, kind)


def operands(
    batch: int, heads: int, queries: int, keys: int, head: int, groups: int = 1
) -> list[Tensor]:
    """Parts of one merged product. In fp16: Triton's interpreter multiplies bf16 as integers."""
    torch.manual_seed(0)
    longest, few = max(queries, keys), heads // groups
    merged = torch.randn(batch, longest, heads + 2 * few, head, dtype=torch.float16)
    q, k, v = merged.transpose(1, 2).split((heads, few, few), 1)
    return [q[:, :, :queries], k[:, :, :keys], v[:, :, :keys]]


def attended(
    given: Sequence[Tensor], mask: Tensor | None = None, tile: MaskedTile = SMALL, **attrs: Any
) -> Tensor:
    """Run the launches of the call, on memory of which the kernels know addresses alone."""
    problem, kernels = problem_of(*given, mask, **attrs), Interpreted()
    inputs = [*given] if mask is None else [*given, mask]
    out = torch.full((problem.shapes[0][0], problem.shapes[0][2], *given[0].shape[1::2]), 7.0)
    out = out.to(given[0].dtype).transpose(1, 2)
    for tensor in (*inputs, out):
        kernels.known(tensor)
    ready = launched(short_rows.launches(problem, tile), kernels)
    assert ready.run(inputs, out)
    assert kernels.ran == ["short_attention"]
    return out


def torchs(given: Sequence[Tensor], mask: Tensor | None, **attrs: Any) -> Tensor:
    """By torch's own formula, with heads of keys repeated."""
    q, *rest = given
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in rest)
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(q.dtype)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=attrs.get("causal", False), scale=attrs.get("scale")
        )


def judge(found: Tensor, given: Sequence[Tensor], mask: Tensor | None = None, **attrs: Any) -> None:
    exact = torchs([x.double() for x in given], mask, **attrs)
    assert_as_accurate_as_eager(found, torchs(given, mask, **attrs), exact)


def masks(batch: int, heads: int, queries: int, keys: int) -> dict[str, Tensor]:
    """Of all types and spreads; the second row of each counts nowhere, but where it is shared."""
    torch.manual_seed(1)
    bias = torch.randn(1, heads, queries, keys).half() * 3
    marks = torch.rand(batch, 1, queries, keys) > 0.4
    for each in (bias.flatten(0, 1), marks.flatten(0, 1)):
        each[:, 1] = False if each.dtype is torch.bool else -INF
    padding = torch.ones(batch, 1, 1, keys, dtype=torch.bool)
    padding[..., -keys // 3 :] = False
    return {
        "bias of all elements": bias,
        "bias of each element": bias + torch.randn(batch, 1, 1, 1).half(),
        "marks": marks,
        "padding": padding,
        "padding that is spread": padding.expand(-1, heads, queries, -1),
        "marks of two dims": marks[0, 0],
        "one mark a query": marks[..., :1],
        "bias of queries": bias[0, :, :, :1],
    }


@pytest.mark.parametrize(
    ("keys", "tile"), [(48, SMALL), (45, SMALL), (48, SHARED)], ids=["wide", "narrow", "shared"]
)
@pytest.mark.parametrize("name", masks(3, 2, 40, 48))
def test_masks(name: str, keys: int, tile: MaskedTile) -> None:
    given, mask = operands(3, 2, 40, keys, 32), masks(3, 2, 40, keys)[name]
    found = attended(given, mask, tile)
    judge(found, given, mask)
    if name == "bias of all elements":
        assert (found[:, :, 1] == 0).all()  # as torch's formula says


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 2, 70, 77, 64), 1), ((1, 6, 33, 20, 40), 3), ((1, 1, 1, 130, 128), 1)],
    ids=["heads of 64", "grouped heads of 40", "one query"],
)
def test_without_a_mask(shape: tuple[int, ...], groups: int, causal: bool) -> None:
    given = operands(*shape, groups)
    judge(attended(given, tile=WIDE, causal=causal), given, causal=causal)
    judge(attended(given, causal=causal, scale=0.3), given, causal=causal, scale=0.3)


def test_grouped_heads_with_a_bias() -> None:
    given, mask = operands(2, 4, 20, 48, 32, groups=2), masks(2, 4, 20, 48)["bias of each element"]
    judge(attended(given, mask), given, mask)


@pytest.mark.parametrize("masked", [False, True])
def test_nan_and_infinity_spread_as_in_torch(masked: bool) -> None:
    q, k, v = (x.clone() for x in operands(1, 2, 20, 40, 32))
    q[0, 0, 3, 0], q[0, 0, 4] = float("nan"), 60000.0
    k[0, 1, 5] = INF
    mask = torch.zeros(1, 2, 20, 40).half() if masked else None
    found, wanted = attended((q, k, v), mask), torchs([x.double() for x in (q, k, v)], mask)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert found.isnan().any()
    assert not found.isnan().all()


def test_the_least_number_is_no_infinity() -> None:
    """Where it is in all of a row, all keys count alike, as in torch."""
    given, mask = operands(2, 2, 20, 40, 32), torch.zeros(2, 1, 20, 40).half()
    mask[:, :, 3] = torch.finfo(torch.float16).min
    found = attended(given, mask)
    judge(found, given, mask)
    assert (found[:, :, 3] != 0).all()


def test_nothing_of_a_neighbour() -> None:
    """What lies behind a head, behind the last key or beside a mask has no share, be it NaN."""
    given, bias = operands(2, 2, 40, 45, 40), masks(2, 2, 40, 45)["bias of all elements"]
    wanted = attended(given, bias)
    around = torch.full((3, 2, 4, 99, 48), float("nan"), dtype=torch.float16)
    inner = around[:, :, 1:3, 3:, :40]
    for target, source in zip(inner, given, strict=True):
        target[:, :, : source.shape[2]].copy_(source)
    beside = torch.full((1, 2, 40, 60), float("nan"), dtype=torch.float16)
    beside[..., 8:53] = bias
    moved = [inner[0][:, :, :40], inner[1][:, :, :45], inner[2][:, :, :45]]
    assert torch.equal(attended(moved, beside[..., 8:53]), wanted)


def test_rows_of_a_mask_that_lie_oddly_are_for_the_library() -> None:
    given = operands(1, 2, 20, 48, 32)
    odd = torch.zeros(1, 2, 20, 50, dtype=torch.float16)[..., :48]
    problem, kernels = problem_of(*given, odd), Interpreted()
    answer = torch.zeros(1)
    call = launched(short_rows.launches(problem, SMALL), kernels).allocating(lambda inputs: answer)
    assert call([*given, odd]) is answer
    assert not kernels.bound
    even = odd.contiguous()
    for tensor in (*given, even):
        kernels.known(tensor)
    with pytest.raises(AssertionError, match="nobody gave"):  # its result is nobody's
        launched(short_rows.launches(problem, SMALL), kernels).allocating(refuse)([*given, even])


@pytest.mark.parametrize(
    ("masking", "tile"),
    [
        (Masking.BIAS, WIDE),
        (Masking.BIAS, replace(WIDE, batch=2)),
        (Masking.BOOL, WIDE),
        (Masking.CAUSAL, WIDE),
    ],
    ids=str,
)
def test_compiles(masking: Masking, tile: MaskedTile, tmp_path: Path) -> None:
    """Nothing is spilled, and masks are read 16 bytes at once on their way beside keys."""
    of = ShortAttention(64, 0.125, masking, is_wide=masking in (Masking.BIAS, Masking.BOOL))
    cubin = compiled(short_attention(of, tile, torch.bfloat16), 90)
    _, stack = resources(cubin, tmp_path)
    assert stack == 0
    assert cubin.shared + 1024 <= 227 * 1024
    order = Counter(disassemble(cubin, tmp_path))
    assert any(op.startswith("HGMMA") for op in order)
    assert not any(re.match(r"(LDL|STL)\b", op) for op in order)
    assert {op for op in order if op.startswith("LDG.")} == {"LDG.E.128"}
    assert {op for op in order if op.startswith("STG.")} == {"STG.E.128"}
    assert cubin.early

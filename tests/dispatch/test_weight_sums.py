"""Weights that are sums are exact, whatever lies beside them, and take few launches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strop.dispatch import weight_sums
from strop.dispatch.weight_sums import WeightSum, write_sums
from strop.frontend.adapter_kinds import Term
from tests.e2e.tiny import DEVICES

SHAPES = ((24, 16), (24, 16), (8, 40), (24, 16), (6, 5, 3, 3), (6, 5, 3, 3))
RANKS = ((4,), (4, 3), (), (4, 3), (2,), (2,))


def term(base: Tensor, rank: int, scale: float, dtype: torch.dtype) -> Term:
    left = torch.randn(base.shape[0], rank).to(base.device, dtype)
    right = torch.randn(rank, base[0].numel()).to(base.device, dtype)
    return Term(scale, (left, right), lambda: (left.float() @ right.float()).view(base.shape))


def sums(
    dtype: torch.dtype,
    factors: torch.dtype,
    device: str = "cpu",
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[WeightSum]:
    torch.manual_seed(0)
    found = []
    for shape, ranks in zip(shapes, RANKS * len(shapes), strict=False):
        base = torch.randn(shape).to(device, dtype)
        weight = torch.full_like(base, torch.nan)
        if len(shape) == 4:  # as convolutions read it on a GPU
            weight = weight.contiguous(memory_format=torch.channels_last)
        terms = tuple(
            term(base, r, (-1) ** n * 0.3 * (n + 1), factors) for n, r in enumerate(ranks)
        )
        found.append(WeightSum(weight, base, terms))
    return found


def exact(one: WeightSum) -> Tensor:
    total = one.base.double().flatten(1)
    for part in one.terms:
        assert part.factors is not None
        left, right = part.factors
        total = total + part.scale * (left.double() @ right.double())
    return total.view(one.base.shape)


def assert_rounded_once(one: WeightSum) -> None:
    wanted = exact(one)
    error = (one.weight.double() - wanted).abs()
    rounding = torch.finfo(one.weight.dtype).eps / 2 * wanted.abs()
    assert bool((error <= rounding * 1.01 + 2e-6 * wanted.abs().amax()).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factors", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_are_rounded_once(dtype: torch.dtype, factors: torch.dtype, device: str) -> None:
    found = sums(dtype, factors, device)
    write_sums(found)
    for one in found:
        assert_rounded_once(one)
    assert torch.equal(found[2].weight, found[2].base)


def test_pieces_of_a_group_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = (sums(torch.float16, torch.float16) for _ in range(2))
    write_sums(whole)
    monkeypatch.setitem(weight_sums.MOST_BYTES, "cpu", 1)  # each layer alone
    write_sums(pieces)
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one.weight, other.weight, rtol=1e-3, atol=0)
        assert_rounded_once(other)


def test_a_write_is_counted() -> None:
    """What is hoisted out of a denoise loop goes by these counts."""
    found = sums(torch.float32, torch.float32)
    before = [one.weight._version for one in found]
    write_sums(found)
    assert all(one.weight._version > n for one, n in zip(found, before, strict=True))


class Launches(TorchDispatchMode):
    """Count what is launched: views are free, and so is memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        is_free = func.is_view or "empty" in str(func) or "detach" in str(func)
        self.count += not is_free
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_a_coarser_setting_for_models_is_left_as_it_is(setting: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        found = sums(torch.float32, torch.float32)
        write_sums(found)
        assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(before)
    for one in found:
        assert_rounded_once(one)


def test_more_layers_take_no_more_launches() -> None:
    counts = []
    for copies in (1, 5):
        found = sums(torch.float16, torch.float16, shapes=SHAPES * copies)
        with Launches() as launches:
            write_sums(found)
        counts.append(launches.count)
    assert counts[0] == counts[1]

"""Programs that serve all lengths of some arguments are bound once for these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.errors import OutOfRangeError
from strop.options import Options
from strop.runtime.build.processors import processor
from strop.runtime.run import free_sizes as module_of_sizes
from strop.runtime.run.free_sizes import free_sizes

ROWS = 40


class Pooled(nn.Module):
    """Two features of bags, one of which has a factor for each id, and a linear behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(ROWS, 8)), nn.EmbeddingBag(ROWS, 8)
        self.out = nn.Linear(16, 3)

    def forward(
        self, ids: Tensor, offsets: Tensor, factors: Tensor, others: Tensor, starts: Tensor
    ) -> Tensor:
        first = F.embedding_bag(
            ids, self.first, offsets, mode="sum", per_sample_weights=factors * 2
        )
        found: Tensor = self.out(torch.cat([first, self.second(others % ROWS, starts)], 1))
        return found


def call_of(batch: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def bags() -> tuple[Tensor, Tensor]:
        lengths = torch.randint(1, 9, (batch,), generator=generator)
        return torch.randint(0, ROWS, (int(lengths.sum()),)), lengths.cumsum(0) - lengths

    (ids, offsets), (others, starts) = bags(), bags()
    return ids, offsets, torch.rand(len(ids)), others * 7, starts


@pytest.fixture
def module(tmp_path: Any) -> nn.Module:
    made = Pooled().eval()
    return strop.optimize(made, options=Options(cache_dir=str(tmp_path), strict=True))


def test_lengths_share_an_entry(module: Any) -> None:
    dispatcher = module.forward
    with torch.no_grad():
        for number in range(9):
            given = call_of(5 + number % 2, number)
            given = (*call_of(5 + number % 2, 3)[:3], *given[3:])  # the first feature stays
            torch.testing.assert_close(module(*given), dispatcher.eager(*given))
    (variant,) = dispatcher.variants.all
    assert list(free_sizes(variant.program).roots.values()) == [3]
    assert len({id(entry) for entry in dispatcher.shapes.entries}) == 2, "one a batch"


def test_lengths_that_must_be_equal_are_compared(module: Any) -> None:
    """Ids and factors are of one length, which is no free one."""
    with torch.no_grad():
        for number in range(4):
            given = call_of(6, number)
            torch.testing.assert_close(module(*given), module.forward.eager(*given))
        ids, offsets, factors, *rest = call_of(6, 7)
        with pytest.raises(Exception, match=r"size|shape"):
            module(ids, offsets, factors[:-1], *rest)


def test_ids_are_checked_at_each_length(module: Any) -> None:
    with torch.no_grad():
        module(*call_of(4, 0))
        bad = list(call_of(4, 0))
        bad[4] = bad[4] + len(bad[3]) + 1  # starts behind the end
        for number in (1, 2):
            with pytest.raises(OutOfRangeError):
                module(*bad)
            given = call_of(4, number)
            torch.testing.assert_close(module(*given), module.forward.eager(*given))


def test_no_elements_are_another_graph(module: Any) -> None:
    with torch.no_grad():
        given = call_of(3, 0)
        module(*given)
        none = torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        for number in (1, 2):
            torch.testing.assert_close(
                module(*given[:3], *none), module.forward.eager(*given[:3], *none)
            )
            given = call_of(3, number)
            torch.testing.assert_close(module(*given), module.forward.eager(*given))
    assert len(module.forward.variants.all) == 2


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, 8)

    def forward(self, ids: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        hashed = (ids * 31 + 7) % ROWS
        return self.table(hashed, starts), self.table.weight[:2] + self.table(hashed, starts)[:2]


def test_short_ways_of_several_lengths_share_kernels(tmp_path: Any) -> None:
    """A program of kernels alone has one short way for all lengths: no other one may leave its size
    behind in the kernels."""
    module: Any = Rows().eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    calls = [call_of(4, number)[3:] for number in range(4)]
    with torch.no_grad():
        for number in (0, 1, 2, 0, 0, 1, 1, 2, 3, 0, 1, 2, 3):
            torch.testing.assert_close(module(*calls[number]), module.forward.eager(*calls[number]))
        bad = calls[0][0], calls[0][1] + len(calls[0][0])
        with pytest.raises(OutOfRangeError):
            module(*bad)
        torch.testing.assert_close(module(*calls[0]), module.forward.eager(*calls[0]))
    (variant,) = module.forward.variants.all
    assert free_sizes(variant.program)
    assert not variant.program.call_steps
    assert len({id(entry) for entry in module.forward.shapes.entries}) == 1


class WithLayers(nn.Module):
    """Has calls of kernels of ours between those that are generated, at a width that is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, 13, mode="sum")
        self.layers = nn.Sequential(nn.Linear(13, 19), nn.ReLU(), nn.Linear(19, 1))

    def forward(self, ids: Tensor, starts: Tensor) -> Tensor:
        found: Tensor = self.layers(self.table(ids * 31 % ROWS, starts)).sigmoid()
        return found


def takes_short(module: Any, call: tuple[Tensor, ...]) -> bool:
    """Tell whether the short way serves a call, whose result has to be eager's."""
    result = module.forward.short(call)
    if result is None:
        return False
    torch.testing.assert_close(result, module.forward.eager(*call))
    return True


@pytest.mark.skipif(not processor().has_bf16, reason="the linear of ours was measured with BF16")
def test_new_lengths_take_the_short_way(tmp_path: Any) -> None:
    module: Any = WithLayers().eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.no_grad():
        for batch in (12, 1):
            module(*call_of(batch, 0)[3:])
            module(*call_of(batch, 1)[3:])
            assert all(takes_short(module, call_of(batch, number)[3:]) for number in range(2, 9))
        ids, starts = call_of(12, 3)[3:]
        assert not takes_short(module, (ids, starts)), "it was prepared for one row"
        torch.testing.assert_close(module(ids, starts), module.forward.eager(ids, starts))
        assert takes_short(module, (ids, starts))


@pytest.mark.skipif(not processor().has_bf16, reason="the linear of ours was measured with BF16")
def test_what_looks_otherwise_takes_no_short_way(tmp_path: Any) -> None:
    module: Any = WithLayers().eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    ids, starts = call_of(12, 0)[3:]
    none = torch.zeros(0, dtype=torch.int64)
    others = (ids[::2], starts // 2), (ids.int(), starts.int()), (ids, starts[:5])
    with torch.no_grad():
        for _ in range(3):
            module(ids, starts)
        assert takes_short(module, (ids, starts))
        for other in (*others, (none, torch.zeros_like(starts)), (ids[None], starts)):
            assert not takes_short(module, other)
        for other in others:
            torch.testing.assert_close(module(*other), module.forward.eager(*other))
        module(ids, starts)
        next(module.parameters()).data.add_(1.0)
        assert takes_short(module, (ids, starts)), "weights are read where they are"
        module.table.weight = nn.Parameter(torch.randn(ROWS, 13))
        assert not takes_short(module, (ids, starts))
        torch.testing.assert_close(module(ids, starts), module.forward.eager(ids, starts))


def test_steps_are_not_walked_for_a_size_that_two_arguments_have(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a batch, which the first call at each further size would pay for."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor, factors: Tensor) -> Tensor:
            return x * factors[:, None]

    walked: list[Any] = []
    asked = module_of_sizes._asked
    monkeypatch.setattr(module_of_sizes, "_asked", lambda p: walked.append(p) or asked(p))
    options = Options(cache_dir=str(tmp_path), strict=True)
    scaled: Any = strop.optimize(Scaled().eval(), options=options)
    for batch in (3, 5):
        x, factors = torch.randn(batch, 4), torch.randn(batch)
        assert torch.equal(scaled(x, factors), x * factors[:, None])
    assert not walked
    (variant,) = scaled.forward.variants.all
    assert not free_sizes(variant.program)

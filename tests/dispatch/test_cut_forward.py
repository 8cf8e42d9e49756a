"""Forwards in which the values of tensors decide sizes: torch runs these calls, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.dispatch.dispatcher import Dispatcher
from strop.errors import StropError
from strop.options import Options
from tests.frontend.tracing import Function

TABLE = torch.randn(100, 16, generator=torch.Generator().manual_seed(0))  # an argument


def ids(count: int) -> Tensor:
    return torch.randint(0, 100, (count,), generator=torch.Generator().manual_seed(count))


def by_parts(values: Tensor, lengths: Tensor) -> list[Tensor]:
    """Return each feature's part of the values, as torchrec's KeyedJaggedTensor has them."""
    sizes = [int(total) for total in lengths.view(3, -1).sum(1)]
    return [part * 2 + 1 for part in torch.split(values, sizes)]


def jagged(values: Tensor, offsets: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor_from_jagged(values[:, None] * 2, offsets)
    return rows.sum(1) + 1


def unique(i: Tensor, table: Tensor) -> Tensor:
    known, place = torch.unique((i * 7) % 100, return_inverse=True)
    return (table[known] * 2).tanh()[place] + 1


def lengths(count: int) -> Tensor:
    return torch.tensor([count // 3, count % 3, 0, count // 2, count - count // 3 - count % 3, 0])


def split(count: int) -> Tensor:
    found = lengths(count)
    found[4] -= count // 2
    return found


Given = Callable[[int], tuple[Tensor, ...]]
# With the most graphs that may serve it. Those with numbers among their arguments go through
# AOTAutograd.
CALLS: dict[str, tuple[Callable[..., Any], Given, int]] = {
    "unique": (unique, lambda n: (ids(n), TABLE), 2),
    "nonzero": (lambda i: (i * 3 % 2).nonzero() * 2, lambda n: (ids(n),), 2),
    "mask": (lambda i: ((i * 0.5)[i % 2 == 0] * 2).sum(), lambda n: (ids(n),), 2),
    "masked_select": (lambda i: (i * 2).masked_select(i > 50) * 2, lambda n: (ids(n),), 2),
    "repeats": (
        lambda i: torch.repeat_interleave(i * 2, i % 3) * 2,
        lambda n: (ids(n),),
        2,
    ),
    "bincount": (lambda i: torch.bincount(i % 7) * 2, lambda n: (ids(n),), 2),
    "slice": (lambda i, table: table[: int(i.max())] * 2, lambda n: (ids(n), TABLE), 3),
    "features": (by_parts, lambda n: (ids(n), split(n)), 4),
    "jagged": (jagged, lambda n: (ids(n) * 0.5, torch.tensor([0, 1, 1, n])), 2),
}


def optimized(function: Callable[..., Any], folder: object, **options: Any) -> Dispatcher:
    module = Function(function).eval()
    strop.optimize(module, options=Options(cache_dir=str(folder), **options))
    found = module.forward
    assert isinstance(found, Dispatcher)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_only_the_call_is_eager(name: str, tmp_path: Any) -> None:
    """Sizes are others at each call, and graphs are as many as after the second one."""
    torch.compiler.reset()
    function, given, most = CALLS[name]
    dispatcher = optimized(function, tmp_path)
    with torch.no_grad():
        for count in (9, 12, 30, 17, 40, 12):
            arguments = given(count)
            torch.testing.assert_close(dispatcher.module(*arguments), function(*arguments))
    assert dispatcher.counters.eager_calls == 0
    report = strop.explain(dispatcher.module)
    assert 1 <= report.num_graphs <= most, str(report)
    (reason,) = dispatcher.counters.fallbacks
    assert reason.startswith(("torch runs the calls at which it is cut: ", "Dynamo traces it: "))
    assert reason in str(report)


def test_strict_refuses_it(tmp_path: Any) -> None:
    dispatcher = optimized(unique, tmp_path, strict=True)
    with torch.no_grad(), pytest.raises(StropError, match="values of a tensor"):
        dispatcher.module(ids(9), TABLE)


class Outer(nn.Module):
    """A part is optimised by itself."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.table = part, nn.Parameter(TABLE)

    def forward(self, i: Tensor) -> Tensor:
        found: Tensor = self.part(self.table[torch.unique(i)])
        return found


def test_parts_that_are_optimised_keep_their_programs(tmp_path: Any) -> None:
    options = Options(cache_dir=str(tmp_path))
    part = strop.optimize(nn.Sequential(nn.Linear(16, 4), nn.GELU()).eval(), options=options)
    module, i = Outer(part).eval(), ids(20)
    with torch.no_grad():
        wanted = module(i)
        strop.optimize(module, options=options)
        torch.testing.assert_close(module(i), wanted)
    assert module.forward.counters.eager_calls == 1
    assert part.forward.counters.calls == 2


def test_an_error_of_eager_comes_out(tmp_path: Any) -> None:
    def function(i: Tensor, table: Tensor) -> Tensor:
        return table[torch.unique(i)] * 2

    dispatcher = optimized(function, tmp_path)
    with torch.no_grad():
        dispatcher.module(ids(9), TABLE)
        with pytest.raises(IndexError):
            dispatcher.module(ids(9) + 1000, TABLE)
        torch.testing.assert_close(dispatcher.module(ids(5), TABLE), function(ids(5), TABLE))


class StaticKeys(nn.Module):
    """Keeps keys in memory that is there before the first call, as transformers' static cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, keys: Tensor, length: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]) + length
        keys.index_copy_(1, places, self.linear(x))
        length.add_(x.shape[1])
        self.calls.add_(1)
        return (keys * 2).relu().sum(1)


def test_writes_into_arguments_and_buffers(tmp_path: Any) -> None:
    plain, module = StaticKeys().eval(), StaticKeys().eval()
    module.load_state_dict(plain.state_dict())
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    given = [(torch.zeros(2, 32, 8), torch.zeros((), dtype=torch.int64)) for _ in range(2)]
    for number, count in enumerate((5, *(1,) * 12, 3)):  # so many that they are not looked at
        x = torch.randn(2, count, 8)
        if number == 11:
            for each in (plain, module):
                each.linear.weight.data = each.linear.weight * 2
        with torch.no_grad():
            torch.testing.assert_close(module(x, *given[0]), plain(x, *given[1]))
        torch.testing.assert_close(given[0], given[1])
        assert torch.equal(module.calls, plain.calls)
    counters = module.forward.counters
    assert not counters.eager_calls
    (reason,) = counters.fallbacks
    assert reason.startswith("Dynamo traces it: aten.")
    assert reason.endswith("writes into an argument or a weight")
    assert module.forward.cut.is_usual
    graphs = strop.explain(module).graphs
    assert graphs
    assert all("aten.index_copy_.default" in graph.calls for graph in graphs)
    strop.restore(module)
    with torch.no_grad():
        torch.testing.assert_close(module(x, *given[0]), plain(x, *given[1]))


def test_strict_refuses_writes(tmp_path: Any) -> None:
    options = Options(cache_dir=str(tmp_path), strict=True)
    module = strop.optimize(StaticKeys().eval(), options=options)
    with pytest.raises(StropError, match="writes into an argument"), torch.no_grad():
        module(torch.randn(2, 1, 8), torch.zeros(2, 4, 8), torch.zeros((), dtype=torch.int64))

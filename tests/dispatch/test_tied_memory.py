"""Weights that share memory though they are different Parameters stay tied, whatever reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.dispatch.tied_memory import tied
from tests.e2e import tiny

WIDTH = 32


class Layers(nn.Module):
    """Two layers of one input, which are merged, and a third that reads another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.c = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.a(x) * 2, self.b(x) + 1, self.c(x * 3)


def equal(module: Any) -> None:
    module.b.weight.data = module.a.weight.data


def overlapping(module: Any) -> None:
    whole = torch.randn(WIDTH + 8, WIDTH, generator=torch.manual_seed(3))
    module.a.weight.data, module.b.weight.data = whole[:WIDTH], whole[8:]


def rows(module: Any) -> None:
    module.a.weight.data = module.c.weight.data[:WIDTH]
    module.b.weight.data = module.c.weight.data[WIDTH:]


def elsewhere(module: Any) -> None:
    module.a.weight.data = module.c.weight.data[:WIDTH]


def apart(module: Any) -> None:
    module.b.weight.data = module.b.weight.data.clone()


TIES: list[Callable[[Any], None]] = [equal, overlapping, rows, elsewhere]


def made() -> Layers:
    torch.manual_seed(0)
    return Layers().eval().requires_grad_(False)


def check(eager: Layers, fast: Any) -> None:
    """Write to one weight after the other, by the module of each."""
    for number, name in enumerate(("a", "b", "c", "a")):
        x = torch.randn(4, WIDTH, generator=torch.manual_seed(number))
        with torch.no_grad():
            for module in (eager, fast):
                getattr(module, name).weight.mul_(1.5)
            for found, wanted in zip(fast(x), eager(x), strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tie", TIES)
def test_a_write_to_one_is_one_to_the_other(tie: Callable[[Any], None], tmp_path: Path) -> None:
    eager, fast = made(), made()
    for module in (eager, fast):
        tie(module)
    fast = strop.optimize(fast, options=tiny.options(cache_dir=str(tmp_path), strict=True))
    check(eager, fast)
    assert fast.forward.variants.num_captures == 1
    strop.restore(fast)
    check(eager, fast)


@pytest.mark.parametrize("tie", TIES)
def test_tied_and_untied_between_calls(tie: Callable[[Any], None], tmp_path: Path) -> None:
    options = tiny.options(cache_dir=str(tmp_path), strict=True)
    eager, fast = made(), strop.optimize(made(), options=options)
    check(eager, fast)
    merged = copy.copy(fast.forward.variants.all[0].program.inputs[-1].merged)
    assert merged == (0, 1)
    for change in (tie, apart):
        for module in (eager, fast):
            change(module)
        check(eager, fast)


def test_who_shares_memory() -> None:
    whole = torch.zeros(10, 4)
    own, other = torch.zeros(3), torch.zeros(0)
    assert tied([whole[:4], whole[4:], own, other, other]) == frozenset()
    assert tied([whole[:4], own, whole[3:], whole[9:]]) == {0, 2, 3}
    assert tied([own, whole, whole[2:3], whole[5:6]]) == {1, 2, 3}
    assert tied([whole.t()[:1], own, whole[9:]]) == {0, 2}
    assert tied([own.to("meta"), own.to("meta")]) == frozenset()

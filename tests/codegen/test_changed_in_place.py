"""Calls that change a part of an argument do so where it lies, unless somebody would see it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import strop
from strop.codegen.mutation import _is_read_behind
from strop.fusion.plan import Group
from strop.ir.loops import Schedule

PLACES = torch.tensor([4, 1])


def index_copied(cache: Tensor, new: Tensor) -> Tensor:
    cache.index_copy_(1, PLACES, new)
    return cache.sum(1) * 2


def index_put(cache: Tensor, new: Tensor) -> Tensor:
    cache[:, PLACES] = new
    return cache.sum(1) * 2


def index_added(cache: Tensor, new: Tensor) -> Tensor:
    cache.index_add_(1, PLACES, new, alpha=0.5)
    return cache.sum(1) * 2


def scattered(cache: Tensor, new: Tensor) -> Tensor:
    cache.scatter_(1, PLACES[None, :, None].expand_as(new), new)
    return cache.sum(1) * 2


def read_before(cache: Tensor, new: Tensor) -> Tensor:
    """Needs what was there before, together with what is there then."""
    before = cache + 1
    cache.index_copy_(1, PLACES, new)
    return before * cache


def of_itself(cache: Tensor, new: Tensor) -> Tensor:
    """Moves rows of the argument itself."""
    cache.copy_(torch.index_copy(cache, 1, PLACES, cache[:, :2]))
    return cache * new.sum()


def computed_of_itself(cache: Tensor, new: Tensor) -> Tensor:
    """Reads rows of the argument in a kernel that runs before."""
    cache.index_copy_(1, PLACES, cache[:, :2] + new)
    return cache * 2


def twice(cache: Tensor, new: Tensor) -> Tensor:
    cache.index_copy_(1, PLACES, new)
    cache.index_copy_(1, PLACES + 1, new * 2)
    return cache.sum(1)


CHANGED = [index_copied, index_put, index_added, scattered]


def check(function: Callable[[Tensor, Tensor], Tensor], folder: Path, device: str) -> list[str]:
    """Compare results and arguments, and return the program's calls."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="strop", options={"cache_dir": str(folder)})
    for seed in range(3):
        torch.manual_seed(seed)
        cache, new = torch.randn(3, 6, 5, device=device), torch.randn(3, 2, 5, device=device)
        ours, theirs = cache.clone(), cache.clone()
        torch.testing.assert_close(compiled(ours, new), function(theirs, new))
        torch.testing.assert_close(ours, theirs)
    graph = strop.explain(compiled).graphs[-1]
    return [step.title for step in graph.steps if step.kind == "call"]


@pytest.mark.parametrize("function", [*CHANGED, computed_of_itself])
def test_a_part_is_changed_alone(
    function: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    (call,) = check(function, tmp_path, "cpu")
    assert "_." in call  # aten.index_copy_.default


@pytest.mark.parametrize("function", [read_before, of_itself, twice])
def test_what_others_read_is_copied(
    function: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    assert "write" in check(function, tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("function", [*CHANGED, computed_of_itself, read_before, of_itself, twice])
def test_on_a_gpu(
    function: Callable[[Tensor, Tensor], Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "PLACES", PLACES.cuda())
    check(function, tmp_path, "cuda")


def test_reads_that_may_move_behind_a_write_are_seen() -> None:
    """A group of statistics may run at the place of its reader."""
    statistics, reader = (Group(kind, (), ()) for kind in (Schedule.ROW, Schedule.POINTWISE))
    cache, other, call = object(), object(), SimpleNamespace(inputs=())
    steps: Any = [statistics, call, reader]
    reads: Any = {statistics: (None, (cache,), ()), reader: (None, (), ())}
    for moves, found in (([(statistics, reader)], True), ([(statistics, call)], False)):
        assert _is_read_behind(cache, call, None, steps, reads, moves) is found  # type: ignore[arg-type]
    assert not _is_read_behind(other, call, None, steps, reads, [(statistics, reader)])  # type: ignore[arg-type]

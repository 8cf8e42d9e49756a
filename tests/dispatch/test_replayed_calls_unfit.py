"""Which calls, entries and modules have no short way to a graph's replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from strop.diffusion.components import DenoiserAdapter
from strop.dispatch import replayed_calls
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.step_cache.served import StepCacheDispatcher
from strop.frontend.objects import WithObjects
from tests.diffusion.replayed import Pool
from tests.dispatch.test_replayed_calls import (
    assert_same,
    given,
    pair,
    short_of,
    warm,
)


def with_a_way(folder: Path) -> tuple[Any, Any, Any]:
    """Return a module, its short ways, and the one that there is."""
    plain, fast = pair(folder)
    warm(plain, fast, given())
    short = fast.forward._replayed
    (way,) = short._ways.values()
    return fast, short, way


UNFIT = {
    "another scan": lambda d: (d.state, "num_scans", -1),
    "a place for weights": lambda d: (d.state, "place", torch.device("cpu")),
    "hooks that others do the work of": lambda d: (d.hosted, "taken", SimpleNamespace()),
    "a budget": lambda d: (d.hosted, "budget", SimpleNamespace(serves=lambda: False)),
    "adapters by row": lambda d: (d.state.effective.low_rank, "rows", SimpleNamespace()),
    "memory that moved": lambda d: (d.state, "has_moved", lambda: True),
    "no graphs": lambda d: (d.latest, "has_graph", False),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_each_call_asks(
    name: str, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, short, way = with_a_way(tmp_path)
    assert short._may_replay(way)
    monkeypatch.setattr(*UNFIT[name](fast.forward))
    assert not short._may_replay(way)


@pytest.mark.parametrize("current", [0, 1])
def test_it_is_for_the_current_device(
    current: int, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, short, way = with_a_way(tmp_path)
    monkeypatch.setattr(way.entry, "device", torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    assert short._may_replay(way) == (current == 1)


LEFT = pytree.tree_structure(WithObjects(0, [], []))
UNFIT_ENTRIES = {
    "aliases": lambda d: (d.latest, "aliases", (1,)),
    "steady": lambda d: (d.latest, "steady", (0,)),
    "piece": lambda d: (d.latest, "piece", "deep"),
    "coded": lambda d: (d.latest, "coded", [1]),
    "exchanges": lambda d: (d.latest, "has_exchanges", True),
    "same": lambda d: (d.latest, "variant", replace(d.latest.variant, same=(1,))),
    "left in arguments": lambda d: (d.latest, "variant", replace(d.latest.variant, out_spec=LEFT)),
    "processes": lambda d: (d.state, "exchanges_with", (1,)),
    "settings": lambda d: (d.state.turned, "names", ("scale",)),
    "classes": lambda d: (d.state, "make_ups", (1,)),
    "effects": lambda d: (d.state, "effects", {"name"}),
}


@pytest.mark.parametrize("name", UNFIT_ENTRIES)
def test_entries_that_have_none(
    name: str, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fast = pair(tmp_path)
    warm(plain, fast, given())
    entry, short = fast.forward.latest, fast.forward._replayed
    assert short._is_plain_entry(entry)
    monkeypatch.setattr(*UNFIT_ENTRIES[name](fast.forward))
    assert not short._is_plain_entry(entry)


def test_both_kinds_of_inference_have_it(pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path)
    for _ in range(6):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert_same(plain, fast, given())
    assert short_of(fast) == 12 - 2 - 2


def test_what_is_in_training_by_name_alone_is_replayed_once(pool: Pool, tmp_path: Path) -> None:
    """Its quick look says no to each call, so that there is no short way."""
    plain, fast = pair(tmp_path)
    fast.training = True
    with torch.no_grad():
        for _ in range(6):
            assert_same(plain, fast, given())
    assert (pool.num_replays, short_of(fast)) == (5, 0)


def test_a_quick_look_that_says_no_for_good_does_so_once(pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path)
    seen, replays = warm(plain, fast, given()), pool.num_replays
    fast.training = True
    with torch.no_grad():
        for _ in range(3):
            assert_same(plain, fast, given())
    assert (pool.num_replays, short_of(fast)) == (replays + 4, seen)


def test_a_module_without_a_quick_look_has_none(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fast = pair(tmp_path)
    monkeypatch.setattr(fast.forward.state, "comparison", lambda **how: None)
    with torch.no_grad():
        for _ in range(5):
            assert_same(plain, fast, given())
    assert short_of(fast) == 0


def test_a_program_that_is_given_other_tensors_has_none(pool: Pool, tmp_path: Path) -> None:
    x, y = given(), given()
    for tensors, fits in (([x], True), ([y], False), ([x, y], False), ([], False)):
        call: Any = SimpleNamespace(tensors=tensors)
        assert replayed_calls._is_plain(call, [x]) == fits
    assert not replayed_calls._is_plain(SimpleNamespace(tensors=[]), [])  # type: ignore[arg-type]


def test_denoisers_and_other_dispatchers_have_none(pool: Pool, tmp_path: Path) -> None:
    _, fast = pair(tmp_path)
    dispatcher = fast.forward
    assert replayed_calls.may_have(dispatcher, Dispatcher)
    assert not replayed_calls.may_have(dispatcher, StepCacheDispatcher)
    dispatcher.adapter = DenoiserAdapter()
    assert not replayed_calls.may_have(dispatcher, Dispatcher)


class Odd(nn.Module):
    def forward(self, x: Tensor, more: Any = None) -> Any:
        if isinstance(more, dict):
            more = more["scale"]
        if isinstance(more, torch.Generator):
            more = torch.rand(x.shape, generator=more)
        return (x * 2, x) if more is None else (x * more, x + 1)


@pytest.mark.parametrize("more", [None, 0.5, {"scale": 0.5}, torch.Generator()], ids=str)
def test_calls_that_have_none(more: Any, pool: Pool, tmp_path: Path) -> None:
    """The argument is among the results of the first."""
    plain, fast = pair(tmp_path, Odd())
    x = given()
    with torch.no_grad():
        for _ in range(5):
            found = fast(x, more)
            if not isinstance(more, torch.Generator):
                torch.testing.assert_close(found, plain(x, more))
            assert more is not None or found[1].data_ptr() == x.data_ptr()
    assert short_of(fast) == 0

"""Nobody collects garbage while a first call compiles and runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import strop
from strop.dispatch.entry_runner import EntryRunner
from strop.dispatch.gc_pause import collection_paused


@contextmanager
def eager_collections() -> Iterator[list[str]]:
    """Collect at every allocation, and note it."""
    found: list[str] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        found.append(phase)

    threshold = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        yield found
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)


def test_the_pause_lasts_until_the_first_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usual, num_inside = EntryRunner.run, []

    def run(self: EntryRunner, *args: Any) -> Any:
        before = len(collected)
        result = usual(self, *args)
        assert len([[number] for number in range(100)]) == 100  # lists, which are counted
        num_inside.append(len(collected) - before)
        return result

    module = nn.Sequential(nn.Linear(8, 8), nn.SiLU()).eval().requires_grad_(False)
    strop.optimize(module, options=strop.Options(cache_dir=str(tmp_path)))
    x = torch.randn(3, 8)
    monkeypatch.setattr(EntryRunner, "run", run)
    with eager_collections() as collected:
        module(x)
    assert num_inside[0] == 0
    assert collected, "collections go on behind it"
    assert gc.isenabled()


class Cycle:
    """It can be freed by a collection alone."""

    def __init__(self) -> None:
        self.own = self


def test_what_a_pause_leaves_is_walked_over_once() -> None:
    """Its garbage goes when it ends, and what lives on is no longer young."""
    gc.collect()
    with collection_paused(leaves_much=True):
        alive = [[number] for number in range(10_000)]
        dead = weakref.ref(Cycle())
        assert dead() is not None
    assert dead() is None
    assert len(gc.get_objects(0)) < len(alive)
    assert len(gc.get_objects(1)) < len(alive)
    assert gc.isenabled()


def test_what_a_user_has_frozen_stays_so() -> None:
    """The collector sees no frozen object. Their number says little: other threads let some go."""
    kept = [Cycle()]
    assert any(each is kept for each in gc.get_objects())
    gc.freeze()
    try:
        with collection_paused(leaves_much=True):
            pass
        assert not any(each is kept for each in gc.get_objects())
    finally:
        gc.unfreeze()


def test_nobody_collects_for_a_user_who_has_turned_it_off() -> None:
    gc.disable()
    try:
        with collection_paused(leaves_much=True):
            dead = weakref.ref(Cycle())
        assert dead() is not None
        assert not gc.isenabled()
    finally:
        gc.enable()

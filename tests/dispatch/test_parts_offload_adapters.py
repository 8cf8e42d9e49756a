"""Adapters come, change and go while a model is offloaded by parts, and are computed beside its
weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import strop
from tests.budgeted import CountedMemory, lend_memory
from tests.dispatch.test_adapters import CHANGES, add, assert_as_eager
from tests.dispatch.test_parts_offload import KINDS, offload
from tests.e2e import tiny


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> CountedMemory:
    return lend_memory(monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_users_do(memory: CountedMemory, tmp_path: Path, kind: str) -> None:
    eager = tiny.unet()
    options = tiny.options(cache_dir=str(tmp_path), strict=True)
    fast: Any = offload(copy.deepcopy(eager), kind)
    strop.optimize(fast, options=options)
    (dispatcher,) = strop.api.dispatchers_of(fast).values()
    assert_as_eager(eager, fast)
    for name, change in CHANGES.items():
        for unet in (eager, fast):
            change(unet)
        assert_as_eager(eager, fast)
        assert_as_eager(eager, fast)
        assert dispatcher.budget._plan.blocks, name
    assert dispatcher.counters.eager_calls == 0
    assert 0 < memory.most <= dispatcher.budget._most_bytes
    strop.restore(fast)
    assert memory.now == 0
    assert_as_eager(eager, fast)


@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_with_an_adapter(memory: CountedMemory, tmp_path: Path, kind: str) -> None:
    eager = tiny.unet()
    fast: Any = copy.deepcopy(eager)
    for unet in (eager, fast):
        add(unet)
    strop.optimize(offload(fast, kind), options=tiny.options(strict=True))
    for _ in range(2):
        assert_as_eager(eager, fast)
        for unet in (eager, fast):
            CHANGES["factors by .data"](unet)
    (dispatcher,) = strop.api.dispatchers_of(fast).values()
    assert dispatcher.counters.eager_calls == 0
    strop.restore(fast)
    assert_as_eager(eager, fast)


def test_adapters_that_need_a_second_copy_run_in_eager(
    memory: CountedMemory, tmp_path: Path
) -> None:
    eager = tiny.unet()
    fast: Any = copy.deepcopy(eager)
    strop.optimize(offload(fast, "leaf"), options=tiny.options())
    assert_as_eager(eager, fast)
    for unet in (eager, fast):
        add(unet, use_dora=True)
    assert_as_eager(eager, fast)
    (dispatcher,) = strop.api.dispatchers_of(fast).values()
    (reason,) = dispatcher.counters.fallbacks
    assert "adapters other than plain LoRA need a second copy" in reason
    for unet in (eager, fast):
        unet.unload_lora()
    assert_as_eager(eager, fast)
    assert dispatcher.counters.eager_calls == 1

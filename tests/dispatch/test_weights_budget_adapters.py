"""Adapters come, change and go under a budget for weights, beside which they are computed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import strop
from strop.errors import OptionError
from tests.budgeted import CountedMemory, lend_memory
from tests.dispatch.test_adapters import CHANGES, assert_as_eager
from tests.dispatch.test_low_rank import activate, add, assert_close, pictures
from tests.e2e import tiny


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> CountedMemory:
    return lend_memory(monkeypatch)


def test_all_that_users_do(memory: CountedMemory, tmp_path: Path) -> None:
    eager = tiny.unet()
    size = sum(w.nbytes for w in eager.parameters())
    options = tiny.options(cache_dir=str(tmp_path), weights_budget_bytes=size // 2, strict=True)
    fast: Any = strop.optimize(copy.deepcopy(eager), options=options)
    assert_as_eager(eager, fast)
    for change in CHANGES.values():
        for unet in (eager, fast):
            change(unet)
        assert_as_eager(eager, fast)
        assert_as_eager(eager, fast)
        assert memory.most <= options.weights_budget_bytes
        assert fast.forward.budget._plan.blocks
    assert fast.forward.counters.eager_calls == 0
    assert fast.forward.variants.num_captures == 2  # with adapters, and without


def test_ranks_grow(memory: CountedMemory, tmp_path: Path) -> None:
    eager, fast = pictures(tmp_path, lora="auto", weights_budget_bytes=16000)
    for name, rank in (("a", 2), ("b", 16), ("c", 17), ("d", 1)):
        for module in (eager, fast):
            add(module, name, rank)
            activate(module, name)
        assert_close(eager, fast)
    report = str(strop.explain(fast))
    assert "factors of adapters beside the weights" in report
    assert "are streamed there in each call" in report


def test_adapters_that_need_a_second_copy_are_refused(
    memory: CountedMemory, tmp_path: Path
) -> None:
    eager, fast = pictures(tmp_path, lora="auto", weights_budget_bytes=16000)
    assert_close(eager, fast)
    add(fast, use_dora=True)
    with (
        pytest.raises(OptionError, match="other than plain LoRA need a second copy"),
        torch.no_grad(),
    ):
        fast(torch.zeros(1, 4, 8, 8))

"""Marks of a GPU that no next call finds. The device is stood in for: marks are set by hand."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import strop
from strop.debug.explain import report_of
from strop.runtime.run import bounds_checks as faults
from strop.runtime.run.bounds_checks import BoundsChecks
from tests.lookups.test_lookups import Calls, optimized

TEXT = "index out of range: an index of an earlier call"


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, BoundsChecks]:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    module, dispatcher = optimized(Calls(lambda x, i: F.embedding(i, x) * 2), str(tmp_path))
    module(torch.randn(5, 4), torch.tensor([1, 2]))
    found = BoundsChecks(dispatcher.variants.all[0].program, torch.device("cuda"))
    assert not faults.unreported()
    found._memory[0] = 1
    return dispatcher, found


def test_the_last_one_is_shown_and_logged(marked: tuple[Any, BoundsChecks], caplog: Any) -> None:
    dispatcher, found = marked
    assert [text.startswith(TEXT) for text in faults.unreported()] == [True]
    assert TEXT in str(report_of({"it": dispatcher}))
    with caplog.at_level(logging.ERROR, "strop"):
        faults._report_last()
    assert TEXT in caplog.text
    with pytest.raises(IndexError, match="of an earlier call"):
        found.check()
    assert not faults.unreported()


def test_one_of_a_program_that_is_dropped_is_logged(
    marked: tuple[Any, BoundsChecks], caplog: Any
) -> None:
    with caplog.at_level(logging.ERROR, "strop"):
        marked[1].__del__()
    assert TEXT in caplog.text
    marked[1]._memory.zero_()


def test_explain_is_silent_about_nothing(tmp_path: Path) -> None:
    module, _ = optimized(Calls(lambda x, i: x[i] * 3), str(tmp_path))
    module(torch.randn(4, 5), torch.tensor([0, 1]))
    assert "index out of range" not in str(strop.explain(module))

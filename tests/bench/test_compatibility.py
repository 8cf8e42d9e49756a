"""docs/compatibility.md says what was run, and all of diffusers is in it."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import torch

from strop.bench import compatibility
from strop.bench.compatibility import COMPILED, DIFFERS, NOT_RUN, REFUSED, CompatibilityRow
from strop.bench.pipelines.all import PIPELINES
from strop.bench.pipelines.not_built import NOT_BUILT
from strop.bench.pipelines.tiny import drawn

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "compatibility_cpu.json").read_text())
ROWS = [CompatibilityRow(**row) for row in RESULT["rows"]]
NOT_DRAWN = {row.name for row in ROWS if row.status == NOT_RUN and row.kind == "pipeline"}
DRAWN = [case for case in PIPELINES if case.name not in NOT_DRAWN]


def test_the_page_is_what_was_run() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert page == compatibility.markdown(RESULT)


def test_every_row_is_that_of_a_task() -> None:
    """Those that have not been run yet are named on the page."""
    keys = [compatibility.key_of(row) for row in RESULT["rows"]]
    assert len(set(keys)) == len(keys)
    assert set(keys) <= {task.key for task in compatibility.tasks()}


def test_nothing_fails_or_differs() -> None:
    assert not [row for row in ROWS if row.status in (REFUSED, DIFFERS)]


def test_every_pipeline_of_diffusers_is_named() -> None:
    names = [n for n in dir(diffusers) if n.endswith("Pipeline") and not n.startswith("Onnx")]
    built = {case.kind for case in PIPELINES}
    assert set(names) <= built | set(NOT_BUILT)
    assert all(hasattr(diffusers, name) for name in NOT_BUILT)
    assert not built & set(NOT_BUILT)
    assert len({case.name for case in PIPELINES}) == len(PIPELINES)


def test_what_is_drawn_is_told_apart() -> None:
    picture = torch.rand(1, 3, 4, 4)
    same = compatibility._judged([picture], [picture], {})
    assert (same["status"], same["decibels"]) == (COMPILED, None)
    other = compatibility._judged([picture], [picture + 0.1], {})
    assert other["status"] == DIFFERS
    assert compatibility._judged(ValueError("no"), [picture], {})["status"] == NOT_RUN
    told = compatibility._judged([picture], ValueError("no\nmore"), {})
    assert (told["status"], told["why"]) == (REFUSED, "ValueError: no")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", DRAWN, ids=lambda case: case.name)
def test_every_pipeline_builds_and_draws_the_same_again(case) -> None:
    first, second = (drawn(case, case.made()) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)

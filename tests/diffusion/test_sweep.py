"""Whatever a user does to a pipeline, between two pictures or between two steps of one, the next
result is that of a fresh eager pipeline."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from strop.bench.pipelines import twins
from strop.bench.pipelines.actions import ACTIONS, PICTURED, Action
from strop.bench.pipelines.all import PIPELINES
from strop.bench.pipelines.tiny import TinyPipeline
from tests.diffusion.known_failures import KNOWN
from tests.diffusion.replayed import replayed_first
from tests.e2e import tiny

PLAIN, AHEAD = "plain", "ahead"  # without graphs; replayed before the model is looked at
MOMENTS, PATHS = (twins.BETWEEN, twins.INSIDE), (PLAIN, AHEAD)
BY_NAME = {case.name: case for case in PIPELINES}


@dataclass(frozen=True, slots=True)
class Case:
    pipeline: TinyPipeline
    action: Action
    moment: str
    path: str

    @property
    def name(self) -> str:
        return f"{self.pipeline.name}-{self.action.name}-{self.moment}-{self.path}"

    @property
    def reason(self) -> str:
        """Why it is known to fail, or nothing."""
        return next((why for part, why in KNOWN.items() if re.search(part, self.name)), "")


def cases(pipelines: Iterable[TinyPipeline], actions: Iterable[Action] = ACTIONS) -> list[Case]:
    return [
        Case(pipeline, action, moment, path)
        for pipeline in pipelines
        for action in actions
        for moment in MOMENTS
        if action.inside or moment == twins.BETWEEN
        for path in PATHS
    ]


def marked(case: Case) -> Any:
    marks = [pytest.mark.xfail(reason=case.reason)] if case.reason else []
    return pytest.param(case, id=case.name, marks=marks)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What diffusers and Strop say of features is the concern of other tests."""
    for name in ("diffusers", "transformers", "strop"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    torch._dynamo.reset()


ROUNDING = 12.0  # decibels further from eager than eager with other rounding errors: a factor of 4


def judge(case: Case) -> None:
    for package in case.pipeline.needs:
        pytest.importorskip(package)
    around = replayed_first() if case.path == AHEAD else nullcontext()
    warm = 2 if case.path == AHEAD else 1  # programs that run once a picture are captured by then
    with around:
        found = twins.outcome(case.pipeline, case.action, case.moment, tiny.options(), warm=warm)
    if found is None:
        pytest.skip("the action does not apply to this pipeline")
    assert found.decibels >= least(case, found, warm), str(found)
    if not isinstance(found.eager, Exception):
        is_seen = found.is_seen or (case.action.is_seen and found.is_told_apart)
        assert is_seen == case.action.is_seen, f"a weak test: {found}"


def least(case: Case, found: twins.Outcome, warm: int) -> float:
    """How near to eager's the result must be (dB): some pipelines enlarge rounding errors."""
    wanted, is_stale = case.action.decibels, case.action.is_seen and not found.is_told_apart
    if found.decibels >= wanted or not math.isfinite(found.decibels) or is_stale:
        return wanted
    own = twins.rounding(case.pipeline, case.action, case.moment, warm=warm)
    return min(wanted, own - ROUNDING)


def sample() -> list[Case]:
    """Every third action once, on Stable Diffusion; moments and paths take turns."""
    found = []
    usual = [action for action in ACTIONS if action.on != PICTURED]
    for number, action in enumerate(usual[::3]):
        own = cases([BY_NAME["sd15"]], [action])
        found.append(own[number % len(own)])
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [marked(case) for case in sample()])
def test_a_sample_of_the_sweep(case: Case) -> None:
    judge(case)


# Pipelines that every action is tried on; the others have a few, as they have the same parts.
WHOLE = ("sd15", "sdxl", "sd15-controlnet", "flux", "sd3", "pixart-sigma")
FEW = ("copy_in_place", "data_assigned", "swap_block", "latents_changed")


def whole_sweep() -> list[Case]:
    usual = [action for action in ACTIONS if action.on != PICTURED]
    few = [action for action in usual if action.name in FEW]
    pictured = [action for action in ACTIONS if action.on == PICTURED]
    found = []
    for pipeline in PIPELINES:
        own = pictured if "ip-adapter" in pipeline.name else []
        found += cases([pipeline], own + (usual if pipeline.name in WHOLE else few))
    return found


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [marked(case) for case in whole_sweep()])
def test_the_sweep(case: Case) -> None:
    judge(case)


def test_every_known_failure_names_a_case() -> None:
    names = [case.name for case in whole_sweep()]
    for part in KNOWN:
        assert any(re.search(part, name) for name in names), part

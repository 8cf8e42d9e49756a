"""What plans of one program share changes none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from strop.ir.device import Device
from strop.ir.program import CallStep, Program
from strop.kernels import library
from strop.runtime.run.outline import Outline
from strop.runtime.run.shape_plan import ShapePlan, plan_shape
from tests.fusion.full_width import planned
from tests.gpus import H100
from tests.runtime.test_choices import CPU, Kernels

FACTORS = (1, 2, 0.5, 3)


@cache
def program(name: str, device: str) -> Program:
    return replace(planned(name).program, device=device)


def sizes(name: str) -> list[dict[str, int]]:
    hints = dict(planned(name).program.hints)
    return [{n: max(int(size * factor), 1) for n, size in hints.items()} for factor in FACTORS]


def plan(given: Program, env: dict[str, int], device: Device, outline: Outline | None) -> ShapePlan:
    kernels: Any = Kernels(device)
    return plan_shape(given, env, kernels, None, None, shares=True, has_free=True, outline=outline)


def facts(found: ShapePlan) -> Sequence[object]:
    return (
        *(found.sizes.shapes, found.sizes.strides, found.order, found.launches, found.choices),
        *(found.early, found.memory, found.arguments, found.results, found.released),
        *(found.handed_on, found.taken_in, found.free, found.sources),
    )


@pytest.mark.parametrize("name", ["flux", "sd35", "vit"])
@pytest.mark.parametrize("device", [CPU, H100], ids=["cpu", "cuda"])
def test_a_plan_is_the_same_whatever_was_planned_before(name: str, device: Device) -> None:
    given = program(name, "cuda" if device.arch else "cpu")
    shared = Outline(given)
    for env in sizes(name):
        assert facts(plan(given, env, device, shared)) == facts(plan(given, env, device, None))


def test_steps_that_sizes_change_are_asked_about_as_they_run() -> None:
    given = program("sd35", "cuda")
    outline = Outline(given)
    place, step = next((n, s) for n, s in enumerate(given.steps) if isinstance(s, CallStep))
    found = outline.asked_at(given.steps)
    other = replace(step, inputs=tuple(replace(ref, shape=ref.shape[:1]) for ref in step.inputs))
    steps = [None if n != place else other for n in range(len(given.steps))]
    asked = outline.asked_at(steps)
    assert [n for n, each in enumerate(asked) if each is not None] == [place]
    assert asked[place] != found[place]


def test_equal_calls_are_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    select = library.select

    def counted(*question: Any) -> library.Choice:
        asked.append(question)
        return select(*question)

    monkeypatch.setattr(library, "select", counted)
    found = plan(program("sd35", "cuda"), sizes("sd35")[0], H100, None)
    assert len(asked) == len(set(asked)) < len(found.choices)

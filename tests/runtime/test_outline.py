"""What plans of one program share changes none of them."""

from __future__ import annotations

from dataclasses import fields, replace
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


def plan(given: Program, factor: float, device: Device, outline: Outline | None) -> ShapePlan:
    kernels: Any = Kernels(device)
    env = {name: max(int(size * factor), 1) for name, size in given.hints}
    return plan_shape(given, env, kernels, None, None, shares=True, has_free=True, outline=outline)


def facts(found: ShapePlan) -> list[object]:
    names = [field.name for field in fields(found) if field.name not in ("sizes", "outline")]
    return [found.sizes.shapes, found.sizes.strides, *(getattr(found, name) for name in names)]


@pytest.mark.parametrize("name", ["flux", "sd35", "vit"])
@pytest.mark.parametrize("device", [CPU, H100], ids=["cpu", "cuda"])
def test_a_plan_is_the_same_whatever_was_planned_before(name: str, device: Device) -> None:
    given = replace(planned(name).program, device="cuda" if device.arch else "cpu")
    shared = Outline(given)
    for factor in FACTORS:
        assert facts(plan(given, factor, device, shared)) == facts(
            plan(given, factor, device, None)
        )


def test_steps_that_sizes_change_are_asked_about_as_they_run() -> None:
    outline = Outline(planned("sd35").program)
    steps = outline.program.steps
    step = next(step for step in steps if isinstance(step, CallStep))
    other = replace(step, inputs=tuple(replace(ref, shape=ref.shape[:1]) for ref in step.inputs))
    before, after = (
        outline.asked_at([each if of is step else None for of in steps]) for each in (step, other)
    )
    assert before != after


def test_equal_calls_are_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, select = [], library.select
    monkeypatch.setattr(library, "select", lambda *its: asked.append(its) or select(*its))
    found = plan(planned("sd35").program, 1, H100, None)
    assert len(asked) == len(set(asked)) < len(found.choices)

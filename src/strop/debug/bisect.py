"""Find which part of the compiler breaks a case: a pass, or one step of the program.

A pass is guilty when the graph behind it has other values in fp64 than the one before it, or
when the failure goes away with that pass disabled. A step is guilty when it alone is wrong on
the operands that it really had (``debug.check``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strop import passes
from strop.backend import Compiled
from strop.debug import case as cases
from strop.debug.case import Case
from strop.debug.check import judged
from strop.debug.failure import CRASH, CRASHES, WRONG, Failure, failure_of
from strop.debug.reference import evaluate, input_values
from strop.ir.graph import Graph

CHANGED = 1e-9  # of the largest element: far above what fp64 loses to another order of additions


@dataclass(frozen=True, slots=True)
class Culprit:
    """Name a cause. ``part``: "pass" or "step"; ``name``: of the pass, or the number of the
    step."""

    part: str
    name: str
    why: str

    def __str__(self) -> str:
        return self.why if self.part == "step" else f"pass {self.name}: {self.why}"


def bisect(case: Case, arguments: Mapping[int, Tensor], failure: Failure) -> Iterator[Culprit]:
    """Yield everything that can be shown to be at fault, the first cause first."""
    compiled = _compiled(case)
    changed = _changing_pass(compiled, arguments, case.env) if compiled else None
    if changed is not None:
        yield changed
    else:
        yield from _deciding_passes(case, arguments, failure)
    if compiled is None or failure.kind == CRASH:
        return
    bound, inputs = cases.bind(case, compiled.program, arguments)
    found = judged(bound, compiled, inputs, case.name)[1]
    if failure.kind == WRONG:  # a last place too many somewhere is not its cause
        found = [finding for finding in found if finding.is_gross]
    for finding in found[:1]:
        yield Culprit("step", str(finding.step), str(finding))


def _compiled(case: Case) -> Compiled | None:
    try:
        return case.compile(record=True)
    except CRASHES:
        return None


def _changing_pass(
    compiled: Compiled, arguments: Mapping[int, Tensor], env: Mapping[str, int]
) -> Culprit | None:
    """Return the first pass whose graph has other values than the one before it."""
    assert compiled.imported is not None
    graphs = [(record.name, record.graph) for record in compiled.passes if record.graph]
    before = compiled.imported
    wanted = _values(before, arguments, env)
    for name, graph in graphs:
        found = _values(graph, arguments, env)
        for number, (old, new) in enumerate(zip(wanted, found, strict=True)):
            error = _change(old, new)
            if error > CHANGED:
                return Culprit(
                    "pass",
                    name,
                    f"result {number} of the graph behind it is off by"
                    f" {error:.3g} of its largest element, in fp64",
                )
    return None


def _values(graph: Graph, arguments: Mapping[int, Tensor], env: Mapping[str, int]) -> list[Tensor]:
    values = evaluate(graph.outputs, input_values(graph, arguments), env, exact=True)
    return [values[node].double() for node in graph.outputs]


def _change(old: Tensor, new: Tensor) -> float:
    finite = torch.isfinite(old)
    if old.shape != new.shape or not torch.equal(torch.isfinite(new), finite):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    old, new = old[finite], new[finite]
    return float((new - old).abs().max() / old.abs().max().clamp_min(1e-300))


def _deciding_passes(
    case: Case, arguments: Mapping[int, Tensor], failure: Failure
) -> Iterator[Culprit]:
    """Yield passes without which the failure goes away."""
    for step in passes.steps(case.device):
        name = step.__name__
        if name in case.options.disable:
            continue
        rest = replace(case, options=cases.without(case.options, name))
        if failure_of(rest, arguments) is None:
            yield Culprit("pass", name, f"without it the case does not fail ({failure.kind})")

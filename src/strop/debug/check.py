"""Judge each step of a run against torch, on the values that are really there (``Options.check``).

A step's operands are read from its buffers just before it runs, so that an error counts where it
arises and not again in every step behind it. The judge is ``debug.reference`` in fp64, the rule
that of docs/numerics.md, with the same nodes in torch at their own dtypes as eager.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.backend import Compiled
from strop.debug.case import inaccuracy, is_gross
from strop.debug.listing import type_text
from strop.debug.reference import evaluate, has_reference, is_random
from strop.debug.steps import Planned, planned_steps
from strop.fusion.plan import Group
from strop.ir.affine import base_of
from strop.ir.dims import Expr
from strop.ir.eight_bit import MARK
from strop.ir.graph import Node
from strop.ir.program import CallStep, KernelStep, TensorRef
from strop.patterns.pattern import EXACT
from strop.runtime.run.executor import Bound
from strop.testing import MAX_FACTOR, MAX_ULPS
from strop.wording import counted

log = logging.getLogger("strop")
INACCURATE, NONFINITE = "inaccurate", "not finite"
FEW = 1024  # elements: too few for the RMS of eager's error to say much


@dataclass(frozen=True, slots=True)
class Finding:
    """Describe one step that went wrong. ``what``: INACCURATE or NONFINITE."""

    what: str
    step: int
    title: str
    origins: tuple[str, ...]  # modules whose nodes it computes, that of the value first
    value: str  # the node, and its type
    detail: str
    is_gross: bool  # no matter of rounding

    def __str__(self) -> str:
        origin, *others = self.origins
        fused = f" (with parts of {', '.join(others)})" if others else ""
        return (
            f"step {self.step}, {self.title} of {origin or 'the module'}{fused}, is {self.what}:"
            f" {self.value}: {self.detail}"
        )


def run_checked(
    bound: Bound, compiled: Compiled, inputs: Sequence[Tensor], name: str
) -> tuple[list[Any], list[Finding]]:
    """Run once with every step judged. Logs the first finding of each kind; returns them all.

    Where the graph was dumped, the inputs of a run with findings go to its folder.
    """
    results, findings = judged(bound, compiled, inputs, name)
    for what in (INACCURATE, NONFINITE):
        first = next((f for f in findings if f.what == what), None)
        if first is not None:
            log.warning("check of %s: %s", name, first)
    if findings and compiled.folder:
        from strop.debug.repro import save_inputs

        arguments = {**dict(enumerate(bound.state)), **_by_index(bound, inputs)}
        file = save_inputs(arguments, bound.env, Path(compiled.folder))
        log.warning("check of %s: its inputs are in %s, for strop bisect --inputs", name, file)
    return results, findings


def _by_index(bound: Bound, inputs: Sequence[Tensor]) -> dict[int, Tensor]:
    indices = [i for i, spec in enumerate(bound.program.inputs) if not spec.is_state]
    return dict(zip(indices, inputs, strict=True))


def judged(
    bound: Bound, compiled: Compiled, inputs: Sequence[Tensor], name: str
) -> tuple[list[Any], list[Finding]]:
    judge = _Judge(bound, compiled)
    with _progress(name, len(judge.steps)) as show:

        def around(position: int, step: Callable[[], None]) -> None:
            show(position)
            judge.around(position, step)

        bound.around = around
        try:
            results = bound.run(inputs)
        finally:
            bound.around = None
    log.info(
        "check of %s: %s, %s, %s without a judge",
        name,
        counted(len(judge.steps), "step"),
        counted(len(judge.findings), "finding"),
        counted(judge.num_unjudged, "step"),
    )
    return results, judge.findings


class _Judge:
    """Judge one checked run, with the state of which buffer holds which value."""

    def __init__(self, bound: Bound, compiled: Compiled) -> None:
        self.bound, self.env = bound, bound.env
        self.steps = planned_steps(compiled)
        self.findings: list[Finding] = []
        self.num_unjudged = 0  # random, or without a reference
        self._held: dict[Node, int] = {n: i for i, n in enumerate(compiled.graph.inputs)}
        self._places = {p.plan: place for p in self.steps if (place := _place_of(p)) is not None}

    def around(self, position: int, run: Callable[[], None]) -> None:
        planned = self.steps[position]
        if self.bound.steps[position] is None:
            return  # judged as a part of the step that does its work
        made = self._made(planned)
        if not made or not all(map(_has_judge, _nodes(planned))):
            self.num_unjudged += 1
            run()
            self._held.update(made)
            return
        given = {node: self._contents(node, n).clone() for node, n in self._operands(made)}
        eager = evaluate(tuple(made), given, self.env, exact=False)
        exact = evaluate(tuple(made), given, self.env, exact=True)
        run()
        self._held.update(made)
        for node, number in made.items():
            actual = self._contents(node, number).reshape(eager[node].shape)
            self._judge(planned, node, actual, eager[node], exact[node], given)

    def _made(self, planned: Planned) -> Mapping[Node, int]:
        """Return what the step writes at this shape, and another step's values too where it does
        its work."""
        if not isinstance(planned.step, KernelStep):
            return planned.made
        runs = self.bound.steps[planned.number]
        writes = runs.writes if isinstance(runs, KernelStep) else ()
        found = {n: number for p in self.steps for n, number in p.made.items() if number in writes}
        return found if writes != planned.step.writes else planned.made

    def _contents(self, node: Node, number: int) -> Tensor:
        whole = self.bound.contents(number)
        if node in self._places:
            return self._piece(whole, self._places[node]).reshape(_sizes(node.shape, self.env))
        if node.op != "part":
            return whole
        dim, start = node.attrs["dim"], node.attrs["start"].eval(self.env)
        return whole.narrow(dim, start, node.shape[dim].eval(self.env))

    def _piece(self, whole: Tensor, place: TensorRef) -> Tensor:
        sizes, strides = (_sizes(each, self.env) for each in (place.shape, place.strides))
        start = whole.storage_offset() + place.offset.eval(self.env)
        return whole.as_strided(sizes, strides, start)

    def _operands(self, made: Mapping[Node, int]) -> Iterator[tuple[Node, int]]:
        """Yield the values that this step finds in memory, through whatever it computes again."""
        stack, seen = list(made), set(made)
        while stack:
            for operand in stack.pop().inputs:
                node = base_of(operand)
                if node in seen:
                    continue
                seen.add(node)
                if node in self._held:
                    yield node, self._held[node]
                else:
                    stack.append(node)

    def _judge(
        self,
        planned: Planned,
        node: Node,
        actual: Tensor,
        eager: Tensor,
        exact: Tensor,
        given: Mapping[Node, Tensor],
    ) -> None:
        text = inaccuracy(actual, eager, exact)
        is_rounding = text and (
            _is_rounding(actual, eager, exact) or self._is_cancellation(node, actual, exact, given)
        )
        if text and not is_rounding:
            self._find(INACCURATE, planned, node, text, is_gross(actual, eager, exact))
        if _finite(actual) or not all(map(_finite, given.values())):
            return
        count = int((~torch.isfinite(actual)).sum())
        self._find(
            NONFINITE,
            planned,
            node,
            f"{count} of {counted(actual.numel(), 'element')}, from finite operands"
            f"{'' if _finite(eager) else '; so they are in torch'}",
            not _finite(eager) or is_gross(actual, eager, exact),
        )

    def _is_cancellation(
        self, node: Node, actual: Tensor, exact: Tensor, given: Mapping[Node, Tensor]
    ) -> bool:
        """Tell whether a sum or mean is off by less than the last place of what it adds up: the
        order of additions decides the rest where terms cancel, and eager's is no better."""
        if node.op not in ("sum", "mean") or not node.dtype.is_floating_point:
            return False
        terms = evaluate(node.inputs, given, self.env, exact=True)[node.inputs[0]].abs()
        total = terms.sum(node.attrs["dims"], keepdim=True)
        scale = total * exact.numel() / terms.numel() if node.op == "mean" else total
        limit = torch.finfo(node.dtype).eps * scale
        return bool(((actual.double() - exact).abs() <= limit).all())

    def _find(self, what: str, planned: Planned, node: Node, detail: str, gross: bool) -> None:
        origins = tuple(dict.fromkeys([node.origin, *(n.origin for n in _nodes(planned))]))
        value = f"{node.op} {type_text(node)}"
        self.findings.append(
            Finding(what, planned.number, planned.title, origins, value, detail, gross)
        )


def _is_rounding(actual: Tensor, eager: Tensor, exact: Tensor) -> bool:
    """Tell whether a few elements pass the rule of the largest error; their RMS says little."""
    if actual.numel() >= FEW or not actual.is_floating_point() or actual.shape != eager.shape:
        return False
    own, base, wide = (x.double() for x in (actual - exact, eager - exact, exact))
    ulp = torch.finfo(actual.dtype).eps * wide.square().mean().sqrt()
    return bool(own.abs().max() <= MAX_FACTOR * base.abs().max() + MAX_ULPS * ulp)


def _nodes(planned: Planned) -> tuple[Node, ...]:
    return planned.plan.nodes if isinstance(planned.plan, Group) else (planned.plan,)


def _place_of(planned: Planned) -> TensorRef | None:
    return planned.step.place if isinstance(planned.step, CallStep) else None


def _sizes(shape: Sequence[Expr], env: Mapping[str, int]) -> list[int]:
    return [size.eval(env) for size in shape]


def _has_judge(node: Node) -> bool:
    is_exact = node.attrs.get("numerics", EXACT) == EXACT  # else a pattern's, opted in by name
    is_exact = is_exact and MARK not in node.attrs  # of an attention, that may be by codes
    is_alone = node.op != "exchange"  # other processes take part in, which may not be checking
    return has_reference(node.op) and not is_random(node) and is_exact and is_alone


def _finite(x: Tensor) -> bool:
    return not x.is_floating_point() or bool(torch.isfinite(x).all())


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a counter on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda position: None
        return
    try:
        yield lambda position: print(
            f"\rchecking {name}: step {position + 1} of {total}", end="", file=sys.stderr
        )
    finally:
        print("\r\033[K", end="", file=sys.stderr)

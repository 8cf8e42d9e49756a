"""Tell which kernel of the library runs each call of a program, what it beat, and who cannot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from strop.ir.device import Device
from strop.ir.dims import Expr
from strop.ir.program import CallStep, Program
from strop.kernels import library
from strop.kernels.kernel import FASTEST
from strop.runtime.run.choices import call_of, choices_of


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """Equal calls of a graph: the sizes of their operands, and what runs them.

    ``us``: the estimate by which it was chosen; 0 where a measurement says that it is the fastest.
    ``beaten``: the others that could, with their estimates, None where they cannot at these sizes.
    ``unable``: hand-written kernels that cannot do such a call, and why.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    count: int
    kernel: str
    us: float
    beaten: tuple[tuple[str, float | None], ...]
    unable: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        sizes = " . ".join("x".join(map(str, shape)) for shape in self.shapes[:2])
        beaten = "".join(
            f", {name} {_time(us) if us is not None else 'not at these sizes'}"
            for name, us in self.beaten
        )
        return f"{self.count}x {self.op} {sizes}: {self.kernel} {_time(self.us)}{beaten}"


def _time(us: float) -> str:
    return "(measured as the fastest)" if us == FASTEST else f"~{us:.1f} us"


def chosen(program: Program, sizes: Mapping[str, int], device: Device) -> tuple[ChoiceRow, ...]:
    """A row for each kind of call, in the order of the program. On a CPU they are those of
    attention, and products whose weights are packed: a library runs every other call."""

    def evaluated(exprs: tuple[Expr, ...]) -> Sequence[int]:
        return tuple(expr.eval(sizes) for expr in exprs)

    steps = program.at(sizes)
    found = dict[tuple[str, tuple[tuple[int, ...], ...], library.Choice], list[CallStep]]()
    for position, choice in choices_of(program, steps, evaluated, device).items():
        step = steps[position]
        assert isinstance(step, CallStep)
        shapes = tuple(tuple(evaluated(ref.shape)) for ref in step.inputs)
        found.setdefault((step.op, shapes, choice), []).append(step)
    return tuple(_rows(program, found, device))


def _rows(
    program: Program,
    found: Mapping[tuple[str, tuple[tuple[int, ...], ...], library.Choice], Sequence[CallStep]],
    device: Device,
) -> Iterator[ChoiceRow]:
    for (op, shapes, choice), steps in found.items():
        reasons = library.reasons(call_of(program, steps[0]), device, program.kernels_off)
        beaten = ((name, us if math.isfinite(us) else None) for name, us in choice.beaten)
        us = choice.cost_us if math.isfinite(choice.cost_us) else FASTEST
        yield ChoiceRow(
            op, shapes, len(steps), choice.kernel, us, tuple(beaten), tuple(reasons.items())
        )

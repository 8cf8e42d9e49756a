"""Order steps so that they need less memory.

A graph has the convolution of a shortcut where its result is asked for, at the end of a block. Its
operand, often the largest value of all, is kept for it while the block works on others. Done
first, it leaves a smaller value instead, and the block's norm may write over the operand.

Results that are copies come last of all: keys and values of each layer, which a language model
returns. What they are copied from, the product of a whole layer, would be kept until then. A result
has memory from the beginning of a run on, so that its copy costs none where it comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, KeysView, Sequence
from dataclasses import dataclass, replace

from strop.ir.ops import OPS
from strop.ir.program import CallStep, KernelStep, Program, Step

Order = tuple[int, ...]  # positions of the steps as they were


@dataclass(frozen=True, slots=True)
class _Uses:
    """Hold the buffers of a step: what it touches at the hinted sizes, which of these may share
    memory, and what it writes in any of its forms."""

    touched: frozenset[int]
    in_place: tuple[tuple[int, int], ...]
    writes: frozenset[int]


def lean(program: Program) -> Order:
    """Find an order with kernels of results, and calls, as early as their operands allow: kernels
    wherever an operand is kept for them alone, calls wherever that lowers the most bytes that are
    alive at once, at the sizes of the hints."""
    memory = _Memory(program)
    order = _results_first(program, memory)
    least, peak = memory.most_alive(order)
    tried = _moves(program, memory, order, peak)
    while (found := next(tried, None)) is not None:
        most, at = memory.most_alive(found)
        if most < least:
            order, least = found, most
            tried = _moves(program, memory, order, at)
    return order


def in_order(program: Program, order: Order) -> Program:
    """Return the same steps, one after the other as ``order`` has them."""
    return replace(program, steps=tuple(program.steps[number] for number in order))


def _results_first(program: Program, memory: _Memory) -> Order:
    """Have kernels that write nothing but results run as soon as they can, where a value is kept
    for nothing else."""
    order: Order = tuple(range(len(program.steps)))
    results = {number for number, buffer in enumerate(program.buffers) if buffer.kind == "result"}
    ends = {
        number
        for number, step in enumerate(program.steps)
        if isinstance(step, KernelStep) and results >= memory.uses[number].writes
    }
    _, last = memory.ranges(tuple(number for number in order if number not in ends))
    for place in sorted(ends):  # a move changes nothing behind its place
        operands = memory.uses[place].touched & memory.values
        kept = {number for number in operands if last.get(number, -1) < place}
        if kept:
            order = _moved(program, memory, order, place, kept)
    return order


def _moved(program: Program, memory: _Memory, order: Order, place: int, kept: set[int]) -> Order:
    """Return the order with the step at a place as early as it can be, or as it was where that
    lets none of those that are ``kept`` end earlier."""
    if place and memory.uses[order[place - 1]].touched.issuperset(kept):
        return order
    written, ready = memory.uses[order[place]].writes, place
    operands = _in_any_form(program.steps[order[place]]) - written
    for number in reversed(order[:place]):
        is_made = not memory.uses[number].writes.isdisjoint(operands)
        if is_made or not written.isdisjoint(_in_any_form(program.steps[number])):
            break
        ready -= 1
    if ready == place:
        return order
    return (*order[:ready], order[place], *order[ready:place], *order[place + 1 :])


def _in_any_form(step: Step) -> set[int]:
    """Return what a step touches at some size."""
    if isinstance(step, CallStep):
        return {*step.touched}
    return {*step.buffers}.union(*(form.buffers for form in step.variants))


def _moves(program: Program, memory: _Memory, order: Order, peak: int) -> Iterator[Order]:
    """Yield orders in which a call from behind the peak, for which alone a value is kept that is
    alive there, reads it as early as it can."""
    first, last = memory.ranges(order)
    for place in range(peak, len(order)):
        step = program.steps[order[place]]
        if not isinstance(step, CallStep) or not OPS[step.op].anchor.is_movable:
            continue
        operands = {ref.buffer for ref in step.inputs}
        kept = {n for n in operands if last.get(n) == place and first[n] <= peak}
        if not kept:
            continue
        before = [memory.uses[number] for number in order[:place]]
        ready = 1 + max((n for n, uses in enumerate(before) if uses.writes & operands), default=-1)
        if any(uses.touched & kept for uses in before[ready:]):
            yield (*order[:ready], order[place], *order[ready:place], *order[place + 1 :])


class _Memory:
    """Count what is alive in an order of the steps, of the values that the program places
    itself."""

    def __init__(self, program: Program) -> None:
        sizes = dict(program.hints)
        self.uses = [
            _uses(step, form) for step, form in zip(program.steps, program.at(sizes), strict=True)
        ]
        self._bytes = {
            number: math.prod(s.eval(sizes) for s in buffer.shape) * buffer.dtype.itemsize
            for number, buffer in enumerate(program.buffers)
            if buffer.kind == "arena"
        }
        self._returned = {r.tensor.buffer for r in program.returned if r.tensor is not None}

    @property
    def values(self) -> KeysView[int]:
        """Return what the program places itself."""
        return self._bytes.keys()

    def ranges(self, order: Order) -> tuple[dict[int, int], dict[int, int]]:
        """Return where each value is made, and where it is read for the last time."""
        first, last = dict[int, int](), dict[int, int]()
        for place, number in enumerate(order):
            for touched in self.uses[number].touched & self._bytes.keys():
                first.setdefault(touched, place)
                last[touched] = place
        last |= dict.fromkeys(self._returned & last.keys(), len(order))
        return first, last

    def most_alive(self, order: Order) -> tuple[int, int]:
        """Return the most bytes alive at once, and at which place."""
        first, last = self.ranges(order)
        changes = [0] * (len(order) + 2)
        for number, place in first.items():
            changes[place] += self._bytes[number]
            changes[last[number] + 1] -= self._bytes[number]
        for new in self._in_one_place(order, first, last):
            changes[first[new]] -= self._bytes[new]  # of the step that reads one, writes the other
            changes[first[new] + 1] += self._bytes[new]
        return _highest(changes)

    def _in_one_place(self, order: Order, first: dict[int, int], last: dict[int, int]) -> set[int]:
        """Return values that are written over one that ends there, as the runtime will find
        them."""
        found, taken = set[int](), set[int]()
        for number in order:
            for new, old in self.uses[number].in_place:
                ends = last.get(old) == first.get(new)
                if (
                    ends
                    and new not in found
                    and old not in taken
                    and (self._bytes[new] == self._bytes[old])
                ):
                    found.add(new)
                    taken.add(old)
        return found


def _highest(changes: Sequence[int]) -> tuple[int, int]:
    alive = most = at = 0
    for place, change in enumerate(changes):
        alive += change
        if alive > most:
            most, at = alive, place
    return most, at


def _uses(step: Step, form: Step | None) -> _Uses:
    if isinstance(step, CallStep):
        touched = frozenset(step.touched)
        writes = touched if step.op == "write" else touched & {*step.outputs}
        return _Uses(touched, step.in_place, writes)
    writes = frozenset(step.writes).union(*(v.writes for v in step.variants))
    if form is None:  # another step does its work
        return _Uses(frozenset(), (), writes)
    assert isinstance(form, KernelStep)
    return _Uses(frozenset(form.touched), form.in_place, writes)

"""Facts that all plans of one program have in common, whatever its sizes, are worked out once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from strop.ir.program import Program, Step
from strop.runtime.run.choices import AskedCall, asked_by, steady_weights
from strop.runtime.run.free_sizes import FreeSizes, free_sizes
from strop.runtime.run.sizes import BufferLooks


class Outline:
    """Each fact is worked out when it is first asked for."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def looks(self) -> BufferLooks:
        return BufferLooks(self.program)

    @cached_property
    def steady(self) -> frozenset[int]:
        """Return the buffers that are the module's, and that no step writes."""
        return steady_weights(self.program)

    @cached_property
    def _asked(self) -> tuple[AskedCall | None, ...]:
        return tuple(asked_by(self.program, step, self.steady) for step in self.program.steps)

    def asked_at(self, steps: Sequence[Step | None]) -> list[AskedCall | None]:
        """Return what the library is asked about steps as they run at some sizes, by position. Most
        are the program's own at all sizes."""
        own = zip(steps, self.program.steps, self._asked, strict=True)
        return [
            known if step is each else asked_by(self.program, step, self.steady)
            for step, each, known in own
        ]

    @cached_property
    def free(self) -> FreeSizes:
        return free_sizes(self.program)

    @cached_property
    def by_kind(self) -> Mapping[str, tuple[int, ...]]:
        """Return the buffers by kind."""
        found: dict[str, list[int]] = {"input": [], "arena": [], "result": [], "call": []}
        for number, buffer in enumerate(self.program.buffers):
            found[buffer.kind].append(number)
        return {kind: tuple(numbers) for kind, numbers in found.items()}

    @cached_property
    def arguments(self) -> tuple[int, ...]:
        """Return the buffers of the inputs that are not state."""
        inputs, buffers = self.program.inputs, self.program.buffers
        return tuple(n for n in self.by_kind["input"] if not inputs[buffers[n].index].is_state)

    @cached_property
    def returned(self) -> frozenset[int]:
        """Return the buffers of which results are pieces."""
        items = self.program.returned
        return frozenset(item.tensor.buffer for item in items if item.tensor is not None)

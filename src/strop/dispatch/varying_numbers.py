"""Numbers among a call's arguments that a user turns, such as the scale of a ControlNet.

The first value that is seen is a constant of its graph, but for scales (``scales.py``). With the
second one the float becomes an
input of the next graph, which then serves every value: a tensor without dims, in 64 bits as
Python's floats, that is copied like other arguments. Graphs of models that nobody turns anything
of stay as they are. Where code needs the value itself, it stays a constant (``fix``). Of whole
numbers, ``whole_numbers`` says which are inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from strop.dispatch.integer_sizes import WholeNumbers, with_sizes
from strop.dispatch.scales import scales_of_call
from strop.dispatch.signature import (
    NUM_ARGUMENTS,
    Beside,
    NumberRef,
    Shapes,
    Skeleton,
    flatten,
    number_text,
    with_floats,
)
from strop.dispatch.told_apart import ToldApart
from strop.ir.program import NumberGuard
from strop.ir.tensor_spec import TensorSpec

_MOST_TENSORS = 256  # kept, of the values of one module's numbers


@dataclass(slots=True)
class GivenCall:
    """A call: its ``skeleton``, the tensors in it, and behind them those that stand for sizes, and
    the ``numbers`` that are inputs. ``bare`` is the skeleton without what is ``beside``."""

    skeleton: Skeleton
    tensors: list[Tensor]
    bare: Skeleton
    beside: Beside
    numbers: tuple[float, ...] = ()
    inputs: tuple[int, ...] = ()  # which of the floats they are
    is_brought: bool = False  # from another device, where the caller's tensors stay

    @property
    def plain(self) -> list[Tensor]:
        """All but the numbers that are inputs."""
        return self.tensors[: len(self.tensors) - len(self.numbers)]

    @property
    def given(self) -> list[Tensor]:
        """The tensors that the caller has given."""
        return self.tensors[: len(self.tensors) - len(self.numbers) - self.beside.num_sizes]


class Turned:
    """Know which floats of one module's calls are inputs, by the bare skeleton of the call; and
    which whole numbers are sizes."""

    def __init__(self) -> None:
        self._wholes = WholeNumbers()
        self._first: dict[Skeleton, tuple[float, ...]] = {}
        self._turned: dict[Skeleton, frozenset[int]] = {}
        self._fixed: dict[tuple[int, Skeleton], frozenset[int]] = {}  # by structure too
        self._skeletons: dict[tuple[Skeleton, tuple[Skeleton, ...]], Skeleton] = {}
        self._guards: dict[Skeleton, tuple[NumberGuard, ...]] = {}
        self._made: dict[tuple[str, torch.device], Tensor] = {}
        self._latest: Any = None  # the latest call, and what was decided of it

    def flattened(
        self, arguments: Any, tensors: list[Tensor], beside: Beside, told: ToldApart
    ) -> Skeleton:
        """Flatten as ``flatten`` does, with each tensor once where that is ``told`` apart, and with
        whole numbers that are sizes among the tensors."""
        skeleton, tensors[:] = told.joined(flatten(arguments, tensors, beside), tensors)
        if beside.num_wholes:
            return self._wholes.as_sizes(skeleton, tensors, beside)
        return skeleton

    def call(
        self,
        bare: Skeleton,
        beside: Beside,
        tensors: list[Tensor],
        structure: int,
        device: torch.device,
    ) -> GivenCall:
        """The call with these ``tensors`` and what is ``beside`` in a skeleton, ``bare`` of it."""
        place = structure, device, len(tensors), tuple(map(float.hex, beside.floats))
        if self._latest is None or self._latest[0] != place or self._latest[1] != bare:
            self._latest = place, bare, *self._decided(bare, beside, *place[:3])
        _, _, skeleton, inputs, made = self._latest
        numbers = tuple(beside.floats[n] for n in inputs)
        return GivenCall(skeleton, [*tensors, *made], bare, beside, numbers, inputs)

    def _decided(
        self, bare: Skeleton, beside: Beside, structure: int, device: torch.device, count: int
    ) -> tuple[Skeleton, tuple[int, ...], list[Tensor]]:
        """Return the skeleton of a call with ``count`` tensors, which of its floats are inputs, and
        the tensors of these."""
        floats = beside.floats
        inputs: tuple[int, ...] = ()
        if floats and bare not in self._turned:
            settings = range(len(floats) - beside.num_settings, len(floats))
            self._turned[bare] = frozenset((*settings, *scales_of_call(bare[:NUM_ARGUMENTS])))
        if turned := self._turned.get(bare):
            free = turned - self._fixed.get((structure, bare), frozenset())
            inputs = tuple(n for n in sorted(free) if math.isfinite(floats[n]))
        parts: list[Skeleton] = [number_text(value) for value in floats]
        for place, number in enumerate(inputs, count):
            parts[number] = NumberRef(place)
        key = bare, tuple(parts)
        if key not in self._skeletons:
            self._skeletons[key] = with_floats(bare, parts)
        made = [self._tensor(floats[n], device) for n in inputs]
        return self._skeletons[key], inputs, made

    def note(self, call: GivenCall) -> bool:
        """Note that a graph is looked for. Tell whether a float has another value than when one was
        first looked for, and has become an input by that."""
        floats = call.beside.floats
        first = self._first.setdefault(call.bare, tuple(floats))
        known = self._turned.get(call.bare, frozenset())
        pairs = enumerate(zip(first, floats, strict=True))
        found = frozenset(n for n, (a, b) in pairs if number_text(a) != number_text(b)) - known
        self._turned[call.bare] = known | found
        self._latest = None
        return bool(found)

    def fix(
        self, call: GivenCall, structure: int, numbers: Sequence[int]
    ) -> tuple[Skeleton, list[Tensor], Beside]:
        """These numbers of the call, counted from 0, stay constants; without any, those that are
        sizes do. What ``call`` takes, with that."""
        if not numbers:
            bare = self._wholes.fix(call.bare, call.tensors)
            return bare, call.given, replace(call.beside, num_sizes=0)
        key = structure, call.bare
        fixed = frozenset(call.inputs[number] for number in numbers)
        self._fixed[key] = self._fixed.get(key, frozenset()) | fixed
        self._latest = None
        return call.bare, call.plain, call.beside

    def learn(self, call: GivenCall, guards: Sequence[NumberGuard]) -> None:
        """Note what graphs for such calls ask about their numbers."""
        known = self._guards.get(call.skeleton, ())
        self._guards[call.skeleton] = tuple(dict.fromkeys((*known, *guards)))

    def outcomes(self, call: GivenCall) -> tuple[bool, ...]:
        """Return what those guards say of this call."""
        guards = self._guards.get(call.skeleton, ())
        return tuple(guard.holds(call.numbers) for guard in guards)

    def _tensor(self, value: float, device: torch.device) -> Tensor:
        """Return the same tensor for the same value: what depends on it alone is kept through a
        loop."""
        key = value.hex(), device  # -0.0 is not 0.0
        made = self._made.get(key)
        if made is None:
            if len(self._made) >= _MOST_TENSORS:
                self._made.clear()
            # filled by a kernel: nobody waits for a copy from the host
            made = torch.full((), value, dtype=torch.float64, device=device)
            self._made[key] = made
        return made


def all_shapes(shapes: Shapes, call: GivenCall, device: torch.device) -> Shapes:
    """``shapes`` of the tensors that are given, with those of sizes and numbers behind them."""
    if call.beside.num_sizes:
        shapes = with_sizes(shapes, call.plain, call.beside.num_sizes)
    return with_numbers(shapes, len(call.numbers), device) if call.numbers else shapes


def with_numbers(shapes: Shapes, count: int, device: torch.device) -> Shapes:
    """The same with so many numbers behind the tensors."""
    spec = TensorSpec((), torch.float64, device)
    other = shapes.otherwise and with_numbers(shapes.otherwise, count, device)
    return replace(shapes, specs=(*shapes.specs, *[spec] * count), otherwise=other)

"""Know what the code of a module asks about its arguments beside class, shape and layout: whether
two of them are one tensor, and whether one has attributes of its own.

Calls are not told apart by these, as nearly no code asks. Where a user's code does, an argument
that is given twice is one input of a program of its own. For all else the trace has the usual
answer, and a call that has another runs in eager.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from types import CodeType

import torch
from torch import Tensor
from torch.nn import Parameter

from strop.dispatch.signature import Skeleton
from strop.ir.graph import Ref

# An attribute that is not there raises an error in the trace, but to code that names one of these.
_ASKING_FOR_ATTRIBUTES = frozenset(
    {"getattr", "hasattr", "vars", "__dict__", "attrgetter", "AttributeError"}
)
_MODES = {
    "is_grad_enabled": (
        torch.is_grad_enabled,
        "its code asks whether gradients are enabled, and they are: call it under torch.no_grad()",
    ),
    "is_inference_mode_enabled": (
        torch.is_inference_mode_enabled,
        "its code asks for inference mode: call it under torch.no_grad()",
    ),
}


@dataclass(frozen=True, slots=True)
class ToldApart:
    """Say what the code of a module asks of a call. ``own`` are the ids of the module's own
    tensors, where code asks whether two tensors are one."""

    same: bool = False
    attributes: bool = False
    modes: tuple[str, ...] = ()
    own: frozenset[int] = frozenset()

    @classmethod
    def by(cls, names: Set[str], asks_same: bool, tensors: Iterable[Tensor]) -> ToldApart:
        """Judge by the ``names`` in a user's code. ``asks_same``: it has ``a is b`` or ``id``.
        ``tensors``: the module's."""
        same = asks_same or "id" in names
        return cls(
            same,
            not names.isdisjoint(_ASKING_FOR_ATTRIBUTES),
            tuple(name for name in _MODES if name in names),
            frozenset(map(id, tensors)) if same else frozenset(),
        )

    @property
    def asks_nothing(self) -> bool:
        return not (self.same or self.attributes)

    def unfit_mode(self) -> str:
        """Say why a call cannot be served in the mode that torch is in, or nothing."""
        for name in self.modes:
            is_on, reason = _MODES[name]
            if is_on():
                return reason
        return ""

    def misfit(self, tensors: Sequence[Tensor]) -> str:
        """Say why a program cannot be given these arguments, or nothing."""
        if self.attributes and any(map(vars, tensors)):
            return "an argument has attributes of its own, and its code may ask for them"
        if self.same and not self.own.isdisjoint(map(id, tensors)):
            return "an argument is a tensor of the module itself, and its code may ask for that"
        return ""

    def has_usual_answers(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether the trace of other tensors, each given once, answers for these."""
        if self.asks_nothing:
            return True
        return not self.misfit(tensors) and not (self.same and _are_repeated(tensors))

    def joined(self, skeleton: Skeleton, tensors: list[Tensor]) -> tuple[Skeleton, list[Tensor]]:
        """Return a call's arguments with each tensor once, where code asks whether two are one."""
        if not self.same or not _are_repeated(tensors):
            return skeleton, tensors
        found = {id(t): t for t in tensors}
        places = {number: place for place, number in enumerate(found)}
        return _moved(skeleton, [places[id(t)] for t in tensors]), [*found.values()]


def _are_repeated(tensors: Sequence[Tensor]) -> bool:
    return len({*map(id, tensors)}) < len(tensors)


def _moved(skeleton: Skeleton, places: Sequence[int]) -> Skeleton:
    if isinstance(skeleton, Ref):
        return replace(skeleton, index=places[skeleton.index])
    if isinstance(skeleton, tuple):
        return tuple(_moved(part, places) for part in skeleton)
    return skeleton


@functools.lru_cache(maxsize=4096)
def compares_identity(code: CodeType) -> bool:
    """Tell whether code asks of two computed values whether they are one object: none of them is a
    constant, or what a module-level name stands for."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    if any(map(compares_identity, inner)):
        return True
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    return any(
        step.opname == "IS_OP" and not _is_known(steps[:place]) for place, step in enumerate(steps)
    )


def _is_known(steps: Sequence[dis.Instruction]) -> bool:
    """Tell whether the last of these steps load a constant, a global name or an attribute of
    one."""
    for step in reversed(steps):
        if step.opname != "LOAD_ATTR":
            return step.opname in ("LOAD_CONST", "LOAD_GLOBAL", "LOAD_NAME")
    return False


def attribute_asked_for(names: Set[str], tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Say which attribute of a weight's own a user's code names, or nothing: what stands for the
    weight in a trace has none. Those of classes of tensors have reasons of their own."""
    for name, tensor in tensors:
        if type(tensor) not in (Tensor, Parameter):
            continue
        for attribute in sorted(names & vars(tensor).keys()):
            return f"its code may ask for {attribute} of {name}, an attribute of the tensor's own"
    return ""

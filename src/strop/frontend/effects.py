"""Note what a forward does besides computing, which compiled code would not do again.

A call that does so is refused, and eager serves it: attributes that it sets, lists that it changes,
random numbers that it draws in Python, seeds that it gives to torch's generator. Attributes that
begin with ``_`` are a module's caches by custom; inference lets it have them, with what they hold
when it is traced.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from strop.errors import CaptureError
from strop.frontend.quick import replaced

_OWN = frozenset(vars(nn.Module()))  # of every module: hooks, weights
_SIMPLE = (bool, int, float, str, type(None))
# what torch.tensor does with the numbers that it is given
_MADE = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)


@contextmanager
def no_effects(module: nn.Module, *, private: bool) -> Iterator[None]:
    """Raises CaptureError after a body in which ``module`` had effects on itself, on Python's
    random numbers or on torch's, whose state is then what it was. ``private``: also on names with
    a ``_``."""
    draws = random.getstate(), np.random.get_state(), _numpy_draws()
    before = [(part, _settings(part, private)) for part in module.modules()]
    try:
        with _no_seeding(), replaced(nn.Module, "__setattr__", _setting_numbers):
            yield
    finally:
        has_drawn = draws[0] != random.getstate() or draws[2] != _numpy_draws()
        random.setstate(draws[0])
        np.random.set_state(draws[1])
    if has_drawn:
        raise CaptureError("it draws random numbers in Python")
    for part, known in before:
        now = _settings(part, private)
        changed = [name for name in now.keys() | known.keys() if now.get(name) != known.get(name)]
        if changed:
            raise CaptureError(f"it sets {', '.join(sorted(changed))} of a {type(part).__name__}")


def _numpy_draws() -> tuple[Any, ...]:
    """Return what is equal where numpy would draw the same numbers."""
    kind, numbers, *rest = np.random.get_state()
    return kind, np.asarray(numbers).tobytes(), *rest


def _setting_numbers(own: Callable[..., None]) -> Callable[..., None]:
    """Let a module's attribute stay the number that it is where it is set to a size that equals it.

    Swin sets its window to the smaller side where that is no larger: a side that has a symbol is
    guarded to be what the attribute says, and a call at another side finds another graph.
    """

    def set_attribute(part: nn.Module, name: str, value: Any) -> None:
        kept = vars(part).get(name)
        is_size = isinstance(value, torch.SymInt) and type(kept) is int
        own(part, name, kept if is_size and bool(value == kept) else value)

    return set_attribute


_DYNAMO = "torch._dynamo.convert_frame"
_SEEDS = "it seeds torch's generator in its forward: seed it before the call"


class _Unseeded:
    """Stands for torch's generator in ``torch.manual_seed`` and its like, in one thread. Compiled
    code would draw its numbers without the seed."""

    def __init__(self, own: torch.Generator) -> None:
        self.own, self.thread, self.is_seeded = own, threading.get_ident(), False

    def __getattr__(self, name: str) -> Any:
        is_ours = threading.get_ident() == self.thread and not _is_dynamos(sys._getframe(1))
        if name in ("manual_seed", "seed", "set_state") and is_ours:
            self.is_seeded = True
            raise CaptureError(_SEEDS)
        return getattr(self.own, name)


def _is_dynamos(asking: FrameType) -> bool:
    """Tell whether Dynamo sets the state, within a forward that calls it: it puts the state back
    that it has found."""
    caller = asking.f_back
    return caller is not None and caller.f_globals.get("__name__") == _DYNAMO


@contextmanager
def _no_seeding() -> Iterator[None]:
    """Raises CaptureError where the body seeds torch's generator, or sets its state."""
    functions: Any = torch.random
    own, seed = functions.default_generator, torch.initial_seed()
    stand_in = functions.default_generator = _Unseeded(own)
    try:
        yield
    finally:
        functions.default_generator = own
    if stand_in.is_seeded or torch.initial_seed() != seed:  # by the generator's own method
        raise CaptureError(_SEEDS)


def check_state(module_state: Mapping[str, Tensor | None], given: Mapping[str, Tensor]) -> None:
    """Raises CaptureError where a buffer or a weight is not the tensor that was ``given``."""
    changed = [name for name, tensor in given.items() if module_state.get(name) is not tensor]
    if changed:
        raise CaptureError(f"it replaces {', '.join(changed)}: write into it instead")


def check_constants(gm: GraphModule, module: nn.Module) -> None:
    """Raises CaptureError where a trace has taken a tensor for a constant that was there before,
    among the attributes of ``module`` or elsewhere: it is data, and nobody would see it change."""
    held = dict[int, str]()
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            for tensor in tensors_in(value) if name not in _OWN else ():
                held[tensor.untyped_storage().data_ptr()] = f"{path}.{name}" if path else name
    for node in gm.graph.find_nodes(op="get_attr"):
        constant = getattr(gm, node.target)
        if not isinstance(constant, Tensor) or not constant.numel():
            continue
        if where := held.get(constant.untyped_storage().data_ptr()):
            raise CaptureError(f"it reads tensors in {where}: register them as buffers")
        if not all(user.target in _MADE for user in node.users):
            raise CaptureError(
                f"it reads a tensor of shape {tuple(constant.shape)} that neither the module nor an"
                " argument holds: register it as a buffer, or pass it as an argument"
            )


def tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in containers and in objects that are no modules, so many levels deep."""
    if isinstance(value, Tensor):
        if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:
            yield value
    elif not depth or isinstance(value, nn.Module | type):
        return
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for item in value:
            if type(item) not in _SIMPLE:
                yield from tensors_in(item, depth - 1)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()), depth)
    elif type(value).__module__ != "builtins" and hasattr(value, "__dict__"):
        yield from tensors_in(vars(value), depth - 1)


def _settings(part: nn.Module, private: bool) -> dict[str, Any]:
    registered = (part._parameters, part._buffers, part._modules)
    return {
        name: _identity(value)
        for name, value in vars(part).items()
        if name not in _OWN and (private or not name.startswith("_"))
    } | {name: True for table in registered for name in table}  # what is there, see check_state


def _identity(value: Any) -> Any:
    """Return what is equal for the same object with the same items; they are kept, so that no other
    takes the place in memory."""
    kind = type(value)
    if kind in (list, tuple):
        return _Same(value), tuple(map(_Same, value))
    if kind is dict:
        return _Same(value), tuple((key, _Same(item)) for key, item in value.items())
    return (_Same(value),)


class _Same:
    """Compare equal to what holds the very same object."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = object.__hash__

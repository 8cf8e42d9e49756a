"""Take weights of a library's own class of tensors apart, into the plain tensors in them.

torchao and quanto quantise a weight to a tensor that holds others, codes and scales, and say with
``__tensor_flatten__`` which. diffusers' GGUF weights are tensors of bytes, with the kind of their
blocks beside them. A program reads the plain tensors, as it reads all weights, and a trace meets
the same class with traced tensors in it: what the library computes with them becomes nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from strop.errors import CaptureError
from strop.frontend.effects import tensors_in
from strop.frontend.stable_text import qualified, text_of

_USUAL = (Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True, slots=True)
class CodesInMemory:
    """Describe a class with memory of its own. ``plain`` is its method that gives the plain tensor
    in it; without one, operators take it as it is. ``states`` are attributes with objects that hold
    tensors. Whatever else it holds but for ``others`` says what the memory means."""

    plain: str = ""
    states: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


_WITH_MEMORY = {
    "diffusers.quantizers.gguf.utils.GGUFParameter": CodesInMemory("as_tensor"),
    "bitsandbytes.nn.modules.Params4bit": CodesInMemory("", ("quant_state",), ("module",)),
}


def read_codes(kind: type[Tensor], codes: CodesInMemory) -> None:
    """Have programs read the memory of a class of tensors of an extension: its module takes them
    apart. Doing so twice is the same as once."""
    _WITH_MEMORY[qualified(kind)] = codes


# What a class of tensors has for a rule for functions where it has none of its own.
_USUAL_RULES = (
    torch._C._disabled_torch_function_impl,
    getattr(Tensor.__torch_function__, "__func__", None),
)
Place = tuple[str, Any, str]  # the name of a tensor, a table and a key


GONE = object()


class Inside:
    """Look up the tensors in a composed one, as a table. Whatever ``torch.utils.swap_tensors`` or
    a library puts there is found; for what it has taken away there is ``GONE``, which is not what
    was there before."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole

    def __getitem__(self, name: str) -> Any:
        return getattr(self.whole, name, GONE)


_DATA = ("__set__", "__delete__")  # what a class has for a name that hides the object's own


def _table_of(whole: Tensor, name: str) -> Any:
    """Return a table to look up an attribute of a composed tensor: its own dictionary where that
    is what Python asks, which takes a fifth of the time. ``watched_places`` tell whether the
    dictionary is another's (``torch.utils.swap_tensors``)."""
    of_class = getattr(type(whole), name, None)
    is_own = name in vars(whole) and not any(hasattr(of_class, each) for each in _DATA)
    return vars(whole) if is_own else Inside(whole)


def _memory(t: Any) -> CodesInMemory | None:
    return _WITH_MEMORY.get(qualified(type(t)))


def _state_places(name: str, state: Any) -> Iterator[Place]:
    """Yield where an object, and those of its class in it, hold tensors."""
    inside = Inside(state)
    for key, value in vars(state).items():
        if isinstance(value, Tensor):
            yield f"{name}.{key}", inside, key
        elif type(value) is type(state):
            yield from _state_places(f"{name}.{key}", value)


def _settings(state: Any) -> Iterator[tuple[Any, str]]:
    """Yield where such objects hold what is no tensor."""
    for key, value in vars(state).items():
        if not isinstance(value, Tensor):
            yield Inside(state), key
        if type(value) is type(state):
            yield from _settings(value)


def _traced_state(state: Any, traced: Mapping[int, Tensor]) -> Any:
    """Return a copy of such an object with traced tensors in it."""
    made = copy.copy(state)
    for key, value in vars(state).items():
        if isinstance(value, Tensor):
            vars(made)[key] = traced[id(value)]
        elif type(value) is type(state):
            vars(made)[key] = _traced_state(value, traced)
    return made


class PlainLook:
    """Look up the memory of a tensor with a class of its own, as a table of one plain tensor. That
    is another one once the memory is."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole
        self._plain, self._look = _plain_of(whole), _memory_look(whole)

    def __getitem__(self, name: str) -> Tensor:
        if (look := _memory_look(self.whole)) != self._look:
            self._plain, self._look = _plain_of(self.whole), look
        return self._plain


def _plain_of(whole: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        plain = whole.detach()
    return plain if type(plain) is Tensor else plain.as_subclass(Tensor)


def _memory_look(t: Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device


def _is_of_torch(kind: type) -> bool:
    """Tell whether a class is torch's own: a DTensor lies on several devices."""
    return kind.__module__.partition(".")[0] == "torch"


def _parts_of(t: Any) -> tuple[Sequence[str], Any]:
    """Return the names of the tensors in a composed one, and what else it needs."""
    names, context = t.__tensor_flatten__()
    return names, context


def is_composed(t: Any) -> bool:
    """Tell whether a tensor is of a library's own class, of which a program can read the parts."""
    kind = type(t)
    if kind in _USUAL or not isinstance(t, Tensor) or _is_of_torch(kind):
        return False
    if (memory := _memory(t)) is not None:
        has_states = all(getattr(t, name, None) is not None for name in memory.states)
        return has_states and not _holds_tensors(_meaning(t, memory))
    if not is_traceable_wrapper_subclass(t):
        return False
    names, context = _parts_of(t)
    are_there = bool(names) and all(getattr(t, n) is getattr(t, n) for n in names)
    return are_there and not _holds_tensors(context)


def _holds_tensors(value: Any) -> bool:
    """Tell whether what is part of a program's key has tensors in it, which are data."""
    return next(tensors_in(value), None) is not None


def _meaning(t: Tensor, memory: CodesInMemory) -> dict[str, Any]:
    """Return what a tensor with memory holds beside objects with tensors."""
    left_out = {*memory.others, *memory.states}
    return {name: value for name, value in vars(t).items() if name not in left_out}


def inner_places(place: Place, looks: dict[int, PlainLook]) -> Iterator[Place]:
    """Yield where the plain tensors of a tensor are held: itself, or those in it. ``looks`` at
    memory, by the ids of tensors, stay the same from one time to the next."""
    name, table, key = place
    tensor = table[key]
    if not is_composed(tensor):
        yield place
    elif (memory := _memory(tensor)) is not None:
        if (look := looks.get(id(tensor))) is None or look.whole is not tensor:
            look = looks[id(tensor)] = PlainLook(tensor)
        yield name, look, key
        for state in memory.states:
            yield from _state_places(f"{name}.{state}", getattr(tensor, state))
    else:
        for inner in _parts_of(tensor)[0]:
            place = f"{name}.{inner}", _table_of(tensor, inner), inner
            yield from inner_places(place, looks)


def identity(place: Place) -> int:
    """Return a number for the tensor at a place, or for that whose memory it looks at."""
    _, table, key = place
    return id(table.whole if isinstance(table, PlainLook) else table[key])


def composed_in(t: Any) -> Iterator[Tensor]:
    """Yield a tensor if it is composed, and those in it that are."""
    if is_composed(t):
        yield t
        if _memory(t) is None:
            for name in _parts_of(t)[0]:
                yield from composed_in(getattr(t, name))


def watched_places(t: Tensor) -> Iterator[tuple[Any, str]]:
    """Yield where a composed tensor holds what is no tensor in it: what its codes mean."""
    for whole in composed_in(t):
        memory = _memory(whole)
        left_out = _parts_of(whole)[0] if memory is None else memory.others
        yield Inside(whole), "__dict__"
        yield from ((_table_of(whole, n), n) for n in vars(whole) if n not in left_out)
        for state in memory.states if memory else ():
            yield from _settings(getattr(whole, state))


def make_up(t: Tensor) -> str:
    """Write out what a composed tensor is but for the values in it: part of a program's key."""
    kind = type(t)
    if not is_composed(t):
        return ""
    if (memory := _memory(t)) is not None:
        held = _meaning(t, memory)
        states = [_settings(getattr(t, name)) for name in memory.states]
        means = [(key, text_of(table[key])) for found in states for table, key in found]
        return f"{qualified(kind)}{text_of(held)}{means}"
    names, context = _parts_of(t)
    looks = [(name, make_up(getattr(t, name))) for name in names]
    return f"{qualified(kind)}{looks}{text_of(context)}{tuple(t.shape)}{t.stride()}{t.dtype}"


def put_together(t: Tensor, traced: Mapping[int, Tensor]) -> Tensor:
    """Return what stands in a trace for a tensor: itself by its ``identity`` if it is plain, else
    one of its class with traced tensors in it."""
    if not is_composed(t):
        return traced[id(t)]
    if (memory := _memory(t)) is not None:
        return _standing_for(t, memory, traced)
    names, context = _parts_of(t)
    inner = {name: put_together(getattr(t, name), traced) for name in names}
    made: Tensor = type(t).__tensor_unflatten__(inner, context, t.size(), t.stride())  # type: ignore[attr-defined]
    return made


_TRACED, _MAKE_UP = "_strop_traced", "_strop_make_up"  # attributes of a stand-in
_QUESTIONS = frozenset(("__get__", "dim", "size", "numel", "is_floating_point"))


class _StandIn(Tensor):
    """Stands in a trace for a tensor of a class with memory. Code may ask what it holds and take
    the plain tensor; what the class would make of an operator on it is not known."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in (
            "__get__",
            "dim",
            "size",
            "numel",
            "is_floating_point",
        ):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", func)
        raise CaptureError(f"it computes {name} of a {cls.__name__} before it is dequantised")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise CaptureError(f"it computes {func} of a {cls.__name__} before it is dequantised")


@lru_cache(maxsize=16)
def _stand_in_class(kind: type) -> type:
    return type(kind.__name__, (_StandIn, kind), {"__module__": __name__})


def _standing_for(whole: Tensor, memory: CodesInMemory, traced: Mapping[int, Tensor]) -> Tensor:
    own = made = traced[id(whole)]
    held = {name: value for name, value in vars(whole).items() if name not in memory.others}
    states = {name: getattr(whole, name) for name in memory.states}
    held |= {name: _traced_state(state, traced) for name, state in states.items()}
    if memory.plain:
        made = Tensor._make_wrapper_subclass(
            _stand_in_class(type(whole)), own.shape, dtype=own.dtype, device=own.device
        )
        held[memory.plain] = lambda: own
    places = [place for state in states.values() for place in _state_places("", state)]
    held[_TRACED] = (own, *(traced[identity(place)] for place in places))
    held[_MAKE_UP] = make_up(whole)
    vars(made).update(held)
    return made


def traced_parts(t: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors in what stands for a tensor in a trace."""
    if _TRACED in vars(t):
        yield from vars(t)[_TRACED]
    elif is_composed(t):
        for name in _parts_of(t)[0]:
            yield from traced_parts(getattr(t, name))
    else:
        yield t


def traced_states(t: Tensor | None) -> Set[str]:
    """Return the names of attributes of what stands for a tensor in a trace that hold objects with
    tensors. A layer may have the same objects by the same names, as they were before the trace."""
    held: Mapping[str, Any] = {} if t is None else vars(t)
    return held.keys() - {_TRACED, _MAKE_UP} if _TRACED in held else frozenset()


def traced_make_up(t: Tensor) -> str:
    """Write out what a tensor is of which this one stands in a trace, if that is composed."""
    made: str | None = vars(t).get(_MAKE_UP)
    return make_up(t) if made is None else made


class ComposedCalls:
    """Leave calls on composed tensors to their classes, which compute with those inside."""

    def __init__(self) -> None:
        self._handed: list[tuple[Any, tuple[int, ...]]] = []

    def are_in(self, arguments: Iterable[Any]) -> bool:
        """Tell whether a composed tensor is among arguments, and lists of them."""
        return self._class_in(arguments) is not None

    def _class_in(self, arguments: Iterable[Any]) -> Any:
        for value in arguments:
            if isinstance(value, Tensor):
                if is_traceable_wrapper_subclass(value) and not _is_of_torch(type(value)):
                    return type(value)
            elif isinstance(value, list | tuple) and (found := self._class_in(value)):
                return found
        return None

    def run(
        self,
        mode: TorchFunctionMode,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what the class of a composed tensor among the arguments makes of a call, under
        ``mode``. A class that hands the very call on, or has a rule for operators alone, gets the
        operators."""
        kind = self._class_in((*args, *kwargs.values()))
        rule = getattr(kind, "__torch_function__", None)
        is_usual = getattr(rule, "__func__", rule) in _USUAL_RULES
        call = (func, (*map(id, args), *map(id, kwargs.values())))
        if is_usual or call in self._handed:
            return func(*args, **kwargs)
        self._handed.append(call)
        try:
            with mode:
                return kind.__torch_function__(func, types or (kind,), args, kwargs)
        finally:
            self._handed.pop()

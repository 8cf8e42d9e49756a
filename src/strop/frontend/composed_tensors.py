"""Take weights of a library's own class of tensors apart, into the plain tensors in them.

torchao and quanto quantise a weight to a tensor that holds others, codes and scales, and say with
``__tensor_flatten__`` which. diffusers' GGUF weights are tensors of bytes, with the kind of their
blocks beside them. A program reads the plain tensors, as it reads all weights, and a trace meets
the same class with traced tensors in it: what the library computes with them becomes nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from strop.errors import CaptureError
from strop.frontend.stable_text import qualified, text_of

_USUAL = (Tensor, nn.Parameter, nn.Buffer)
# Classes with memory of their own -> their method that gives the plain tensor in this memory.
# Whatever else they hold says what it means.
_WITH_MEMORY = {"diffusers.quantizers.gguf.utils.GGUFParameter": "as_tensor"}
# What a class of tensors has for a rule for functions where it has none of its own.
_USUAL_RULES = (
    torch._C._disabled_torch_function_impl,
    getattr(Tensor.__torch_function__, "__func__", None),
)
Place = tuple[str, Any, str]  # the name of a tensor, a table and a key


class Inside:
    """Look up the tensors in a composed one, as a table. Whatever ``torch.utils.swap_tensors`` or
    a library puts there is found."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole

    def __getitem__(self, name: str) -> Any:
        return getattr(self.whole, name)


class PlainLook:
    """Look up the memory of a tensor with a class of its own, as a table of one plain tensor. That
    is another one once the memory is."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole
        self._plain = _plain_of(whole)

    def __getitem__(self, name: str) -> Tensor:
        if _memory_look(self._plain) != _memory_look(self.whole):
            self._plain = _plain_of(self.whole)
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
    if qualified(kind) in _WITH_MEMORY:
        return True
    if not is_traceable_wrapper_subclass(t):
        return False
    names, _ = _parts_of(t)
    return bool(names) and all(getattr(t, n) is getattr(t, n) for n in names)


def inner_places(place: Place) -> Iterator[Place]:
    """Yield where the plain tensors of a tensor are held: itself, or those in it."""
    name, table, key = place
    tensor = table[key]
    if not is_composed(tensor):
        yield place
    elif qualified(type(tensor)) in _WITH_MEMORY:
        yield name, PlainLook(tensor), key
    else:
        inside = Inside(tensor)
        for inner in _parts_of(tensor)[0]:
            yield from inner_places((f"{name}.{inner}", inside, inner))


def identity(place: Place) -> int:
    """Return a number for the tensor at a place, or for that whose memory it looks at."""
    _, table, key = place
    return id(table.whole if isinstance(table, PlainLook) else table[key])


def composed_in(t: Any) -> Iterator[Tensor]:
    """Yield a tensor if it is composed, and those in it that are."""
    if is_composed(t):
        yield t
        if qualified(type(t)) not in _WITH_MEMORY:
            for name in _parts_of(t)[0]:
                yield from composed_in(getattr(t, name))


def watched_places(t: Tensor) -> Iterator[tuple[Any, str]]:
    """Yield where a composed tensor holds what is no tensor in it: what its codes mean."""
    for whole in composed_in(t):
        has_memory = qualified(type(whole)) in _WITH_MEMORY
        inner = () if has_memory else _parts_of(whole)[0]
        inside = Inside(whole)
        yield from ((inside, name) for name in vars(whole) if name not in inner)


def make_up(t: Tensor) -> str:
    """Write out what a composed tensor is but for the values in it: part of a program's key."""
    kind = type(t)
    if not is_composed(t):
        return ""
    if qualified(kind) in _WITH_MEMORY:
        held = {name: value for name, value in vars(t).items() if not isinstance(value, Tensor)}
        return f"{qualified(kind)}{text_of(held)}"
    names, context = _parts_of(t)
    looks = [(name, make_up(getattr(t, name))) for name in names]
    return f"{qualified(kind)}{looks}{text_of(context)}{tuple(t.shape)}{t.stride()}{t.dtype}"


def put_together(t: Tensor, traced: Mapping[int, Tensor]) -> Tensor:
    """Return what stands in a trace for a tensor: itself by its ``identity`` if it is plain, else
    one of its class with traced tensors in it."""
    if not is_composed(t):
        return traced[id(t)]
    if qualified(type(t)) in _WITH_MEMORY:
        return _standing_for(t, traced[id(t)])
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


def _standing_for(whole: Tensor, traced: Tensor) -> Tensor:
    kind = _stand_in_class(type(whole))
    made: Tensor = Tensor._make_wrapper_subclass(
        kind, traced.shape, dtype=traced.dtype, device=traced.device
    )
    vars(made).update(vars(whole))
    vars(made)[_WITH_MEMORY[qualified(type(whole))]] = lambda: traced
    vars(made)[_TRACED], vars(made)[_MAKE_UP] = traced, make_up(whole)
    return made


def traced_parts(t: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors in what stands for a tensor in a trace."""
    if isinstance(t, _StandIn):
        yield vars(t)[_TRACED]
    elif is_composed(t):
        for name in _parts_of(t)[0]:
            yield from traced_parts(getattr(t, name))
    else:
        yield t


def traced_make_up(t: Tensor) -> str:
    """Write out what a tensor is of which this one stands in a trace, if that is composed."""
    return vars(t)[_MAKE_UP] if isinstance(t, _StandIn) else make_up(t)


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

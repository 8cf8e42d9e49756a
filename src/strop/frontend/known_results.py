"""Remember what operators make of fake tensors.

A trace asks for the shape of a sum of equal operands dozens of times, and with symbolic sizes each
answer takes milliseconds. torch has a table of such answers too, but to look into it takes longer
than to work the answer out. Here a call is known by its operator, and by the sizes of its operands
as expressions: what the first one has asked about sizes are guards of the trace, and an equal call
would ask the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.experimental.sym_node import SymNode

from strop.frontend.fake_tensors import Size, fake_empty, fake_view
from strop.frontend.quick import replaced

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEVICE = torch.ops.prim.device.default
_DEPENDENT = {  # on more than the sizes of operands
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}


class _NotKnownError(Exception):
    """A call or its result cannot be remembered."""


@dataclass(frozen=True, slots=True)
class _Lying:
    """Hold how a result lies: in the memory of the operand at ``place``, or in its own."""

    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    dtype: torch.dtype
    device: torch.device
    place: int | None

    def made(self, mode: FakeTensorMode, given: _Given) -> FakeTensor:
        sizes = given.sizes
        shape = [_of_call(size, sizes) for size in self.shape]
        strides = [_of_call(size, sizes) for size in self.strides]
        if self.place is None:
            return fake_empty(mode, shape, strides, self.dtype, self.device)
        base = given.tensors[self.place]
        return fake_view(base, base, shape, strides, _of_call(self.offset, sizes))


@dataclass(slots=True)
class _Given:
    """Collect the tensors of a call, and sizes by their expressions."""

    mode: FakeTensorMode
    tensors: list[FakeTensor] = field(default_factory=list)
    sizes: dict[Any, SymInt] = field(default_factory=dict)

    def look(self, value: Any) -> Hashable:
        """Return what an operator's rules can tell apart."""
        if value is None:
            return None
        if isinstance(value, Tensor):
            return self._tensor_look(value)
        if isinstance(value, SymInt):
            return SymInt, self._expression(value)
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, list | tuple):
            return list, *map(self.look, value)
        if isinstance(value, dict):
            return dict, *((name, self.look(item)) for name, item in value.items())
        raise _NotKnownError

    def _tensor_look(self, value: Tensor) -> Hashable:
        if type(value) is not FakeTensor or value.fake_mode is not self.mode:
            raise _NotKnownError
        if value.constant is not None or value.layout != torch.strided or value.dtype.is_complex:
            raise _NotKnownError
        self.tensors.append(value)
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        return value.dtype, value.fake_device, *map(self._expression, sizes)

    def _expression(self, size: Size) -> Any:
        if not isinstance(size, SymInt):
            return size
        expression = size.node.expr
        self.sizes.setdefault(expression, size)
        return expression


class RememberingMode(FakeTensorMode):
    """Make fake tensors, and those of an equal call without torch's rules."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._known: dict[Hashable, tuple[Any, tuple[_Lying, ...]] | None] = {}
        self._may_repeat: dict[Any, bool] = {}

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        env = self.shape_env
        if env is None or not self._is_simple(func) or env._suppress_guards_tls():
            return super().dispatch(func, types, args, kwargs)
        given = _Given(self)
        try:
            looks = given.look(args), given.look(kwargs)
        except _NotKnownError:
            return super().dispatch(func, types, args, kwargs)
        key = func, looks, torch.get_default_dtype()
        if (known := self._known.get(key)) is not None:
            kind, results = known
            made = [lying.made(self, given) for lying in results]
            return made[0] if kind is None else kind(made)
        found = super().dispatch(func, types, args, kwargs)
        if key not in self._known:
            self._known[key] = _noted(found, given.tensors)
        return found

    def _is_simple(self, func: Any) -> bool:
        if func not in self._may_repeat:
            self._may_repeat[func] = (
                isinstance(func, OpOverload)
                and func.namespace in ("aten", "prims")
                and not func._schema.is_mutable
                and _DEPENDENT.isdisjoint(func.tags)
                and func not in self.lift_fns
            )
        return self._may_repeat[func]


@contextmanager
def quick_devices() -> Iterator[None]:
    """Tell autograd at once on which device a fake tensor is. It asks at each step of its own, and
    each question went through both modes of the trace."""

    def replacement(usual: Callable[..., Any]) -> Callable[..., Any]:
        def dispatch(
            self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:  # as torch declares it
            if func is _DEVICE and type(args[0]) is FakeTensor:
                return args[0].device
            return usual(self, func, types, args, kwargs)

        return dispatch

    with replaced(ProxyTorchDispatchMode, "__torch_dispatch__", replacement):
        yield


def _of_call(size: Size, sizes: dict[Any, SymInt]) -> Size:
    """Return an equal size of this call's operands, or else a new one. The tracer knows a size by
    the first tensor that has it: a size of the earlier call would keep a tensor of that alive."""
    if not isinstance(size, SymInt):
        return size
    node = size.node
    if (found := sizes.get(node.expr)) is None:
        own = SymNode(node.expr, node.shape_env, int, node.hint, fx_node=node.fx_node)
        found = sizes[node.expr] = SymInt(own)
    return found


def _noted(found: Any, tensors: Sequence[FakeTensor]) -> tuple[Any, tuple[_Lying, ...]] | None:
    """Return how results lie, and what holds them; None where another call's may lie otherwise."""
    kind = type(found) if isinstance(found, list | tuple) else None
    results = [found] if kind is None else list(found)
    if not all(type(result) is FakeTensor and result.constant is None for result in results):
        return None
    given = [tensor.untyped_storage()._cdata for tensor in tensors]
    own = [result.untyped_storage()._cdata for result in results]
    is_shared = not set(own).isdisjoint(given)
    if len(set(own)) < len(own) or (is_shared and len(given) > 1):
        return None
    if is_shared and (found is tensors[0] or results[0].dtype != tensors[0].dtype):
        return None
    return kind, tuple(
        _Lying(
            tuple(result.shape),
            result.stride(),
            result.storage_offset(),
            result.dtype,
            result.fake_device,
            0 if is_shared else None,
        )
        for result in results
    )

"""Calls of torch's operators, with tensors where a graph's arguments name them.

An opaque node runs one of these: ``aten`` takes the node's evaluated attributes and returns a
function of its input tensors. What an operator draws comes from ``drawing_by``'s generators.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from strop.errors import ShapeError, UnsupportedError
from strop.ir.graph import GeneratorRef, Ref
from strop.ir.overloads import overload_of
from strop.runtime.run.cpu_convolutions import convolve

Call = Callable[[Sequence[Tensor]], Any]
Getter = Callable[[], Tensor]

_given = threading.local()


@contextmanager
def drawing_by(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Let the call that runs meanwhile, in this thread, draw from these generators."""
    before = getattr(_given, "generators", ())
    _given.generators = generators
    try:
        yield
    finally:
        _given.generators = before


# What does a call of torch's on a CPU. Functions of torch take their arguments in less time than
# its operators do: an LSTM's 20 tensors in 7 us less.
_ON_CPU: Mapping[str, Callable[..., Any]] = {
    "aten.convolution.default": convolve,
    "aten.lstm.input": torch._VF.lstm,
    "aten.gru.input": torch._VF.gru,
}


def aten_on_cpu(attrs: Mapping[str, Any]) -> Call:
    return aten(attrs, _ON_CPU.get(attrs["target"]))


def with_arguments(run: Callable[..., Any], attrs: Mapping[str, Any]) -> Call:
    """Return what calls an operator with inputs where its arguments name them."""
    names, values = tuple(n for n, _ in attrs["kwargs"]), _filling([v for _, v in attrs["kwargs"]])
    filled = _filling(attrs["args"])
    return lambda inputs: run(*filled(inputs), **dict(zip(names, values(inputs), strict=True)))


def aten(attrs: Mapping[str, Any], instead: Callable[..., Any] | None = None) -> Call:
    """Call an operator, or what does the same ``instead``."""
    target = overload(attrs["target"])
    run = with_arguments(instead or target, attrs)
    outputs, is_single = attrs["outputs"], attrs.get("single", True)
    if target in _KEEPING:
        outputs = (outputs[0], *[None] * len(outputs[1:]))

    def call(inputs: Sequence[Tensor]) -> Any:
        made = run(inputs)
        if is_single:
            return _as_traced(target, made, outputs[0])
        return [_as_traced(target, *one) for one in zip(made, outputs, strict=False)]

    # a view of the arena would not outlive its operand
    return _copied(call) if _returns_view(target) else call


# What these keep for their gradient, which alone reads it, is as long as that needs it: empty, or a
# number longer than torch's shape rule says, where offsets have the end of the last bag.
_KEEPING = {
    torch.ops.aten._embedding_bag.default,
    torch.ops.aten._embedding_bag_forward_only.default,
}


def _as_traced(target: Any, value: Any, traced: tuple[tuple[int, ...], torch.dtype] | None) -> Any:
    """Return a result as the plan takes it to be. Torch's shape rules are not always right: that of
    ``_native_batch_norm_legit`` says fp32 for running statistics of any type. Raises ShapeError
    where the sizes differ."""
    if traced is None or value is None:
        return value
    shape, dtype = traced
    if value.shape != shape and math.prod(shape):  # of an empty one nothing is read
        raise ShapeError(
            f"{target} gives {tuple(value.shape)}, and torch's shape rule says {shape}"
        )
    return value if value.dtype is dtype else value.to(dtype)


def _filling(template: Sequence[Any]) -> Callable[[Sequence[Tensor]], list[Any]]:
    """Return what puts inputs where arguments name them. None of it is a function within the call:
    one that names itself is a cycle, and would keep the inputs, activations of a whole step, until
    garbage is collected."""
    fixed = [None if _is_given(arg) else _listed(arg) for arg in template]
    given = [(place, _giving(arg)) for place, arg in enumerate(template) if _is_given(arg)]

    def fill(inputs: Sequence[Tensor]) -> list[Any]:
        args = fixed.copy()
        for place, give in given:
            args[place] = give(inputs)
        return args

    return fill


def _is_given(arg: Any) -> bool:
    if isinstance(arg, tuple):
        return any(map(_is_given, arg))
    return isinstance(arg, Ref | GeneratorRef)


def _listed(arg: Any) -> Any:
    return [_listed(a) for a in arg] if isinstance(arg, tuple) else arg


def _giving(arg: Any) -> Callable[[Sequence[Tensor]], Any]:
    if isinstance(arg, Ref):
        return itemgetter(arg.index)
    if isinstance(arg, GeneratorRef):
        index = arg.index
        return lambda inputs: _given.generators[index]
    return _filling(arg)


def overload(target: str) -> Callable[..., Any]:
    """Return the OpOverload of a name such as "aten.embedding.default". Raises UnsupportedError
    where this torch has none."""
    found: Callable[..., Any] | None = overload_of(target)
    if found is None:
        raise UnsupportedError(f"this torch ({torch.__version__}) has no operator {target}")
    return found


# Results of these lie in their operand, and their schemas do not say so. No other operator's of
# torch's tables do (tests/operators/test_aliases.py).
UNSAID = {
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
    torch.ops.aten._unsafe_view.default,
}


def _returns_view(target: Any) -> bool:
    if target in UNSAID:
        return True
    schema = target._schema
    return any(r.alias_info is not None for r in schema.returns)


def in_own_memory(target: str, getters: list[Getter], is_given: Sequence[bool]) -> list[Getter]:
    """Return the getters of an operator's tensors. as_strided and its like count from where the
    memory of a tensor begins, which is the arena's: they get copies, except of what a caller has
    given."""
    schema = overload(target)._schema  # type: ignore[attr-defined]
    if not any(argument.name == "storage_offset" for argument in schema.arguments):
        return getters
    return [
        get if own else (lambda get=get: get().clone())  # type: ignore[misc]
        for get, own in zip(getters, is_given, strict=True)
    ]


def _copied(call: Callable[[Sequence[Tensor]], Any]) -> Callable[[Sequence[Tensor]], Any]:
    def run(inputs: Sequence[Tensor]) -> Any:
        made = call(inputs)
        return made.clone() if isinstance(made, Tensor) else tuple(m.clone() for m in made)

    return run

"""Torch's own samples of an operator: ``torch.testing``'s OpInfo, its arguments, their layouts.

A case is an operator, a type of elements and the layouts of the arguments. One compile covers all
of its samples, in one function, whose text ``function_of`` writes.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.operators.of_torch import OpInfo, SampleInput, invocations, op_db

LAYOUTS = ("contiguous", "channels_last", "sliced")
EVERY = "every"  # samples in all of these layouts
# Those that models use come first: a run that is cut short has done what matters.
DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("float32", "int64", "bool", "bfloat16", "float16", "float64", "uint8", "int32"),
        *("complex64", "int8", "int16", "complex128", "complex32", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
)
COMMON = DTYPES[:5]  # in these, twice as many samples are taken
WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


def _without_seed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


# The table's functions of operators that draw numbers seed torch's generator at each call, which
# no program does. Here the sweep seeds it before each run.
invocations.wrapper_set_seed = _without_seed


@functools.cache
def operators() -> dict[str, OpInfo]:
    """By name and, after a dot, variant."""
    return {
        f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db
    }


@dataclass(frozen=True)
class Case:
    """What one compile covers."""

    operator: str
    dtype: torch.dtype
    layout: str


class Slot:
    """Stands for a tensor among the arguments of a sample."""


@dataclass(frozen=True)
class Sample:
    """One call. ``args`` and ``kwargs`` have ``Slot`` where a tensor goes, in order."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Tensor, ...]
    layout: str = "contiguous"

    def __call__(self, *tensors: Tensor) -> Any:
        given = iter(tensors)
        args = _filled(self.args, given)
        return self.function(*args, **_filled(self.kwargs, given))

    def widened(self) -> Sample:
        """The same call in fp64."""
        args, kwargs = (_mapped(x, _widened) for x in (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs, tensors=tuple(map(_widened, self.tensors)))


def sample_of(function: Callable[..., Any], given: SampleInput) -> Sample:
    tensors: list[Tensor] = []

    def slot(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value.detach())
        return Slot

    args = _mapped((given.input, *given.args), slot)
    return Sample(function, args, _mapped(dict(given.kwargs), slot), tuple(tensors))


def samples_of(case: Case, most: int) -> list[Sample]:
    """At most ``most`` of torch's samples, spread evenly, in the layouts of the case; those that a
    layout leaves alone are left out, as the contiguous ones have them."""
    layouts = LAYOUTS if case.layout == EVERY else (case.layout,)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    op = operators()[case.operator]
    given = [sample_of(op.op, s) for s in op.sample_inputs("cpu", case.dtype)]
    found: list[Sample] = []
    for layout in layouts:
        laid = [laid_out(sample, layout) for sample in given]
        left = [sample for sample in laid if sample is not None]
        found += _spread(left, max(1, most // len(layouts)))
    return found


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(most - 1, 1))] for i in range(most)]


def laid_out(sample: Sample, layout: str) -> Sample | None:
    """The sample with its tensors in that layout; None where this changes nothing."""
    if layout == "contiguous":
        return sample
    tensors = tuple(map(_LAYING[layout], sample.tensors))
    if all(a is b for a, b in zip(tensors, sample.tensors, strict=True)):
        return None
    return replace(sample, tensors=tensors, layout=layout)


def in_channels_last(t: Tensor) -> Tensor:
    """Dim 1 last in memory, of three dims and more."""
    if not is_plain(t) or t.dim() < 3 or not t.numel():
        return t
    laid = t.movedim(1, -1).contiguous().movedim(-1, 1)
    return t if laid.stride() == t.stride() else laid


def sliced(t: Tensor) -> Tensor:
    """Every second element, from the second on, of a tensor twice as wide."""
    if not is_plain(t) or not t.dim() or not t.numel():
        return t
    wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1] + 1, dtype=t.dtype)
    wide[..., 1::2] = t
    return wide[..., 1::2]


_LAYING = {"channels_last": in_channels_last, "sliced": sliced}


def is_plain(t: Tensor) -> bool:
    """Whether it is an array of numbers in memory, and no view that conjugates or negates."""
    is_array = type(t) is Tensor and t.layout is torch.strided and not t.is_nested
    return is_array and not (t.is_quantized or t.is_conj() or t.is_neg())


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies that lie in memory as these do, and share it as these do."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(t: Tensor) -> Tensor:
        if not is_plain(t) or t.device.type != "cpu":
            return t.detach().clone()
        storage = t.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        fresh = torch.empty(0, dtype=t.dtype)
        return fresh.set_(storages[storage._cdata], t.storage_offset(), t.size(), t.stride())

    return [copy(t) for t in tensors]


NUDGED = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def nudged(sample: Sample, seed: int) -> Sample:
    """The sample with each number moved by about one unit of its last place, up or down."""
    tensors, draw = copies(sample.tensors), torch.Generator().manual_seed(seed)
    for t in tensors:
        if is_plain(t) and t.dtype in NUDGED:
            ways = 2 * torch.randint(2, t.shape, generator=draw).to(t.dtype) - 1
            t.mul_(1 + ways * torch.finfo(t.dtype).eps)
    return replace(sample, tensors=tuple(tensors))


def function_of(samples: Sequence[Sample], *first: str) -> Callable[..., list[Any]]:
    """All samples as one function of all their tensors, with a list of their results. Constants
    are written out, as in a user's code: looking them up takes Dynamo longer than all else.
    ``first``: names of arguments before the tensors."""
    names: dict[str, Any] = {"torch": torch}
    number = iter(range(sum(len(s.tensors) for s in samples)))
    calls = [f"        {_call_text(s, i, number, names)}," for i, s in enumerate(samples)]
    arguments = [*first, *(f"t{i}" for i in range(sum(len(s.tensors) for s in samples)))]
    header = f"def forward({', '.join(arguments)}):"
    text = "\n".join([header, "    return [", *calls, "    ]"])
    exec(compile(text, "<samples>", "exec"), names)
    made: Callable[..., list[Any]] = names["forward"]
    return made


def _call_text(sample: Sample, place: int, number: Iterator[int], names: dict[str, Any]) -> str:
    """``names`` gets what cannot be written out."""

    def text(value: Any) -> str:
        if value is Slot:
            return f"t{next(number)}"
        if type(value) in (list, tuple):
            items = "".join(f"{text(v)}, " for v in value)
            return f"[{items}]" if type(value) is list else f"({items})"
        if _is_literal(value):
            return repr(value)
        name = f"constant{len(names)}"
        names[name] = value
        return name

    function = f"function{place}"
    names[function] = sample.function
    parts = [text(v) for v in sample.args]
    parts += [f"{k}={text(v)}" for k, v in sample.kwargs.items()]
    return f"{function}({', '.join(parts)})"


def _is_literal(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str, torch.dtype, torch.memory_format)


def described(sample: Sample) -> str:
    """The arguments in one line, as a user would write them, tensors by type, sizes and strides."""
    tensors = iter(sample.tensors)

    def text(value: Any) -> str:
        if value is Slot:
            return _tensor_text(next(tensors))
        if type(value) in (list, tuple):
            return f"[{', '.join(map(text, value))}]"
        return getattr(value, "__name__", None) or repr(value)[:60]

    parts = [text(v) for v in sample.args]
    return ", ".join([*parts, *(f"{k}={text(v)}" for k, v in sample.kwargs.items())])


def _tensor_text(t: Tensor) -> str:
    name = str(t.dtype).removeprefix("torch.")
    strides = "" if not is_plain(t) or t.is_contiguous() else f" strides {list(t.stride())}"
    return f"{name}{list(t.shape)}{strides}" if not t.is_nested else f"nested {name}"


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(WIDER.get(value.dtype, value.dtype))
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    return _mapped(value, lambda leaf: next(tensors) if leaf is Slot else leaf)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with its leaves changed, in order; lists, tuples and dicts are no leaves."""
    if type(value) in (list, tuple):
        return type(value)(_mapped(v, change) for v in value)
    if type(value) is dict:
        return {k: _mapped(v, change) for k, v in value.items()}
    return change(value)

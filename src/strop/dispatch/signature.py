"""Describe how a call looks: its tensors, everything else as a hashable skeleton, and its symbolic
sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from strop.errors import ShapeError, UnsupportedError
from strop.frontend.draws import stand_in
from strop.frontend.objects import (
    attributes_of,
    class_named,
    is_cache,
    is_cache_class,
    is_record,
    is_registered,
    made,
    made_record,
    made_registered,
    made_shape,
    parts_of,
)
from strop.frontend.python_classes import mark_parameter
from strop.frontend.stable_text import qualified
from strop.ir.dims import symbol
from strop.ir.graph import GeneratorRef, Ref
from strop.ir.program import Guard
from strop.ir.tensor_spec import TensorSpec
from strop.wording import counted

# nested tuples of ("list"|"tuple"|"dict"|..., ...), Ref for a tensor, numbers as (type name, text):
# 1, 1.0 and True are equal keys but other programs
Skeleton = Any
_OF_CLASSES = frozenset(
    ("class", "member", "named tuple", "record", "dataclass", "object", "registered")
)
NUM_ARGUMENTS = 3  # its items that are the arguments: "tuple", by place, by name
_NO_ITEMS = ("dict",)
_NUMBERS: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: text == "True",
    "int": int,
    "float": float.fromhex,
    "float64": np.float64.fromhex,
}


@dataclass(frozen=True, slots=True)
class ParameterRef(Ref):
    """Stands for a tensor that is a Parameter, which code may ask for."""


@dataclass(frozen=True, slots=True)
class NumberRef:
    """Stands for a float in a skeleton: as ``flatten`` leaves it, the float number ``index`` of the
    call; in what ``rebuild`` takes, the item ``index`` of the call's tensors and numbers."""

    index: int


@dataclass(frozen=True, slots=True)
class SizeRef:
    """Stands for a whole number that is the first size of the tensor ``index`` of a call."""

    index: int


@dataclass(frozen=True, slots=True)
class Shapes:
    """Symbolic sizes for the tensors of a call. ``is_ragged`` graphs are built in background.

    ``hints`` only steer the cost model, unless ``is_exact``: then they decide what is traced.
    """

    specs: tuple[TensorSpec, ...]
    hints: Mapping[str, int]
    is_ragged: bool = False
    is_exact: bool = False
    otherwise: Shapes | None = None  # to be tried where a trace with these fails


def placed(shapes: Shapes, device: torch.device) -> Shapes:
    """Return the same sizes, of tensors on another device."""
    specs = tuple(replace(spec, device=device) for spec in shapes.specs)
    return replace(
        shapes, specs=specs, otherwise=shapes.otherwise and placed(shapes.otherwise, device)
    )


@dataclass(slots=True)
class Beside:
    """Hold what else a call has among its arguments: floats, and generators of random numbers."""

    floats: list[float] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    num_settings: int = 0  # of the floats, the last ones: those of settings, which are inputs
    num_wholes: int = 0  # whole numbers that were met
    num_sizes: int = 0  # of the tensors, the last ones: they stand for whole numbers
    lora_scale: float = 1.0  # of all adapters, in this call


def flatten(value: Any, tensors: list[Tensor], beside: Beside | None = None) -> Skeleton:
    """The skeleton of a call's arguments; tensors are appended in order of appearance, and so are
    those ``beside``, where they are wanted. Without, floats are part of the skeleton.

    Every call comes through here: what calls are made of is asked for first.
    """
    kind = type(value)
    if kind is tuple:
        return ("tuple", *[flatten(v, tensors, beside) for v in value])
    if kind is dict and not value:
        return _NO_ITEMS
    if isinstance(value, Tensor):
        if (kind is not Tensor and kind is not Parameter) or is_foreign(value):
            raise UnsupportedError(f"argument is {described(value)}")
        tensors.append(value)
        return (ParameterRef if kind is Parameter else Ref)(len(tensors) - 1)
    if value is None or kind is str or isinstance(value, torch.dtype | torch.device):
        return value
    if kind in _EXACT:  # code may ask of which class a number is
        return number_text(value) if beside is None else _flatten_number(value, kind, beside)
    if kind in (list, torch.Size):
        return ("list" if kind is list else "shape", *[flatten(v, tensors, beside) for v in value])
    if kind is dict and set(map(type, value)) <= {str, int}:  # in their order, as code may use it
        return ("dict", *[(k, flatten(v, tensors, beside)) for k, v in value.items()])
    return _flatten_object(value, kind, tensors, beside)


def _flatten_number(value: int | float, kind: type, beside: Beside) -> Skeleton:
    if kind is float:
        beside.floats.append(value)
        return NumberRef(len(beside.floats) - 1)
    beside.num_wholes += kind is int
    return number_text(value)


_EXACT = frozenset((bool, int, float, np.float64))
_TRACING_MODES = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


def is_looked_into() -> bool:
    """Tell whether torch.compile, torch.export, torch.jit.trace, forward-mode AD or a transform
    such as vmap wants the operators. A dispatch mode of a user's own sees what is run."""
    return (
        torch.compiler.is_dynamo_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or (
            torch._C._len_torch_dispatch_stack() > 0
            and any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING_MODES)
        )
    )


def is_foreign(t: Tensor) -> bool:
    """Tell whether a tensor has no strided elements that a kernel could read."""
    return t.layout is not torch.strided or t.is_nested or t.is_quantized


# What is known of classes of tensors whose modules run in eager.
_REASONS = {
    "bitsandbytes.nn.modules.Int8Params": "which is compiled as the weight of a Linear8bitLt that"
    " holds int8 (has_fp16_weights=False) and its scales on one device",
}


def described(t: Tensor) -> str:
    """Say what is unusual about a tensor."""
    if type(t) not in (Tensor, Parameter):
        why = _REASONS.get(qualified(type(t)), "a class of tensors of its own")
        return f"a {type(t).__name__}, {why}"
    if t.is_nested:
        return "a nested tensor"
    return f"a tensor of type {t.dtype}" if t.is_quantized else f"a tensor of layout {t.layout}"


def _flatten_object(
    value: Any, kind: type, tensors: list[Tensor], beside: Beside | None
) -> Skeleton:
    if isinstance(value, Enum):
        return _flatten_member(value, kind)
    if isinstance(value, tuple) and hasattr(kind, "_fields") and not getattr(value, "__dict__", {}):
        return ("named tuple", kind, *[flatten(v, tensors, beside) for v in value])
    if is_record(value):
        held = attributes_of(value).items()
        return ("record", kind, *[(name, flatten(v, tensors, beside)) for name, v in held])
    if is_dataclass(kind) and all(f.init for f in fields(kind)):  # a dict, too
        names = [f.name for f in fields(kind)]
        return (
            "dataclass",
            kind,
            *[(n, flatten(getattr(value, n), tensors, beside)) for n in names],
        )
    if is_cache(value):
        state = vars(value).items()
        return (
            "object",
            kind.__name__,
            *[(name, flatten(v, tensors, beside)) for name, v in state],
        )
    if is_cache_class(value):
        return ("class", value.__name__)
    if isinstance(value, torch.Generator) and beside is not None:
        known = [n for n, other in enumerate(beside.generators) if other is value]
        if not known:
            beside.generators.append(value)
        number = known[0] if known else len(beside.generators) - 1
        return ("generator", GeneratorRef(number), value.device)
    return _flatten_registered(value, kind, tensors, beside)


def _flatten_registered(
    value: Any, kind: type, tensors: list[Tensor], beside: Beside | None
) -> Skeleton:
    if not is_registered(kind):
        raise UnsupportedError(f"argument of type {kind.__name__}")
    parts, context = parts_of(value)
    among = list[Tensor]()
    known = flatten(context, among)
    if among:
        raise UnsupportedError(f"argument of type {kind.__name__}, whose context has tensors")
    return ("registered", kind, known, *[flatten(v, tensors, beside) for v in parts])


def _flatten_member(value: Enum, kind: type) -> Skeleton:
    raw: Any = value.value
    if kind.__dict__["_member_map_"].get(value.name) is not value or type(raw) not in (
        *_EXACT,
        str,
    ):
        raise UnsupportedError(f"argument of type {kind.__name__}")
    # its class by name too: a key on disk has the text of all this, which leaves the module out
    return (
        "member",
        kind,
        value.name,
        qualified(kind),
        raw if type(raw) is str else number_text(raw),
    )


def number_text(value: int | float) -> tuple[str, str]:
    if isinstance(value, float):  # -0.0 is not 0.0, and NaN equals itself
        return ("float64" if type(value) is np.float64 else "float", value.hex())
    return ("bool", str(value)) if isinstance(value, bool) else ("int", str(int(value)))


def with_floats(skeleton: Skeleton, floats: Sequence[Skeleton]) -> Skeleton:
    """``skeleton`` with these parts where ``flatten`` has left floats out."""
    if isinstance(skeleton, NumberRef):
        return floats[skeleton.index]
    if not isinstance(skeleton, tuple):
        return skeleton
    return tuple(with_floats(part, floats) for part in skeleton)


def _referred(ref: Ref | NumberRef | SizeRef, value: Any) -> Any:
    if type(ref) is ParameterRef:
        mark_parameter(value)
    return value.shape[0] if type(ref) is SizeRef else value


def rebuild(skeleton: Skeleton, tensors: Sequence[Any]) -> Any:
    """Undo ``flatten``. ``tensors`` are followed by the numbers that are inputs."""
    if isinstance(skeleton, Ref | NumberRef | SizeRef):
        return _referred(skeleton, tensors[skeleton.index])
    if not isinstance(skeleton, tuple):
        return skeleton
    kind, *items = skeleton
    if kind in _NUMBERS:
        return _NUMBERS[kind](items[0])
    if kind == "generator":
        return stand_in(*items)
    if kind == "dict":
        return {key: rebuild(value, tensors) for key, value in items}
    if kind in _OF_CLASSES:
        return _of_class(kind, items, tensors)
    parts = [rebuild(item, tensors) for item in items]
    if kind == "shape":
        return made_shape(parts)
    return tuple(parts) if kind == "tuple" else parts


def _of_class(kind: str, items: list[Any], tensors: Sequence[Any]) -> Any:
    """Rebuild what has a class of its own, which is the first of these."""
    own, *held = items
    if kind == "class":
        return class_named(own)
    if kind == "member":
        return own.__dict__["_member_map_"][held[0]]
    if kind == "registered":
        context, *parts = (rebuild(item, tensors) for item in held)
        return made_registered(own, parts, context)
    if kind == "named tuple":
        return tuple.__new__(own, [rebuild(item, tensors) for item in held])
    attributes = {name: rebuild(value, tensors) for name, value in held}
    if kind == "record":
        return made_record(own, attributes)
    return own(**attributes) if kind == "dataclass" else made(own, attributes)


def count_numbers(skeleton: Skeleton) -> int:
    """Count how many floats of a call are inputs."""
    if isinstance(skeleton, tuple):
        return sum(map(count_numbers, skeleton))
    return int(isinstance(skeleton, NumberRef))


def without_numbers(skeleton: Skeleton) -> Skeleton:
    """Return what calls have in common that differ in whole numbers and floats alone."""
    if isinstance(skeleton, NumberRef):
        return ("float",)
    if isinstance(skeleton, SizeRef):
        return ("int",)
    if not isinstance(skeleton, tuple):
        return skeleton
    is_number = len(skeleton) == 2 and skeleton[0] in ("int", "float", "float64")
    return skeleton[:1] if is_number else tuple(map(without_numbers, skeleton))


def tensor_numbers(skeleton: Skeleton) -> Iterator[int]:
    """Return which tensors of a call are in this part of it."""
    if isinstance(skeleton, Ref):
        yield skeleton.index
    elif isinstance(skeleton, tuple):
        for item in skeleton:
            yield from tensor_numbers(item)


def default_shapes(tensors: Sequence[Tensor]) -> Shapes:
    """Batch, sequence and image sizes are symbolic, features are not.

    That is: dim 0 of everything (one root "b" when all agree), dims 2 and on of 4-d tensors, the
    others of 5-d and 3-d tensors and of matrices: (batch, tokens, features), (batch, channels,
    time), or (batch, frames, channels, height, width) in either order. Features and channels among
    them are fixed by the trace. A size 0 is none: what a graph for other sizes takes for granted
    need not hold of it. Nor is a size 1, to which others may be broadcast. But if the first tensor
    begins with one, those that do are taken to be batches of one, and a video may have one frame;
    for others only where such a trace fails.
    """
    first = [t.shape[0] for t in tensors if t.dim()]
    batch = "b" if len({*first}) == 1 else ""
    batch_of_one = "b" if first and first[0] == 1 and not batch else ""
    video, usual = _video(tensors), _shapes(tensors, batch)
    if not batch_of_one and (video is None or 1 not in tensors[video].shape[1:]):
        return usual
    return replace(_shapes(tensors, batch, batch_of_one, video), otherwise=usual)


def _video(tensors: Sequence[Tensor]) -> int | None:
    """Return the number of the only tensor of five dims, beside a prompt or a timestep. A decoder
    that is given frame after frame has nothing beside it, or a cache of frames, and code of its own
    for one frame."""
    found = [number for number, t in enumerate(tensors) if t.dim() == 5]
    return found[0] if len(found) == 1 and len(tensors) > 1 else None


def _shapes(
    tensors: Sequence[Tensor], batch: str, batch_of_one: str = "", video: int | None = None
) -> Shapes:
    """Name the sizes. ``batch`` is the root of all first sizes, ``batch_of_one`` that of those that
    are 1. Without a name, each has a root of its own, and a size 1 has none, but for those of the
    tensor ``video``."""
    hints: dict[str, int] = {}
    specs = []
    for number, t in enumerate(tensors):
        sizes = [str(size) for size in t.shape]
        for dim in symbolic_dims(t):
            shared = "" if dim else batch or (batch_of_one if t.shape[0] == 1 else "")
            is_named = bool(shared) or (number == video and dim > 0)
            if t.shape[dim] == 0 or (t.shape[dim] == 1 and not is_named):
                continue
            name = shared or (f"d{number}_{dim}" if dim else f"b{number}")
            hints[name] = max(int(t.shape[dim]), 2)
            sizes[dim] = name
        specs.append(TensorSpec(tuple(sizes), t.dtype, t.device, memory_order(t)))
    return Shapes(tuple(specs), hints)


_CHANNELS_LAST = (0, 2, 3, 1)


def memory_order(t: Tensor) -> tuple[int, ...] | None:
    """The dims of a tensor in memory, outermost first; None where that is their own order.

    The graph reads a tensor in this order, gaps aside, and its results have eager's strides. What
    an expanded dim or a size of 1 has for a stride says nothing: such a dim stays before the next,
    and the first one outermost.
    """
    if t.is_contiguous():
        return None
    if t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last):
        return _CHANNELS_LAST
    sizes, strides = t.shape, t.stride()
    walked = [d for d in range(t.dim()) if sizes[d] > 1 and strides[d]]
    order = sorted(walked, key=lambda d: -strides[d])
    if order == walked:
        return None
    for d in reversed(range(t.dim())):
        if d not in order:
            after = order.index(d + 1) if d + 1 < t.dim() else len(order)
            order.insert(after if d else 0, d)
    return tuple(order)


def symbolic_dims(t: Tensor) -> tuple[int, ...]:
    """Return which dims are sizes as a rule, see ``default_shapes``."""
    if t.dim() == 4:
        return (0, 2, 3)
    if t.dim() in (2, 3, 5):
        return tuple(range(t.dim()))
    return (0,) if t.dim() else ()


def served_sizes(
    specs: Sequence[TensorSpec], guards: Sequence[Guard], shapes: Sequence[Sequence[int]]
) -> dict[str, int] | None:
    """Values of the roots; None for arguments that a graph with these guards does not serve."""
    try:
        env = solve_roots(specs, shapes)
    except ShapeError:
        return None
    is_positive = all(size > 0 for size in env.values())  # guards were made for such sizes
    return env if is_positive and all(guard.holds(env) for guard in guards) else None


def solve_roots(specs: Sequence[TensorSpec], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Values of the roots for these shapes; ShapeError when they do not fit the specs."""
    env: dict[str, int] = {}
    for number, (spec, shape) in enumerate(zip(specs, shapes, strict=True)):
        if len(spec.shape) != len(shape):
            dims = counted(len(shape), "dim")
            raise ShapeError(f"argument {number} has {dims}, expected {spec.shape}")
        for size, actual in zip(spec.sizes, shape, strict=True):
            if len(size.roots) == 1:
                (name,) = size.roots
                if size == size.divisor * symbol(name):
                    env.setdefault(name, actual // size.divisor)
    for number, (spec, shape) in enumerate(zip(specs, shapes, strict=True)):
        if any(s.eval(env) != n for s, n in zip(spec.sizes, shape, strict=True)):
            raise ShapeError(f"argument {number} is {tuple(shape)}, expected {spec.shape}")
    return env

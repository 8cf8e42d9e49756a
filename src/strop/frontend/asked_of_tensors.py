"""Know what a forward may ask of a tensor that a trace cannot tell it.

A traced tensor has a shape, a type and a device. It has no memory of its own, no history and no
gradient, and its answer would be that of the trace, whatever the next call is given. Nor would
another tracer know better: such a forward runs in eager.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from strop.errors import EagerOnlyError
from strop.frontend.numbers import is_asked_by_torch
from strop.frontend.python_classes import attribute_as_in_eager

_BASE = vars(torch._C.TensorBase)
# What no traced tensor can tell, whoever asks.
_UNKNOWN: dict[Callable[..., Any], str] = {
    Tensor.untyped_storage: "untyped_storage",
    Tensor.storage: "storage",
    Tensor.is_set_to: "is_set_to",
    Tensor._is_view: "_is_view",
    _BASE["_base"].__get__: "_base",
    Tensor.is_shared: "is_shared",
}
# What torch's own code asks for in a trace, and gets what it needs.
_UNKNOWN_TO_CODE: dict[Callable[..., Any], str] = {
    _BASE["_version"].__get__: "_version",
    _BASE["grad"].__get__: "grad (which backward() leaves)",
    Tensor.is_inference: "is_inference",
    Tensor.is_pinned: "is_pinned",
}
# What depends on who requires a gradient. Only the first is known of the arguments of a step.
_OF_GRADIENTS: dict[Callable[..., Any], str] = {
    _BASE[name].__get__: name for name in ("requires_grad", "is_leaf", "grad_fn")
}
_OF_HISTORY = {func: name for func, name in _OF_GRADIENTS.items() if name != "requires_grad"}
_METHODS = (
    __file__,
    torch._tensor.__file__,
    torch.overrides.__file__,
)  # some methods of tensors are written in Python
_ON_THE_WAY = ("__torch_function__", attribute_as_in_eager.__name__)
_TRACERS = (str(Path(torch.fx.__file__).parent), str(Path(__file__).parent))


def refuse_unknown(func: Callable[..., Any]) -> None:
    """Raises EagerOnlyError for a question that no trace can answer. Only for a mode's
    ``__torch_function__`` itself: who asks is found by the callers in between."""
    if func in _UNKNOWN:
        _refuse(_UNKNOWN[func])
    if func in _UNKNOWN_TO_CODE and _is_asked_by_code():
        _refuse(_UNKNOWN_TO_CODE[func])


def refuse_unknown_of_step(func: Callable[..., Any]) -> None:
    """Raises EagerOnlyError for a question that the trace of a training step cannot answer."""
    name = _UNKNOWN.get(func) or _UNKNOWN_TO_CODE.get(func) or _OF_HISTORY.get(func)
    if name and _is_asked_by_code():  # checkpoints of torch's ask for storages
        _refuse(name)


def asks_who_requires(func: Callable[..., Any]) -> bool:
    """Tell whether a module's code asks for what depends on which tensors require a gradient."""
    return func in _OF_GRADIENTS and _is_asked_by_code()


def attributes_of(values: Iterable[Any]) -> Set[str]:
    """Return the attributes that any of these tensors has. torch puts some on each."""
    return set().union(*(vars(value) for value in values if isinstance(value, Tensor)))


def refuse_attributes(values: Iterable[Any], before: Set[str]) -> None:
    """Raises EagerOnlyError where a forward has put an attribute on an argument, a weight or a
    result. ``before``: the attributes of arguments and weights, which are some."""
    new = attributes_of(values) - before if before else ()
    if own := sorted(name for name in new if not _is_torchs(name)):
        raise EagerOnlyError(f"it puts the attribute {own[0]} on a tensor, and it would be lost")


def _is_torchs(name: str) -> bool:
    """Tell whether torch puts an attribute on what stands for a tensor in the course of a trace,
    such as the symbolic sizes that C++ has asked for (``_sizes_capsule``)."""
    return name == "_is_param" or (name.startswith("_") and "_capsule" in name)


def _refuse(name: str) -> None:
    raise EagerOnlyError(f"it asks for {name} of a tensor, which compiled code has not")


def is_asked_by_tracers() -> bool:
    """Tell whether the nearest caller that is neither a mode nor this file is a tracer, as it notes
    a value or repeats a block: that is no question of the forward's."""
    frame = _asking()
    return frame is not None and frame.f_code.co_filename.startswith(_TRACERS)


def _is_asked_by_code() -> bool:
    """Tell whether the nearest caller that is neither a mode nor this file is a module's code."""
    frame = _asking()
    return frame is not None and not is_asked_by_torch(frame)


def _asking() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_on_the_way(frame):
        frame = frame.f_back
    return frame


def _is_on_the_way(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename in _METHODS or code.co_name in _ON_THE_WAY

"""List what one step works on: a dense array beside a dense array for every parameter with a
gradient.

A layout holds until a parameter, a state or the kind of a gradient changes; new memory of a
gradient is only another address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strop.errors import UnsupportedError
from strop.train.dtensors import local_of

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """Describe one parameter. All its arrays have the strides of ``param`` and no gaps; 8-bit
    states, which have ``scales``, lie in a row in the same order."""

    owner: Tensor  # the user's parameter, or what of it lies on this process
    param: Tensor  # its memory, or a copy of it if that has gaps
    grad_dtype: torch.dtype
    states: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]  # of the states, if these are codes
    average: Tensor | None
    shadow: Tensor | None
    group: int
    slot: int
    copies_grad: bool
    grad_aligned: bool  # to 16 bytes

    @property
    def copies_param(self) -> bool:
        return self.param.data_ptr() != self.owner.data_ptr()


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Hold the parameters of a step. ``key``: what they were when this was made."""

    items: tuple[Item, ...]
    key: object
    copied: tuple[Item, ...] = field(init=False)
    written: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "copied", tuple(i for i in self.items if i.copies_param))
        arrays = [a for i in self.items for a in (i.owner, i.average, i.shadow) if a is not None]
        object.__setattr__(self, "written", tuple(arrays))

    def gradients(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients with the strides of their parameters."""
        return [
            torch.empty_like(item.param, dtype=grad.dtype).copy_(grad) if item.copies_grad else grad
            for item, grad in zip(self.items, grads, strict=True)
        ]

    def load(self) -> None:
        for item in self.copied:
            item.param.copy_(item.owner)

    def store(self) -> None:
        for item in self.copied:
            item.owner.copy_(item.param)


def follows(tensor: Tensor, model: Tensor) -> bool:
    """Tell whether two tensors of one shape have their elements in the same places."""
    pairs = zip(tensor.shape, tensor.stride(), model.stride(), strict=True)
    return all(size == 1 or a == b for size, a, b in pairs)


def dense(parameter: Tensor) -> Tensor:
    """Return the memory of a parameter on this process, or a copy if it has gaps or overlaps."""
    data = local_of(parameter).detach()
    if type(data) is not Tensor:
        raise UnsupportedError(
            f"a parameter of type {type(data).__name__}: fused optimizers need plain tensors; "
            "use torch.optim for wrapped parameters"
        )
    return data if follows(torch.empty_like(data, device="meta"), data) else data.contiguous()


def check(parameter: Tensor, grad: Tensor, device: torch.device) -> None:
    """Raise UnsupportedError for what no sweep can read."""
    shape = tuple(parameter.shape)
    if parameter.device != device or grad.device != device:
        raise UnsupportedError(
            f"parameters or gradients on {device} and on {parameter.device}, {grad.device}: "
            "a fused optimizer works on one device; make one for each"
        )
    if grad.layout != torch.strided:
        raise UnsupportedError(
            f"a sparse gradient (parameter of shape {shape}): fused optimizers read dense ones; "
            "use torch.optim.SparseAdam for it, or Embedding(sparse=False)"
        )
    for what, tensor in (("parameter", parameter), ("gradient", grad)):
        if tensor.dtype not in FLOATS:
            known = ", ".join(str(dtype) for dtype in FLOATS)
            raise UnsupportedError(f"a {what} of {tensor.dtype} (shape {shape}); known: {known}")
    if parameter.shape != grad.shape:
        raise UnsupportedError(f"a gradient of shape {tuple(grad.shape)} for {shape}")


def state_like(param: Tensor, value: Tensor | None, fill: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a state beside ``param``: the one that is there if it fits, a converted one, or a new
    one."""
    dtype = state_dtype(param)
    if value is None:
        return fill(torch.empty_like(param, dtype=dtype))
    fits = value.dtype == dtype and value.device == param.device and follows(value, param)
    return value if fits else torch.empty_like(param, dtype=dtype).copy_(value)


def state_dtype(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32

"""Look into operators that libraries of quantised weights define, and write in Python themselves:
they are traced as what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

_OPENED = ("quanto::unpack", "quanto::qbytes_mm", "bitsandbytes::gemm_4bit")
_KEYS = {"cpu": DispatchKey.CPU, "cuda": DispatchKey.CUDA}


def opened() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yield those that are defined, each with a function that calls its kernel."""
    for name in filter(torch._C._dispatch_has_kernel, _OPENED):
        space, _, operator = name.partition("::")
        operator = getattr(getattr(torch.ops, space), operator).default
        yield operator, _calling(name, operator)


def _calling(name: str, operator: Any) -> Callable[..., Any]:
    def call(first: Tensor, *rest: Any, **named: Any) -> Any:
        key = _KEYS.get(first.device.type, DispatchKey.CompositeExplicitAutograd)
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key.name):
            key = DispatchKey.CompositeExplicitAutograd
        return operator._op_dk(key, first, *rest, **named)

    return call

"""Apply autocast to operators of ours: it knows torch's by name, and would leave ours as they
are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor


def as_autocast(name: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``call`` so that its operands get the type that autocast gives those of torch's
    operator, where autocast is on and has a rule for ``aten::name``: norms get fp32, all else
    autocast's own type."""

    @functools.wraps(call)
    def cast(*args: Any, **kwargs: Any) -> Tensor:
        operands = (*args, *kwargs.values())
        kind = next((x.device.type for x in operands if isinstance(x, Tensor)), "")
        if not (kind and _is_on(kind) and _has_rule(name, kind)):
            return call(*args, **kwargs)
        dtype = torch.float32 if name.endswith("norm") else torch.get_autocast_dtype(kind)
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda x: x.to(dtype) if _is_eligible(x, kind) else x, (args, kwargs)
        )
        return call(*args, **kwargs)

    return cast


def _is_on(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _has_rule(name: str, kind: str) -> bool:
    key = f"Autocast{kind.upper()}"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key))


def _is_eligible(x: Tensor, kind: str) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64 and x.device.type == kind

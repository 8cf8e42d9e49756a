"""Refuse calls of which no node of a graph says what they do: those that put other memory under a
tensor, and those that give nothing and raise for some values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule

from strop.errors import CaptureError, EagerOnlyError

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_OF_ONE_HOT = "one_hot: Class values"  # which docs/numerics.md names: kernels give rows of 0
_WHY = "which compiled code does not follow"


def refuse_other_memory(func: Callable[..., Any]) -> None:
    """Raises EagerOnlyError where ``func`` is what runs for ``tensor.data = other``, which Dynamo
    loses."""
    if func == _SET_DATA:
        raise EagerOnlyError(f"it sets .data of a tensor, {_WHY}")


def refuse_unfollowed(gm: GraphModule) -> None:
    """Raises CaptureError where a graph has a call of ``Tensor.set_``, or one that only looks at
    values and raises: compiled code would go on with them."""
    for node in gm.graph.nodes:
        if getattr(node.target, "namespace", "") == "aten" and _base(node.target) == "set":
            raise CaptureError(f"it calls set_ of a tensor, {_WHY}")
        is_check = isinstance(node.target, OpOverload) and _only_checks(node.target)
        if is_check and not str(node.args[-1]).startswith(_OF_ONE_HOT):
            name = node.target._schema.name
            raise CaptureError(f"it calls {name}, which raises an error by the values of a tensor")


def _only_checks(target: OpOverload) -> bool:
    schema = target._schema
    is_of_types = target is torch.ops.aten._assert_tensor_metadata.default
    return not (schema.returns or schema.is_mutable or is_of_types) and any(
        isinstance(argument.type, torch.TensorType) for argument in schema.arguments
    )


def _base(target: Any) -> str:
    name: str = target._schema.name
    return name.removeprefix("aten::").rstrip("_")

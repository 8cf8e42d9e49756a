"""Refuse calls that put other memory under a tensor: no node of a graph says what that changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from strop.errors import CaptureError, EagerOnlyError

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_WHY = "which compiled code does not follow"


def refuse_other_memory(func: Callable[..., Any]) -> None:
    """Raises EagerOnlyError where ``func`` is what runs for ``tensor.data = other``, which Dynamo
    loses."""
    if func == _SET_DATA:
        raise EagerOnlyError(f"it sets .data of a tensor, {_WHY}")


def refuse_set(gm: GraphModule) -> None:
    """Raises CaptureError where a graph has a call of ``Tensor.set_``."""
    for node in gm.graph.nodes:
        if getattr(node.target, "namespace", "") == "aten" and _base(node.target) == "set":
            raise CaptureError(f"it calls set_ of a tensor, {_WHY}")


def _base(target: Any) -> str:
    name: str = target._schema.name
    return name.removeprefix("aten::").rstrip("_")

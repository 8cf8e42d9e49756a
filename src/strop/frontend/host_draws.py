"""Keep numbers that a forward on a GPU draws on the CPU and does not use.

Transformers for speech draw one for each layer, which decides in training whether the layer is left
out. Torch's generator on the CPU has to move on as in eager: the runtime draws them before a run.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch.fx import Node

from strop.frontend.draws import draws
from strop.ir.program import HostDraw


def unused_draw(node: Node, devices: Set[str]) -> HostDraw | None:
    """Return the draw of a traced call whose result nobody reads, in a graph for ``devices``; None
    for any other call, and for one whose sizes are not known."""
    value = node.meta.get("val")
    is_on_host = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    if node.users or not is_on_host or devices <= {"cpu"} or not draws(node):
        return None
    if _holds_unknown((node.args, tuple(node.kwargs.values()))):
        return None
    kwargs = tuple(sorted((name, _known(given)) for name, given in node.kwargs.items()))
    return HostDraw(str(node.target), _known(node.args), kwargs)


def _known(value: Any) -> Any:
    return tuple(map(_known, value)) if isinstance(value, list | tuple) else value


def _holds_unknown(value: Any) -> bool:
    """Tell whether an argument is another node's result, or a size of the call."""
    if isinstance(value, list | tuple):
        return any(map(_holds_unknown, value))
    return isinstance(value, Node | torch.SymInt | torch.SymFloat | torch.Generator)

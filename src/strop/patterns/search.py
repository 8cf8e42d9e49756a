"""Trace a search function to a graph in the normal form of a module's, by the same tracer and
importer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._guards import tracing
from torch.utils._python_dispatch import _disable_current_modes

from strop.errors import CaptureError, UnsupportedError
from strop.frontend.capture import Captured, capture
from strop.frontend.importer import Imported, import_graph
from strop.ir.dims import const
from strop.ir.graph import Graph, Node, Ref, Shape
from strop.ir.tensor_spec import TensorSpec
from strop.options import Options
from strop.passes.canonicalize import canonicalize

Argument = tuple[Shape, torch.dtype]


@dataclass(frozen=True, slots=True)
class Searched:
    """Hold a traced search. ``single``: it returns a tensor, and no tuple of them."""

    graph: Graph
    single: bool


class _Search(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor, **attributes: Any) -> Any:
        return self.function(*tensors, **attributes)


def traced(
    function: Callable[..., Any],
    arguments: Sequence[Argument],
    attributes: Mapping[str, Any],
    hints: Mapping[str, int],
) -> Searched:
    """Return the graph of ``function`` for arguments of these sizes and types, by position.

    Raises CaptureError or UnsupportedError if it cannot be traced for every value of the sizes.
    """
    module, cpu = _Search(function), torch.device("cpu")
    specs = [TensorSpec(tuple(map(str, shape)), dtype, cpu) for shape, dtype in arguments]
    known = {name: hints[name] for name in _roots(shape for shape, _ in arguments)}
    with tracing(None), _disable_current_modes():  # torch.compile may be tracing something else
        captured = capture(module, lambda *tensors: module(*tensors, **attributes), specs, known)
        imported = import_graph(captured.gm, captured.symbols, captured.hints, captured.origins)
    _refuse_conditions(captured, specs, imported)
    if imported.constants:
        raise UnsupportedError("it makes tensors of its own: give them as arguments")
    places = list(range(len(imported.returned)))
    form = pytree.tree_unflatten(places, captured.out_spec)
    are_tensors = all(isinstance(item, Ref) for item in imported.returned)
    if not places or not are_tensors or form not in (0, places, tuple(places)):
        raise UnsupportedError("it has to return a tensor, or a tuple of tensors")
    graph = canonicalize(imported.graph, Options())
    outputs = tuple(_computed(node) for node in graph.outputs)
    return Searched(replace(graph, outputs=outputs), form == 0)


def _roots(shapes: Iterable[Shape]) -> list[str]:
    return sorted({root for shape in shapes for size in shape for root in size.roots})


def _refuse_conditions(captured: Captured, specs: Sequence[TensorSpec], imported: Imported) -> None:
    for spec, own in zip(specs, captured.input_specs, strict=True):
        if spec.sizes != own.sizes:
            raise CaptureError(
                f"it holds for arguments of the shape ({', '.join(own.shape)}) only,"
                f" not ({', '.join(spec.shape)})"
            )
    # that no size is negative is a condition of the module too, which has the same nodes
    known = {size for node in imported.graph.nodes for size in node.shape}
    asked = [
        g
        for g in (*captured.guards, *imported.guards)
        if not (g.left in known and (g.relation, g.right) == (">=", const(0)))
    ]
    if asked:
        raise CaptureError(f"it holds only where {' and '.join(map(str, asked))}")


def _computed(node: Node) -> Node:
    """Return a result without the copy that gives it a place and an order of its own."""
    while node.op == "copy" and ("result" in node.attrs or node.order is not None):
        node = node.inputs[0]
    return node

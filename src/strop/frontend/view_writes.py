"""Turn a write into a part of a tensor into a new tensor that has the part in it.

After ``out[..., 0::2] = x`` whoever reads ``out``, or another view of it, reads what
``slice_scatter(out, x)`` gives. That is what functionalization in torch does while it traces; here
it is done on the finished graph, so that tracing needs no wrapped tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
Unview = Callable[[Graph, Node, Node], Node]


def _scatter(target: Any) -> Unview:
    def unview(graph: Graph, view: Node, part: Node) -> Node:
        source, *where = view.args
        return graph.call_function(target, (source, part, *where), dict(view.kwargs))

    return unview


def _called(target: Any) -> Unview:
    def unview(graph: Graph, view: Node, part: Node) -> Node:
        return graph.call_function(target, (part, *view.args[1:]), dict(view.kwargs))

    return unview


def _permuted_back(graph: Graph, view: Node, part: Node) -> Node:
    order: Any = view.args[1]
    dims = [d % len(order) for d in order]
    back = [dims.index(place) for place in range(len(dims))]
    return graph.call_function(aten.permute.default, (part, back))


def _unsqueezed(graph: Graph, view: Node, part: Node) -> Node:
    source: Any = view.args[0]
    if source.meta["val"].dim() == view.meta["val"].dim():  # the dim has more than one element
        return graph.call_function(aten.alias.default, (part,))
    return graph.call_function(aten.unsqueeze.default, (part, *view.args[1:]))


def _reshaped(graph: Graph, view: Node, part: Node) -> Node:
    source: Any = view.args[0]
    sizes = []
    for dim, size in enumerate(source.meta["val"].shape):
        if not isinstance(size, int):  # a node has to say it
            asked = graph.call_function(aten.sym_size.int, (source, dim))
            asked.meta["val"] = size
            size = asked
        sizes.append(size)
    return graph.call_function(aten.view.default, (part, sizes))


# For a kind of view: what gives the tensor that it looks at, from the new values of the view.
UNVIEWS: Mapping[Any, Unview] = {
    aten.slice.Tensor: _scatter(aten.slice_scatter.default),
    aten.select.int: _scatter(aten.select_scatter.default),
    aten.transpose.int: _called(aten.transpose.int),
    aten.t.default: _called(aten.t.default),
    aten.permute.default: _permuted_back,
    aten.unsqueeze.default: _called(aten.squeeze.dim),
    aten.squeeze.dim: _unsqueezed,
    aten.view.default: _reshaped,
}


def can_undo(views: Sequence[Node]) -> bool:
    return all(view.target in UNVIEWS for view in views)


def can_repeat(views: Sequence[Node]) -> bool:
    """Tell whether each is one call on the tensor that it looks at: a piece of a split is none."""
    return all(isinstance(view.target, torch._ops.OpOverload) for view in views)


def unviewed(graph: Graph, view: Node, part: Node) -> Node:
    """Return the tensor that ``view`` looks at, with ``part`` as what it shows."""
    return UNVIEWS[view.target](graph, view, part)


def viewed_again(graph: Graph, view: Node, whole: Node) -> Node:
    """Return what ``view`` shows of another tensor."""
    return _called(view.target)(graph, view, whole)

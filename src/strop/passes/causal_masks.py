"""Recognise a mask that is causal, or lets everything through, and have attention do without it.

Models whose code is traced make masks of indices even where eager hands none to attention:
transformers leaves them out only where it may look at values. Without one, kernels skip the keys
that come behind a query, and no library turns the mask into numbers in each layer.
"""

from __future__ import annotations

import torch

from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.ir.index_values import ONE, ZERO, Affine, IndexValues, NotAbove
from strop.options import Options

MASK = 3  # the operand of attention


def causal_masks(graph: Graph, options: Options) -> Graph:
    masked = [node for node in graph.nodes if node.op == "attention" and len(node.inputs) > MASK]
    if not masked:
        return graph
    known = IndexValues(graph.nodes)
    found = {
        node: is_causal
        for node in masked
        if (is_causal := _is_causal(node.inputs[MASK], known)) is not None
    }

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node not in found:
            return None
        attrs = {**node.attrs, "causal": node.attrs["causal"] or found[node]}
        return b.make("attention", inputs[:MASK], node.shape, node.dtype, **attrs)

    return rewrite(graph, rule) if found else graph


def _is_causal(mask: Node, known: IndexValues) -> bool | None:
    """Tell whether a mask lets each query see the keys up to its own place (True) or all keys
    (False); None where it is another, or is not known before anything runs."""
    if mask.dtype is not torch.bool or len(mask.shape) < 2:
        return None
    found = known.of(mask)
    if not isinstance(found, NotAbove):
        return False if isinstance(found, Affine) and found.value() == 1 else None
    *others, of_queries, of_keys = found.number.steps
    is_alike = all(step == ZERO for step in (found.number.start, *others))
    return True if is_alike and (of_queries, of_keys) == (ZERO - ONE, ONE) else None

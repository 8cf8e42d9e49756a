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
    known = IndexValues()
    found = {
        node: is_causal
        for node in graph.nodes
        if node.op == "attention" and (is_causal := _is_causal(node, known)) is not None
    }

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node not in found:
            return None
        attrs = {**node.attrs, "causal": node.attrs["causal"] or found[node]}
        return b.make("attention", inputs[:MASK], node.shape, node.dtype, **attrs)

    return rewrite(graph, rule) if found else graph


def _is_causal(attention: Node, known: IndexValues) -> bool | None:
    """Tell whether the mask lets each query see the keys up to its own place (True) or all keys
    (False); None where it is another, or is not known before anything runs."""
    own = attention.inputs[MASK] if len(attention.inputs) > MASK else None
    if own is None or own.dtype is not torch.bool or len(own.shape) < 2:
        return None
    mask = known.of(own)
    if not isinstance(mask, NotAbove):
        return False if isinstance(mask, Affine) and mask.value() == 1 else None
    *others, of_queries, of_keys = mask.number.steps
    is_alike = all(step == ZERO for step in (mask.number.start, *others))
    return True if is_alike and (of_queries, of_keys) == (ZERO - ONE, ONE) else None

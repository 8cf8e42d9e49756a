"""Make a mask of marks one of numbers, once for all attention of fp32 that reads it.

Torch's attention adds numbers: in each call it turns marks into them, and copies them where rows
do not begin at multiples of 16 elements, which are five launches of 1 us each in every layer. Here
that is one kernel for all layers, or a part of the one that computes the marks. In half precision
kernels of ours read marks.
"""

from __future__ import annotations

import math

import torch

from strop.ir.dims import Expr, const
from strop.ir.graph import Builder, Graph, Node, Shape, rewrite
from strop.options import Options
from strop.passes.causal_masks import MASK

ROW = 16  # elements, of which torch's kernel wants all rows to begin at multiples


def numeric_masks(graph: Graph, options: Options) -> Graph:
    return rewrite(graph, _by_numbers, _reads_marks)


def _reads_marks(node: Node) -> bool:
    """Tell whether it is attention of fp32 whose mask says True or False."""
    if node.op != "attention" or len(node.inputs) <= MASK:
        return False
    return node.inputs[MASK].dtype is torch.bool and node.inputs[0].dtype is torch.float32


def _by_numbers(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node:
    q, k, _, mask = inputs
    numbers = _numbers(b, mask, (*q.shape[:-1], k.shape[-2]))
    operands = (*inputs[:MASK], numbers)
    return b.make("attention", operands, node.shape, node.dtype, order=node.order, **node.attrs)


def _numbers(b: Builder, mask: Node, scores: Shape) -> Node:
    """Return 0 where a query sees a key and -inf where it does not, spread over the scores from
    memory with aligned rows."""
    marks = mask.inputs[0] if mask.op == "expand" else mask
    *others, keys = marks.shape[:-1] + scores[-1:]
    marks = b.expand(marks, (*others, keys))
    seen, hidden = (b.constant(value, torch.float32) for value in (0.0, -math.inf))
    numbers = b.pointwise("where", marks, seen, hidden, dtype=torch.float32)
    width = _aligned(keys)
    if width != keys:
        last = len(others)
        rest = b.expand(b.view_as_rank(hidden, last + 1), (*others, width - keys))
        wide = b.make("cat", (numbers, rest), (*others, width), numbers.dtype, dim=last)
        numbers = b.slice(wide, last, 0, keys)
    return b.expand(b.view_as_rank(numbers, len(scores)), scores)


def _aligned(keys: Expr) -> Expr:
    return (keys + const(ROW - 1)) // ROW * ROW

"""Say of which leaves a backward pass computes the whole gradient in one compiled graph.

Such a gradient is complete when that graph has computed it. Where a second edge leads to a leaf, as
from a second call of a module or a penalty of weights, the graph computes a part of it only.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from strop.dispatch.training_steps import is_compiled_backward

_LEAF: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def leaves_of_one_graph(result: Tensor) -> set[Tensor]:
    """Return the leaves to which a single edge leads in the backward pass of ``result``, if that is
    one of a graph of Strop. Edges of passes within it, as of reentrant checkpoints, are not seen.
    """
    edges: Counter[Tensor] = Counter()
    found = set[Tensor]()
    waiting = [] if result.grad_fn is None else [result.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for after, _ in node.next_functions:
            if isinstance(after, _LEAF):
                edges[after.variable] += 1
                if is_compiled_backward(node):
                    found.add(after.variable)
            elif after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    return {leaf for leaf in found if edges[leaf] == 1}

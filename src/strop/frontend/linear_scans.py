"""Take a scan whose function is that of a linear recurrence as one operator.

``torch``'s associative scan computes h[t] = a[t] * h[t - 1] + b[t] where its function combines
pairs (a, b) as (a1 * a2, a2 * b1 + b2). Taken apart it is a tree whose depth and parities come from
the length, so that each length has a graph of its own. Any other function is taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._higher_order_ops.utils import reenter_make_fx
from torch.fx import Node as FxNode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from strop.frontend.differentiated import define, is_differentiated, is_transformed
from strop.ir.dims import const, product
from strop.ir.graph import Node
from strop.ir.linear_scan import STATES, linear_scan

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
_library = torch.library.Library("strop", "FRAGMENT")
_library.define("linear_scan(Tensor a, Tensor b) -> Tensor")


def _along_first(a: Tensor, b: Tensor) -> Tensor:
    return linear_scan(a, b, 0)


def _shape(a: Tensor, b: Tensor) -> Tensor:
    return b.new_empty(b.shape)


define(_library, "linear_scan", _along_first, _shape)
LINEAR_SCAN = torch.ops.strop.linear_scan.default


def scanned(combine: Callable[..., Any], leaves: Sequence[Tensor]) -> list[Tensor] | None:
    """Scan along the first dim where that is a linear recurrence: what ``combine`` gives of the
    leaves of two elements says so. Return None for any other scan, and inside a gradient, for which
    the operator has no rule of its own."""
    if len(leaves) != 2 or is_differentiated(leaves) or is_transformed():
        return None
    first, second = leaves
    if any(map(is_traceable_wrapper_subclass, leaves)):
        return None
    if first.shape != second.shape or first.dtype is not second.dtype or first.dtype not in STATES:
        return None
    if first.device != second.device or (factors := _factors(combine, leaves)) is None:
        return None
    decays, added = leaves[factors], leaves[1 - factors]
    products = torch.cumprod(decays, 0, dtype=STATES[decays.dtype]).to(decays.dtype)
    found = [products, LINEAR_SCAN(decays, added)]
    return found if factors == 0 else found[::-1]


def _factors(combine: Callable[..., Any], leaves: Sequence[Tensor]) -> int | None:
    """Return which of two leaves has the factors of a linear recurrence; None where ``combine``
    computes anything else."""
    with disable_proxy_modes_tracing():
        fresh = [torch.empty_like(leaf) for leaf in (*leaves, *leaves)]
        gm = reenter_make_fx(combine)(*fresh)
    given = gm.graph.find_nodes(op="placeholder")
    (result,) = gm.graph.find_nodes(op="output")
    results = pytree.tree_leaves(result.args[0])
    if len(given) != len(fresh) or len(results) != len(leaves):
        return None
    for factors in (0, 1):
        left, right = (given[factors], given[1 - factors]), (given[factors + 2], given[3 - factors])
        both, state = results[factors], results[1 - factors]
        if _is_product(both, left[0], right[0]) and _is_step(state, left[1], *right):
            return factors
    return None


def _is_product(node: Any, x: FxNode, y: FxNode) -> bool:
    is_mul = isinstance(node, FxNode) and node.target is aten.mul.Tensor
    return is_mul and not node.kwargs and node.args in ((x, y), (y, x))


def _is_step(node: Any, state: FxNode, factor: FxNode, added: FxNode) -> bool:
    """Tell whether a node is factor * state + added, in any order."""
    if not isinstance(node, FxNode) or node.kwargs:
        return False
    if node.target is aten.addcmul.default:
        return node.args in ((added, factor, state), (added, state, factor))
    if node.target is not aten.add.Tensor or len(node.args) != 2:
        return False
    return any(
        each is added and _is_product(other, factor, state)
        for each, other in (node.args, node.args[::-1])
    )


def _imported(im: Importer, fx: FxNode, a: Any, b: Any) -> Node:
    """Make the node of four dims, (batch, rows, steps, inner). A scan has moved the steps to the
    front: where both operands are views that do so, it goes over what they are views of."""
    build, nodes = im.builder, [im.node(a), im.node(b)]
    order = tuple(range(len(nodes[0].shape)))
    if all(node.op == "permute" for node in nodes):
        orders = {node.attrs["dims"] for node in nodes}
        if len(orders) == 1:
            (order,) = orders
            nodes = [node.inputs[0] for node in nodes]
    shape, along = nodes[0].shape, order[0]
    lead = shape[:along] or (const(1),)
    whole = lead[0], product(lead[1:]), shape[along], product(shape[along + 1 :])
    flat = [build.reshape(node, whole) for node in nodes]
    made = build.make("linear_scan", flat, whole, fx.meta["val"].dtype)
    return build.permute(build.reshape(made, shape), order)


SCANS: dict[Any, Callable[..., Any]] = {LINEAR_SCAN: _imported}

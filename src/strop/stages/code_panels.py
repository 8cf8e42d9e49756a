"""Find kernels on a CPU that can make the sums of products of codes that they read.

Sums of some rows stay in a cache, where the kernel that scales them, adds the bias and quantises
the rows anew reads them. Otherwise they are int32 in memory, which is four times what it is made
of. The kernel of the library makes those that a call reads, or several kernels, or a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from strop.codegen import cpp_panels
from strop.fusion.plan import CodePanels, FusionPlan, Group
from strop.fusion.planner import loaded
from strop.ir.affine import base_of
from strop.ir.code_panel import CodePanel
from strop.ir.dims import Expr, const
from strop.ir.graph import Graph, Node
from strop.ir.loops import Param
from strop.ir.ops import Kind
from strop.lowering.lower import Lowered

# With fewer a kernel packs a weight for longer than it multiplies, which torch's does not do. A
# small weight is packed in the time that a call takes the host.
FEWEST_ROWS, SMALL = 16, 1 << 18


def sums_of_weights(graph: Graph) -> frozenset[Node]:
    """Return the sums of a weight's codes, which a zero point of values is multiplied by. They want
    kernels of their own: for a single row of values they are as many as the results, and in one
    kernel with these that kernel could not make the products."""
    if not any(node.op == "code_sums" for node in graph.nodes):
        return frozenset()
    return frozenset(node for node in graph.nodes if _sums_a_weight(node))


def _sums_a_weight(node: Node) -> bool:
    if node.kind is not Kind.REDUCTION:
        return False
    (x,) = node.inputs
    while x.op == "cast" or x.kind is Kind.VIEW:
        x = x.inputs[0]
    return x.op == "input" and x.attrs["state"] and x.dtype is torch.int8


def readers_of_sums(graph: Graph, fusion: FusionPlan) -> Mapping[Node, Group]:
    """Return the sums of products of codes that one kernel alone reads, and that may as well be
    made where it runs: nobody writes to what they are made of."""
    stored = frozenset(node for group in fusion.groups for node in group.stores)
    results = {base_of(node) for node in graph.outputs}
    calls = [step for step in fusion.steps if isinstance(step, Node)]
    read = {base_of(x) for call in calls for x in call.inputs} | results
    written = {base_of(n.inputs[0]) for n in graph.nodes if n.op == "write"}
    found: dict[Node, list[Group]] = {
        n: []
        for n in calls
        if n.op == "code_sums" and n not in read and written.isdisjoint(map(base_of, n.inputs))
    }
    for group in fusion.groups if found else ():
        for node in loaded(group, stored) & found.keys():
            found[node].append(group)
    return {node: groups[0] for node, groups in found.items() if len(groups) == 1}


def panels_of(group: Group, low: Lowered, readers: Mapping[Node, Group]) -> CodePanels | None:
    """Return the kernel of a group that makes the sums that it alone reads, if it can."""
    calls = tuple(node for node in low.buffers if readers.get(node) is group)
    if not calls or not all(map(_has_plain_operands, calls)):
        return None
    params, buffers = list(low.kernel.params), list(low.buffers)
    for call in calls:
        place, (x, weight, *zeros) = low.buffers.index(call), call.inputs
        columns, depth = (size.value for size in weight.shape)
        own = len(params)
        panel = CodePanel(
            columns, depth, own, call.attrs.get("zero", 0), own + 1 if zeros else None
        )
        params[place] = Param(x.dtype, False, panel)
        buffers[place] = base_of(x)
        for each in (weight, *zeros):
            params.append(Param(each.dtype, False))
            buffers.append(base_of(each))
    kernel = replace(low.kernel, name=f"codes_{low.kernel.name}", params=tuple(params))
    offsets = (*low.offsets, *(const(0) for _ in buffers[len(low.buffers) :]))
    if not cpp_panels.fits(kernel):
        return None
    is_small = all(call.inputs[1].numel.value <= SMALL for call in calls)
    rows, fewest = calls[0].shape[0], 1 if is_small else FEWEST_ROWS
    return CodePanels(group, calls, kernel, tuple(buffers), offsets, rows, fewest)


def _has_plain_operands(call: Node) -> bool:
    """Tell whether codes, weight and its zero points lie densely from where their memory begins."""
    x, weight, *zeros = call.inputs
    is_weight = weight.op == "input" and weight.order is None
    is_known = is_weight and all(size.is_const for size in weight.shape)
    return is_known and _is_whole(x, x.shape[-1:]) and all(_is_whole(z, ()) for z in zeros)


def _is_whole(x: Node, rows: Sequence[Expr]) -> bool:
    """Tell whether all of some memory, and nothing but its shape, is seen otherwise: its rows are
    these."""
    base = base_of(x)
    is_whole = base.order is None and base.numel == x.numel
    while x.op == "reshape":
        x = x.inputs[0]
    return x is base and is_whole and base.shape[len(base.shape) - len(rows) :] == tuple(rows)

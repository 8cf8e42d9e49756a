"""Write in place: ``copy_(p, v)`` becomes a store into p by the kernel that computes v, or a call
of torch's that changes a part of p, such as ``index_copy_`` of new keys into a static cache.

Legal only when nobody can see the difference: no step after that kernel reads p, and the kernel
itself reads p, if at all, at the very element that it is about to write. Otherwise the copy
stays. (BladeDISC redirects without this proof, which is a race for ``p[:] = roll(p)``.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strop.fusion.plan import FusionPlan, Group
from strop.ir.affine import base_of
from strop.ir.dims import Expr, const
from strop.ir.graph import Graph, Node, Ref
from strop.ir.loops import Index, Load, LoopKernel, Schedule, Store
from strop.ir.ops import Kind

ONE = const(1)
# Operators that return a copy of their first argument with a part of it changed -> those that
# change it in place.
IN_PLACE: Mapping[str, str] = {
    "aten.index_copy.default": "aten.index_copy_.default",
    "aten.index_put.default": "aten.index_put_.default",
    "aten.index_add.default": "aten.index_add_.default",
    "aten.index_fill.int_Scalar": "aten.index_fill_.int_Scalar",
    "aten.scatter.src": "aten.scatter_.src",
    "aten.scatter.value": "aten.scatter_.value",
    "aten.scatter_add.default": "aten.scatter_add_.default",
    "aten.masked_scatter.default": "aten.masked_scatter_.default",
}
Lowered = Mapping[Group, tuple[LoopKernel, tuple[Node, ...], tuple[Expr, ...]]]


# Groups whose reads may happen at the place of a later one, in a form that does the work of both.
Moves = Sequence[tuple[Group, Group]]


def redirected_stores(
    graph: Graph, plan: FusionPlan, lowered: Lowered, moves: Moves
) -> dict[Node, Node]:
    """Map each computed value to the input whose memory it may be written to directly."""
    targets: dict[Node, Node] = {}
    for write in (s for s in plan.steps if isinstance(s, Node) and s.op == "write"):
        destination, value = write.inputs
        makers = [s for s in plan.groups if value in s.stores]
        if destination.op != "input" or not makers or value in targets:
            continue
        if value.strides != destination.strides or value.dtype != destination.dtype:
            continue
        if value in map(base_of, graph.outputs):
            continue  # the caller's result must not change with p
        if _is_read_behind(destination, makers[0], write, plan.steps, lowered, moves):
            continue
        if _is_read_before_it_is_written(destination, value, *lowered[makers[0]]):
            targets[value] = destination
    return targets


def _is_read_behind(
    destination: Node,
    maker: Group | Node,
    write: Node,
    steps: Sequence[Group | Node],
    lowered: Lowered,
    moves: Moves,
) -> bool:
    """Tell whether a value is read behind a step, or by a group that may be moved there."""
    at = steps.index(maker)
    moved = (group for group, later in moves if steps.index(group) < at < steps.index(later))
    return any(
        destination in _reads(step, lowered)
        for step in (*steps[at + 1 :], *moved)
        if step is not write
    )


def changed_in_place(
    graph: Graph, plan: FusionPlan, lowered: Lowered, moves: Moves
) -> dict[Node, Node]:
    """Map each call that returns an input with a part of it changed to that input, where it may be
    changed itself: a copy of the whole, there and back, is most of a decode step's traffic."""
    outputs = set(map(base_of, graph.outputs))
    targets: dict[Node, Node] = {}
    for write in (s for s in plan.steps if isinstance(s, Node) and s.op == "write"):
        destination, value = write.inputs
        if value.op != "aten" or destination.op != "input" or value in outputs | set(targets):
            continue
        if not _changes(value, destination) or value.strides != destination.strides:
            continue
        if not _is_read_behind(destination, value, write, plan.steps, lowered, moves):
            targets[value] = destination
    return targets


def _changes(call: Node, destination: Node) -> bool:
    """Tell whether a call copies and changes an input that it does not read elsewhere, too."""
    first, *others = call.inputs
    template = call.attrs["args"]
    is_first = first is destination and bool(template) and template[0] == Ref(0)
    is_known = call.attrs["target"] in IN_PLACE and call.attrs["single"]
    is_apart = destination not in map(base_of, others)
    return is_known and is_first and is_apart and call.dtype == destination.dtype


def joins_of(graph: Graph) -> dict[Node, Node]:
    """Map each part to the join in whose memory it lies."""
    return {part: node for node in graph.nodes if node.op == "join" for part in node.inputs}


def _is_read_before_it_is_written(
    destination: Node,
    value: Node,
    kernel: LoopKernel,
    buffers: tuple[Node, ...],
    offsets: tuple[Expr, ...],
) -> bool:
    """Tell whether the kernel that makes a value reads the memory that it goes to, if at all, where
    it is about to write."""
    if destination not in buffers:
        return True
    return reads_before_it_writes(kernel, offsets, buffers.index(destination), buffers.index(value))


def reads_before_it_writes(
    kernel: LoopKernel, offsets: Sequence[Expr], read: int, written: int
) -> bool:
    """Tell whether two params of a kernel may be one piece of memory: the program that writes an
    element is the only one that reads it, and has done so. Code generators run a kernel's stores
    along the cols in its last sweep."""
    if offsets[read] != offsets[written]:
        return False
    stmts = kernel.body + kernel.tail
    stores = {
        s.index: at
        for at, s in reversed(tuple(enumerate(stmts)))
        if isinstance(s, Store) and s.param == written
    }
    return all(
        at < stores.get(s.index, -1) and not s.lookups and _is_own(kernel, s.index)
        for at, s in enumerate(stmts)
        if isinstance(s, Load) and s.param == read
    )


def _is_own(kernel: LoopKernel, index: Index) -> bool:
    """Tell whether one program alone has these elements: nothing is left out that programs share
    out."""
    axes = kernel.rows if kernel.schedule is Schedule.ROW else kernel.rows + kernel.cols
    return all(a.name in index.axes for a in axes if not a.reduced and a.size != ONE)


def _reads(step: Group | Node, lowered: Lowered) -> set[Node]:
    if isinstance(step, Group):
        return set(lowered[step][1])
    found = {base_of(i) for i in step.inputs}
    return found | {i for i in step.inputs if i.kind is not Kind.VIEW}

"""Multiply a few rows by a quantised weight in the kernel that decodes it.

A product of many rows reads a decoded weight from memory again and again, so that it is decoded
once, in one pass. One of a row or two, such as of a step's time, takes as long as its weight takes
to come: int8 codes are a byte each, and to decode them first writes and reads two more bytes twice.
There the kernel that decodes sums up the products as well, and stores nothing else. Which of the
two runs is decided for each shape. The kernel rounds no weight on its way, and its sums are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from strop.fusion.plan import CodedProduct, FusionPlan, Group
from strop.fusion.planner import loaded
from strop.ir.affine import base_of
from strop.ir.dims import const, product
from strop.ir.graph import Builder, Graph, Node
from strop.ir.loops import Schedule
from strop.ir.ops import CODES, Kind
from strop.ir.parts import places_of_calls

# Each row reads the codes again, from a cache: two take fewer bytes than a decoded weight does.
MOST_ROWS = 2
_TYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))


def coded_products(graph: Graph, plan: FusionPlan) -> Iterator[CodedProduct]:
    """Yield the linears of which one kernel could decode the weight and multiply by it."""
    writers = {node: group for group in plan.groups for node in group.stores}
    stored, results = frozenset(writers), {base_of(o) for o in graph.outputs}
    users, alone, placed = graph.users(), _made_of_weights(graph), places_of_calls(graph)
    for place, call in enumerate(plan.steps):
        if not isinstance(call, Node) or call in placed or not _may_have_few_rows(call):
            continue
        weight = base_of(call.inputs[1])
        decoding = writers.get(weight)
        if decoding is None or weight in results or not _only_decodes(decoding, stored, alone):
            continue
        made = _made_between(plan, plan.steps.index(decoding), place)
        others = {base_of(x) for x in call.inputs if base_of(x) is not weight}
        if _is_read_once(weight, users) and others.isdisjoint(made):
            yield _product(decoding, call)


def _may_have_few_rows(call: Node) -> bool:
    if call.op != "linear" or call.dtype not in _TYPES:
        return False
    least = product(call.inputs[0].shape[:-1]).least
    is_known = all(size.is_const for size in call.inputs[1].shape)
    return is_known and least is not None and least <= MOST_ROWS


def _made_of_weights(graph: Graph) -> Mapping[Node, bool]:
    """Return the values that come of weights alone, and whether codes are among these."""
    found = dict[Node, bool]()
    for node in graph.nodes:
        if node.op == "input":
            if node.attrs["state"]:
                found[node] = node.dtype in CODES
        elif node.op == "constant" or all(x in found for x in node.inputs):
            found[node] = any(found[x] for x in node.inputs)
    return found


def _only_decodes(group: Group, stored: frozenset[Node], alone: Mapping[Node, bool]) -> bool:
    """Tell whether a kernel makes one weight, of codes and what belongs to them."""
    if group.schedule is not Schedule.POINTWISE or len(group.stores) != 1:
        return False
    return alone.get(group.stores[0], False) and loaded(group, stored) <= alone.keys()


def _is_read_once(weight: Node, users: dict[Node, list[Node]]) -> bool:
    """Tell whether nothing but one call reads a value, through views or not."""
    ahead = users[weight]
    while len(ahead) == 1 and ahead[0].kind is Kind.VIEW:
        ahead = users[ahead[0]]
    return len(ahead) == 1


def _made_between(plan: FusionPlan, first: int, last: int) -> set[Node]:
    """Return what is not there yet where the weight is decoded. After a write nobody looks."""
    steps = plan.steps[first + 1 : last]
    made = {n for s in steps for n in (s.stores if isinstance(s, Group) else (s,))}
    writes = (base_of(s.inputs[0]) for s in steps if isinstance(s, Node) and s.op == "write")
    return made | set(writes)


def _product(decoding: Group, call: Node) -> CodedProduct:
    b = Builder()
    b.origin = call.origin
    x, weight, *bias = call.inputs
    columns, depth = weight.shape
    rows = product(x.shape[:-1])
    sides = b.reshape(x, (rows, const(1), depth)), b.reshape(weight, (const(1), columns, depth))
    wide = (b.expand(side, (rows, columns, depth)) for side in sides)
    terms = b.pointwise("mul", *(b.cast(side, torch.float32) for side in wide), dtype=torch.float32)
    total = b.reshape(b.reduce("sum", terms, (2,), torch.float32), (rows, columns))
    if bias:
        total = b.pointwise(
            "add", total, b.cast(bias[0], torch.float32), dtype=torch.float32, alpha=1
        )
    total = b.pointwise("copy" if call.dtype is torch.float32 else "cast", total, dtype=call.dtype)
    own = tuple(node for node in b.nodes if node.kind in (Kind.POINTWISE, Kind.REDUCTION))
    whole = Group(Schedule.ROW, (*decoding.nodes, *own), (total,))
    return CodedProduct(decoding, call, whole, rows, MOST_ROWS)

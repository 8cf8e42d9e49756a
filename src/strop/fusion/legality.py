"""Decide whether a node may join a group. Each refusal has a reason; nothing here looks at cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from strop.fusion.parallelism import GPU, Workers, is_cut
from strop.ir.affine import base_of, lanes_fit, merge, runs_of, strided
from strop.ir.dims import Expr, const, product
from strop.ir.graph import Graph, Node
from strop.ir.loops import Schedule
from strop.ir.ops import LOOKED_INTO, Kind

ONE = const(1)
MAX_STRIDED = 512  # elements of a row across memory that fit on chip beside their neighbours
MANY_ROWS = 8192  # that keep a GPU busy, 64 side by side
MAX_SHARED = 4096  # elements of a row of two operands that one program holds


MANY_PIECES = 8  # of a cat: each of them would be computed for each element of a reduction
LOOPS_APART = "bags, and the pieces of a cat, have loops of their own beside reductions"

Turns = tuple[tuple[int, ...], ...]  # permutations between a member and the others


@dataclass(eq=False)
class DraftGroup:
    """Hold a group while it grows. ``domain`` is the element count of one full sweep."""

    schedule: Schedule
    domain: Expr
    nodes: list[Node] = field(default_factory=list)
    kept: Expr | None = None  # elements left after the reductions
    reduced: set[Node] = field(default_factory=set)  # members that depend on a reduction here
    first: Node | None = None  # reduction; the loop of all others
    turns: dict[Node, Turns] = field(default_factory=dict)  # members that run in another order


def is_fusible(node: Node) -> bool:
    """Tell whether code generators print a node: pointwise nodes and reductions; constants go with
    their users."""
    if node.op in ("constant", "iota"):
        return False
    return node.kind in (Kind.POINTWISE, Kind.REDUCTION)


Schedules = Mapping[Node, Schedule | None]


def reduction_schedules(graph: Graph, workers: Workers = GPU) -> Schedules:
    """Return for each reduction how the elements of its operand lie in memory asks it to run."""
    users = graph.users()
    return {
        node: _reduction_schedule(node, users, graph.hints, workers)
        for node in graph.nodes
        if node.kind is Kind.REDUCTION
    }


def _reduction_schedule(
    node: Node, users: Mapping[Node, list[Node]], hints: Mapping[str, int], workers: Workers
) -> Schedule | None:
    """Return ROW when the reduced elements lie innermost in memory, COLUMN when kept ones lie
    inside.

    Where each element is needed again for a result of that size (softmax), a ROW kernel is one
    launch instead of several, and rows side by side are as good to read as long ones. Rows too few
    to keep the device busy are cut like columns (``parallelism``). Rows may lie in pieces
    where their columns do not fit on chip, or lie nowhere: kept dims that were expanded. None when
    kept and reduced atoms alternate more often: such an operand is copied first.
    """
    found = runs_of(node.inputs[0], node.attrs["dims"], hints)
    runs = None if found is None else [run.is_reduced for run in found]
    if runs in ([False], []):
        return Schedule.ROW
    if runs in ([True], [False, True]):
        length = product(node.inputs[0].shape[d] for d in node.attrs["dims"])
        itemsize = node.inputs[0].dtype.itemsize
        cut = is_cut(node.numel, length, itemsize, hints, workers)
        return Schedule.COLUMN if cut else Schedule.ROW
    if runs in ([True, False], [False, True, False]):
        count = product(node.inputs[0].shape[d] for d in node.attrs["dims"])
        is_short = count.is_const and count.value <= MAX_STRIDED
        has_many = node.numel.eval(hints) >= MANY_ROWS
        if (is_short or has_many) and _comes_back(node, users):
            return Schedule.ROW
    if found is None or runs not in _COLUMNS:
        return None
    is_row = not lanes_fit(found) or _keeps_expanded(node)
    return Schedule.ROW if is_row else Schedule.COLUMN


_COLUMNS = ([True, False], [False, True, False], [True, False, True], [False, True, False, True])


def _keeps_expanded(node: Node) -> bool:
    view = strided(node.inputs[0])
    kept = (dim for d, dim in enumerate(view.dims if view else ()) if d not in node.attrs["dims"])
    return any(stride == const(0) for dim in kept for _, stride in merge(dim))


def _comes_back(node: Node, users: Mapping[Node, list[Node]]) -> bool:
    """Tell whether some result as large as the operand depends on the reduction and is stored."""
    size = node.inputs[0].numel
    seen, stack = {node}, [node]
    while stack:
        current = stack.pop()
        following = [u for u in users[current] if u.kind is not Kind.OPAQUE]
        if (
            current.numel == size
            and current.kind is Kind.POINTWISE
            and (not following or len(following) < len(users[current]))
        ):
            return True
        wanted = [u for u in following if u.kind is not Kind.CONTRACTION and u not in seen]
        seen.update(wanted)
        stack += wanted
    return False


def loop_of(node: Node, hints: Mapping[str, int]) -> object | None:
    """Return what reductions of different operands must have in common to run in one loop.

    None for long rows: two of them would not stay in registers.
    """
    x, dims = node.inputs[0], node.attrs["dims"]
    view = strided(x)
    length = x.numel.eval(hints) // max(node.numel.eval(hints), 1)
    if view is None or length > MAX_SHARED:
        return None
    return x.shape, dims, view.dims


def refusal(node: Node, draft: DraftGroup, schedules: Schedules) -> str | None:
    """Return why ``node`` cannot join ``draft``, or None when it can."""
    if node.kind is Kind.REDUCTION:
        return _refuse_reduction(node, draft, schedules)
    if (reason := refuse_lookup(node, draft.nodes, draft.schedule)) is not None:
        return reason
    if draft.schedule is Schedule.POINTWISE:
        return None if node.numel == draft.domain else "another number of elements"
    assert draft.kept is not None
    if len(_turns(node, draft)) > 1:
        return "reads a reduced value in two orders"
    after = any(base_of(i) in draft.reduced for i in node.inputs)
    if draft.schedule is Schedule.ROW and node.numel == draft.domain:
        return None if _stays_in_row(node, draft) else "needs the statistics of other rows"
    if after and node.numel == draft.kept:
        return None
    if draft.schedule is Schedule.ROW:
        return "another number of elements"
    if after:
        return "GLOBAL: needs the statistics of all programs"
    return "beside a column reduction, not before it"


def looks_into(node: Node, nodes: Collection[Node]) -> bool:
    """Tell whether a node looks up elements of one of these, which other programs of a kernel would
    compute."""
    return any(base_of(source) in nodes for source in node.inputs[: LOOKED_INTO.get(node.op, 0)])


def refuse_lookup(node: Node, members: Collection[Node], schedule: Schedule) -> str | None:
    """Return why ``node`` cannot be in a kernel with these members, or None: it would look up
    elements of them, or wants loops of its own."""
    if looks_into(node, members):
        return "looks up elements that other programs of this kernel compute"
    is_apart = has_own_loops(node) and schedule is not Schedule.POINTWISE
    return LOOPS_APART if is_apart else None


def has_own_loops(node: Node) -> bool:
    """Tell whether a node is printed as loops that no reduction shares."""
    return node.op == "bag" or (node.op == "cat" and len(node.inputs) >= MANY_PIECES)


def _refuse_reduction(node: Node, draft: DraftGroup, schedules: Schedules) -> str | None:
    operand = base_of(node.inputs[0])
    schedule = schedules[node]
    if any(map(has_own_loops, draft.nodes)):
        return LOOPS_APART
    if schedule is None:
        return "kept and reduced dims alternate in memory"
    is_member = operand in draft.nodes  # else it is read from memory, through whatever view
    if node.inputs[0].numel != draft.domain or (is_member and operand.numel != draft.domain):
        return "reduces another number of elements"
    if draft.schedule is Schedule.POINTWISE:
        if schedule is Schedule.COLUMN and not _all_before(operand, draft):
            return "column reduction beside other results"
        return None
    assert draft.first is not None
    if schedule is not draft.schedule or node.numel != draft.kept:
        return "reduces over other dims"
    turned = _turns(node, draft) - (_turns(draft.first, draft) or {()})
    if turned or not _same_loop(node, draft.first):
        return "reduces over other dims"
    if draft.schedule is Schedule.COLUMN and operand in draft.reduced:
        return "GLOBAL: reduces over a value that needs another reduction"
    return None


def _turns(node: Node, draft: DraftGroup) -> set[Turns]:
    """Return the orders, relative to the draft's first members, in which ``node`` reads members."""
    members, found = set(draft.nodes), set()
    for operand in node.inputs:
        base = base_of(operand)
        if base in members:
            found.add((*draft.turns.get(base, ()), *_permutations(operand)))
    return found


def _permutations(view: Node) -> Turns:
    """Return the permutations in a chain of views; moving dims of size 1 is none."""
    found: list[tuple[int, ...]] = []
    while view.kind is Kind.VIEW:
        if view.op == "permute":
            dims = [d for d in view.attrs["dims"] if view.inputs[0].shape[d] != ONE]
            if dims != sorted(dims):
                found.append(view.attrs["dims"])
        view = view.inputs[0]
    return tuple(reversed(found))


def _stays_in_row(node: Node, draft: DraftGroup) -> bool:
    """Tell whether results of reductions stand along kept dims only: ``x + x.sum(-1)`` is a
    transpose when x is square."""
    assert draft.first is not None
    shape, dims = draft.first.inputs[0].shape, draft.first.attrs["dims"]
    if node.shape != shape:
        return True
    for operand in node.inputs:
        if base_of(operand) in draft.reduced and operand.numel == draft.kept != draft.domain:
            skipped = len(shape) - len(operand.shape)
            if any(s != ONE and d + skipped in dims for d, s in enumerate(operand.shape)):
                return False
    return True


def _same_loop(node: Node, first: Node) -> bool:
    """Tell whether two reductions that keep equally many elements run over the same dims."""
    (x, dims), (y, others) = ((n.inputs[0], n.attrs["dims"]) for n in (node, first))
    if x.shape == y.shape:
        return bool(dims == others)
    return _reduces_last(x, dims) and _reduces_last(y, others)


def _reduces_last(x: Node, dims: tuple[int, ...]) -> bool:
    flags = [d in dims for d, size in enumerate(x.shape) if size != ONE]
    return flags == sorted(flags)


def _all_before(operand: Node, draft: DraftGroup) -> bool:
    """Tell whether every member is the operand or feeds it."""
    seen, stack = {operand}, [operand]
    first = min(member.serial for member in draft.nodes)
    while stack:
        for i in stack.pop().inputs:
            base = base_of(i)
            if base not in seen and base.serial >= first:
                seen.add(base)
                stack.append(base)
    return all(member in seen for member in draft.nodes)


def join(node: Node, draft: DraftGroup, schedules: Schedules) -> None:
    """Add a node for which ``refusal`` is None."""
    turns = _turns(node, draft) or {()}
    draft.turns[node] = min(turns, key=len)
    draft.nodes.append(node)
    if node.kind is Kind.REDUCTION:
        if draft.schedule is Schedule.POINTWISE:
            schedule = schedules[node]
            assert schedule is not None
            draft.schedule, draft.kept, draft.first = schedule, node.numel, node
        draft.reduced.add(node)
    elif any(base_of(i) in draft.reduced for i in node.inputs):
        draft.reduced.add(node)

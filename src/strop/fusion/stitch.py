"""Join a column reduction and the kernel that uses it, as one kernel for sizes where a row fits on
chip.

GroupNorm over channels-last memory is two launches: statistics that all programs share, then
what they normalise. Where one program can hold a whole group, one launch reads memory once.
Which of the two runs is decided for each shape (AStitch's regional and global scheme, ASPLOS '22).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strop.fusion.legality import looks_into
from strop.fusion.plan import FusionPlan, Group, Stitch
from strop.fusion.planner import computed_by, loaded
from strop.ir.affine import base_of
from strop.ir.graph import Graph, Node
from strop.ir.loops import Schedule
from strop.ir.ops import Kind


def stitches(graph: Graph, plan: FusionPlan) -> Iterator[Stitch]:
    """Yield pairs of groups that could be one kernel."""
    writers = {node: step for step in plan.groups for node in step.stores}
    stored = frozenset(writers)
    loads = {step: loaded(step, stored) for step in plan.groups}
    results = {base_of(o) for o in graph.outputs}
    readers: dict[Node, set[Group | Node]] = {}
    for step in plan.steps:
        for node in loads[step] if isinstance(step, Group) else map(base_of, step.inputs):
            readers.setdefault(node, set()).add(step)
    for number, group in enumerate(plan.steps):
        if not isinstance(group, Group) or group.schedule is not Schedule.COLUMN:
            continue
        reader = _only_reader(group, readers)
        if reader is None or not _covers(group, reader):
            continue
        made = frozenset(group.nodes)
        if any(looks_into(node, made) for node in computed_by(reader, stored)):
            continue
        host = _place(plan.steps, number, plan.steps.index(reader), loads, readers)
        if host is None:
            continue
        kept = tuple(n for n in group.stores if n in results or readers.get(n, set()) - {reader})
        nodes = tuple(dict.fromkeys((*group.nodes, *reader.nodes)))
        yield Stitch(group, reader, Group(Schedule.ROW, nodes, (*kept, *reader.stores)), host)


def _only_reader(group: Group, readers: dict[Node, set[Group | Node]]) -> Group | None:
    """Return the pointwise kernel that alone reads the reduced values."""
    reduced = [n for n in group.stores if n.numel != _domain(group)]
    found = {g for n in reduced for g in readers.get(n, ()) if isinstance(g, Group)}
    only = found.pop() if len(found) == 1 else None
    return only if only and only.schedule is Schedule.POINTWISE else None


def _domain(group: Group) -> object:
    return next(n for n in group.nodes if n.kind is Kind.REDUCTION).inputs[0].numel


def _covers(group: Group, reader: Group) -> bool:
    return all(store.numel == _domain(group) for store in reader.stores)


def _place(
    steps: Sequence[Group | Node],
    first: int,
    last: int,
    loads: dict[Group, set[Node]],
    readers: dict[Node, set[Group | Node]],
) -> Group | None:
    """Return where both could run: early, if the reader needs nothing made in between, else late,
    if nobody in between needs what the first one makes or could write over what it reads."""
    group, reader, between = steps[first], steps[last], steps[first + 1 : last]
    assert isinstance(group, Group)
    assert isinstance(reader, Group)
    made = {n for s in between for n in (s.stores if isinstance(s, Group) else (s,))}
    if any(isinstance(s, Node) and s.op == "write" for s in between):
        return None
    if not made & loads[reader]:
        return group
    wanted = any(not readers.get(n, set()).isdisjoint(between) for n in group.stores)
    return None if wanted else reader

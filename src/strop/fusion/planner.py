"""Turn a graph into a fusion plan. This is a pure function.

Greedy in execution order: a node joins a group of one of its producers if that is legal and
makes no cycle, else it opens a group. Then each value that other kernels read is either stored
or computed again by its readers, whichever moves fewer bytes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import torch

from strop.fusion.cost import Reading, has_loops, is_cheaper_again, times_computed
from strop.fusion.legality import (
    DraftGroup,
    is_fusible,
    join,
    loop_of,
    reduction_schedules,
    refusal,
    refuse_lookup,
)
from strop.fusion.parallelism import Workers, workers_of
from strop.fusion.plan import FusionPlan, Group, Refusal
from strop.ir.affine import base_of
from strop.ir.graph import Graph, Node
from strop.ir.loops import Schedule
from strop.ir.ops import LOOKED_INTO, OPS, Kind

# Large values that a kernel reads before no further reduction of the same loop joins it. SD1.5's
# gradients had kernels of 30, whose tiles of one row spilled 3 KB a thread.
MOST_STREAMS = 8
# What is smaller than that may have memory for longer, if that saves a launch.
SMALL_BYTES = 16 << 20
NEAR = 3  # steps from an element that is looked up: widened, chosen, weighted


def plan(graph: Graph, apart: Set[Node] = frozenset(), device: str = "cuda") -> FusionPlan:
    """Plan ``graph``; equal graphs give equal plans. Nodes ``apart`` share no kernel."""
    drafts, refusals = _Grouping(graph, apart, workers_of(device)).run()
    stored = _stored(graph, drafts, apart, workers_of(device))
    groups = _groups(drafts, stored)
    calls = [node for node in graph.nodes if _is_call(node)]
    return FusionPlan(_in_order(graph, groups, calls, stored), tuple(refusals))


def _is_call(node: Node) -> bool:
    return node.kind in (Kind.CONTRACTION, Kind.OPAQUE) and node.op != "input"


def _read_by(draft: DraftGroup) -> set[Node]:
    """Return what a kernel's members read of others."""
    return {base_of(i) for node in draft.nodes for i in node.inputs} - set(draft.nodes)


class _Grouping:
    """Run the greedy sweep. ``before[g]`` is the set (bit mask) of steps that g depends on."""

    def __init__(self, graph: Graph, apart: Set[Node], workers: Workers) -> None:
        self.graph, self.apart = graph, apart
        self.home: dict[Node, int] = {}
        self.drafts: list[DraftGroup | None] = []  # None: a call
        self.before: list[int] = []
        self.needed = 0  # steps on which others depend
        self.refusals: list[Refusal] = []
        self.schedules, self.users = reduction_schedules(graph, workers), graph.users()
        self.readers, self.results = _all_readers(graph), frozenset(map(base_of, graph.outputs))
        self.reductions: dict[object, Node] = {}  # by operand and dims, and by loop
        self.cats: dict[object, Node] = {}  # the last one, by a piece and the shapes of all

    def run(self) -> tuple[list[DraftGroup], list[Refusal]]:
        for node in self.graph.nodes:
            if is_fusible(node):
                self._place(node)
            elif _is_call(node):
                self._open(node, None)
        return [d for d in self.drafts if d is not None], self.refusals

    def _producers(self, node: Node) -> list[tuple[int, Node]]:
        """Return (step, value) for each operand that some step computes, latest step first."""
        bases = dict.fromkeys(base_of(i) for i in node.inputs)
        found = [(self.home[b], b) for b in bases if b in self.home]
        return sorted(found, key=lambda pair: -pair[0])

    def _candidates(self, node: Node) -> list[tuple[int, Node]]:
        """Return steps that ``node`` may join: its producers, and reductions of the same operand or
        over the same loop.

        Kernels with reductions first: other operands can be computed again there.
        """
        found = self._producers(node)
        if node.op == "cat":
            found += self._behind(found)
            found += self._cat_alike(node)
        found.sort(key=lambda pair: self._is_pointwise(pair[0]))
        if node.kind is Kind.REDUCTION:
            loop = loop_of(node, self.graph.hints) or node
            if loop in self.reductions and self._is_full(self.home[self.reductions[loop]]):
                self.reductions[loop] = node
            sibling = self.reductions.setdefault((node.inputs[0], node.attrs["dims"]), node)
            if sibling is not node:
                found.append((self.home[sibling], sibling))
            sibling = self.reductions.setdefault(loop, node)
            if sibling is not node:
                if self._is_large(node.inputs[0]) and self._feeds_a_call(self.home[sibling]):
                    self.reductions[loop] = node
                else:
                    found.append((self.home[sibling], sibling))
            if loop is node and self.schedules[node] is Schedule.COLUMN:
                found += self._beside(node)
        if self.schedules.get(node) is Schedule.ROW:
            found.sort(key=lambda pair: self._is_for(node, pair[0]))
        return found

    def _beside(self, node: Node) -> Iterator[tuple[int, Node]]:
        """Yield the last sum over the same many rows, if its kernel reads what ``node`` sums: the
        gradients of a norm's weight and bias are sums of one value. Others would have what they
        read kept for longer."""
        value = node.inputs[0]
        loop = Schedule.COLUMN, value.shape, node.attrs["dims"]
        last = self.reductions.get(loop)
        self.reductions[loop] = node
        draft = self.drafts[self.home[last]] if last in self.home else None
        if last is not None and draft is not None and base_of(value) in _read_by(draft):
            yield self.home[last], last

    def _cat_alike(self, node: Node) -> Iterator[tuple[int, Node]]:
        """Yield the last step that puts pieces of the same sizes together, one of which is cut from
        the same value: keys and values of a cache are copied by one launch. Large ones gain nothing
        by that, and what has no value in common may be wanted at other times."""
        looks = node.dtype, tuple(x.shape for x in node.inputs), tuple(sorted(node.attrs.items()))
        for base in dict.fromkeys(map(base_of, node.inputs)):
            alike = self.cats.get((base, *looks))
            self.cats[base, *looks] = node
            if alike in self.home and not self._is_large(node):
                step = self.home[alike]
                if self._is_pointwise(step):
                    yield step, alike

    def _behind(self, pieces: Iterable[tuple[int, Node]]) -> list[tuple[int, Node]]:
        """Return steps that compute what these pieces are cut from."""
        steps = {step for step, _ in pieces}
        drafts = [draft for step in steps if (draft := self.drafts[step]) and _is_light(draft)]
        found = {pair for d in drafts for member in d.nodes for pair in self._producers(member)}
        return sorted((p for p in found if p[0] not in steps), key=lambda p: (-p[0], p[1].serial))

    def _is_for(self, node: Node, step: int) -> bool:
        """Tell whether a step only computes what ``node`` reads, and will be where that is."""
        draft = self.drafts[step]
        if draft is None or draft.schedule is not Schedule.POINTWISE:
            return False
        own = {node, *draft.nodes}
        return all(own.issuperset(self.users[member]) for member in draft.nodes)

    def _is_full(self, step: int) -> bool:
        """Tell whether a kernel reads as many large values as leave a tile enough rows."""
        draft = self.drafts[step]
        if draft is None:
            return True
        hints, size = self.graph.hints, draft.domain.eval(self.graph.hints)
        large = sum(2 * value.numel.eval(hints) > size for value in _read_by(draft))
        return large >= MOST_STREAMS

    def _is_large(self, node: Node) -> bool:
        return node.numel.eval(self.graph.hints) * node.dtype.itemsize > SMALL_BYTES

    def _feeds_a_call(self, step: int) -> bool:
        """Tell whether a call that comes before reads what a step computes. Who joins that step by
        its loop alone puts the call off, and what both read has memory at the same time: q, k and v
        of two attentions in SD3.5's blocks."""
        bit = 1 << step
        if not self.needed & bit:
            return False
        pairs = zip(self.drafts, self.before, strict=True)
        return any(draft is None and before & bit for draft, before in pairs)

    def _is_pointwise(self, step: int) -> bool:
        draft = self.drafts[step]
        return draft is None or draft.schedule is Schedule.POINTWISE

    def _place(self, node: Node) -> None:
        for step, producer in self._candidates(node):
            draft = self.drafts[step]
            if draft is None:
                continue
            if node in self.apart or not self.apart.isdisjoint(draft.nodes):
                self.refusals.append(Refusal(producer, node, "indices do not divide"))
                continue
            reason = refusal(node, draft, self.schedules)
            if reason is None and self._makes_cycle(node, step) and not self._absorb(node, step):
                reason = "another operand depends on this kernel"
            if reason is None:
                join(node, draft, self.schedules)
                self._enter(node, step)
                return
            self.refusals.append(Refusal(producer, node, reason))
        self._open(node, self._new_draft(node))

    def _new_draft(self, node: Node) -> DraftGroup:
        draft = DraftGroup(Schedule.POINTWISE, node.numel)
        if node.kind is Kind.REDUCTION:
            draft.domain = node.inputs[0].numel
            if self.schedules[node] is None:
                raise AssertionError(f"{node}: the layout pass copies such operands")
        join(node, draft, self.schedules)
        return draft

    def _open(self, node: Node, draft: DraftGroup | None) -> None:
        self.drafts.append(draft)
        self.before.append(0)
        self._enter(node, len(self.drafts) - 1)

    def _makes_cycle(self, node: Node, step: int) -> bool:
        bit = 1 << step
        found = (self.home.get(base_of(i), step) for i in node.inputs)
        return any(s != step and self.before[s] & bit for s in found)

    def _absorb(self, node: Node, step: int) -> bool:
        """Move into the kernel what lies between it and ``node``, if that is no more than pieces of
        what ``node`` puts together: halves of a rotation, which are smaller than the kernel's sweep
        and opened a kernel each."""
        draft, bit = self.drafts[step], 1 << step
        if draft is None or node.op != "cat":
            return False
        between, stack, members = set[int](), [node], {node}
        while stack:
            for base in map(base_of, stack.pop().inputs):
                at = self.home.get(base, step)
                if at == step or at in between or not self.before[at] & bit:
                    continue
                piece = self.drafts[at]
                if piece is None or not _is_light(piece) or draft.schedule is Schedule.COLUMN:
                    return False
                between.add(at)
                members.update(piece.nodes)
                stack += piece.nodes
        pieces = members - {node}
        if pieces & self.results or any(not members.issuperset(self.readers[m]) for m in pieces):
            return False
        inside = {*draft.nodes, *pieces}
        if any(refuse_lookup(piece, inside, draft.schedule) for piece in pieces):
            return False
        for at in between:
            self.drafts[at] = None
        for member in sorted(pieces, key=lambda m: m.serial):
            join(member, draft, self.schedules)
            self._enter(member, step)
        return True

    def _enter(self, node: Node, step: int) -> None:
        """Record where ``node`` lives; whatever depends on ``step`` inherits its new operands."""
        self.home[node] = step
        if node.kind is Kind.REDUCTION:  # blocks repeat their loops: the next ones join the last
            self.reductions[loop_of(node, self.graph.hints) or node] = node
        added = 0
        for base in map(base_of, node.inputs):
            producer = self.home.get(base, step)
            if producer != step:
                added |= (1 << producer) | self.before[producer]
        if added & ~self.before[step]:
            self.needed |= added
            self.before[step] |= added
            bit = 1 << step
            for other in range(len(self.before)) if self.needed & bit else ():
                if self.before[other] & bit:
                    self.before[other] |= added


def _is_light(draft: DraftGroup) -> bool:
    """Tell whether a draft is arithmetic that costs next to nothing for elements that want another
    piece."""
    is_pointwise = draft.schedule is Schedule.POINTWISE
    return is_pointwise and not any(OPS[node.op].is_heavy for node in draft.nodes)


def computed_by(group: Group, stored: Set[Node]) -> frozenset[Node]:
    """Return what the kernel computes: its own nodes, and values that nobody stored."""
    found, stack = set(group.nodes), list(group.nodes)
    while stack:
        for base in map(base_of, stack.pop().inputs):
            if is_fusible(base) and base not in stored and base not in found:
                found.add(base)
                stack.append(base)
    return frozenset(found)


def _stored(
    graph: Graph, drafts: list[DraftGroup], apart: Set[Node], workers: Workers
) -> set[Node]:
    """Return the fusible values that some kernel writes to memory."""
    home = {node: draft for draft in drafts for node in draft.nodes}
    readers = _readers(graph)
    needed = {base_of(o) for o in graph.outputs}
    needed |= {base_of(i) for n in graph.nodes if _is_call(n) for i in n.inputs}
    looked_into = ((n, LOOKED_INTO.get(n.op, 0)) for n in graph.nodes)
    needed |= {base_of(source) for n, count in looked_into for source in n.inputs[:count]}
    stored = {node for node in needed if node.kind in (Kind.POINTWISE, Kind.REDUCTION)}
    ends = _ends(drafts, home, readers, stored, graph.hints)
    for node in graph.nodes:
        if node not in home or node in stored:
            continue
        draft = home[node]
        outside = [r for r in readers[node] if home.get(r) is not draft]
        if not outside:
            continue
        kernels = len({id(ends[id(home[r])]) for r in readers[node]})
        if has_loops(node, stored) and not _is_read_once(node, outside, kernels, home):
            stored.add(node)
            continue
        if node in draft.reduced or node in apart:
            stored.add(node)
            continue
        reading = _reading(node, outside, kernels, home, graph.hints)
        if not is_cheaper_again(node, reading, stored, graph.hints, workers.launch):
            stored.add(node)
    for node in sorted(stored - needed - apart, key=lambda n: n.serial):
        if (narrow := _before_widening(node)) is not None and home.get(narrow) is home[node]:
            stored.remove(node)
            stored.add(narrow)
    return stored


def _reading(
    node: Node,
    outside: Sequence[Node],
    kernels: int,
    home: Mapping[Node, DraftGroup],
    hints: Mapping[str, int],
) -> Reading:
    largest = max(home[r].domain.eval(hints) for r in outside)
    again = dict[int, int]()  # a kernel computes a value once for all that reads it there
    for reader in outside:
        kernel, count = id(home[reader]), times_computed(node, reader, hints)
        again[kernel] = max(again.get(kernel, 0), count)
    return Reading(kernels, largest, sum(again.values()), _look_up(node, outside))


def _look_up(node: Node, readers: Sequence[Node]) -> bool:
    """Tell whether all readers look up what is larger than the value, by it or beside it."""
    return all(
        reader.op == "take" or (reader.numel != node.numel and _has_take(reader, NEAR))
        for reader in readers
    )


def _has_take(node: Node, depth: int) -> bool:
    """Tell whether a value is one that was looked up, after a few steps of arithmetic at most."""
    if node.op == "take" or not depth:
        return node.op == "take"
    near = (base_of(x) for x in node.inputs)
    return any(_has_take(x, depth - 1) for x in near if x.kind is Kind.POINTWISE)


def _is_read_once(
    node: Node, outside: Sequence[Node], kernels: int, home: Mapping[Node, DraftGroup]
) -> bool:
    """Tell whether one kernel without a reduction reads each element once: as a piece, or as one of
    as many elements as it has."""
    once = all(
        home[r].schedule is Schedule.POINTWISE and (r.op == "cat" or r.numel == node.numel)
        for r in outside
    )
    return kernels == 1 and once


def _before_widening(node: Node) -> Node | None:
    """Return what a cast to a wider type reads, which has all its digits in fewer bytes."""
    if node.op != "cast":
        return None
    (x,) = node.inputs
    is_exact = torch.promote_types(x.dtype, node.dtype) == node.dtype
    is_float = x.dtype.is_floating_point and node.dtype.is_floating_point
    return x if x.kind is Kind.POINTWISE and is_exact and is_float else None


def _ends(
    drafts: Iterable[DraftGroup],
    home: Mapping[Node, DraftGroup],
    readers: Mapping[Node, Sequence[Node]],
    stored: Set[Node],
    hints: Mapping[str, int],
) -> dict[int, DraftGroup]:
    """Return the draft whose kernel computes what a draft has: another one, if that alone reads it
    and is no larger. The latest come first, as readers come later."""
    ends: dict[int, DraftGroup] = {}
    for draft in reversed(list(drafts)):
        outside = {
            id(ends.get(id(home[r]), home[r])): home[r]
            for node in draft.nodes
            for r in readers[node]
            if home[r] is not draft
        }
        ends[id(draft)] = draft
        if len(outside) == 1 and not draft.reduced and stored.isdisjoint(draft.nodes):
            (reader,) = outside.values()
            if reader.domain.eval(hints) <= draft.domain.eval(hints):
                ends[id(draft)] = ends.get(id(reader), reader)
    return ends


def _all_readers(graph: Graph) -> dict[Node, set[Node]]:
    """Return what reads each value, through views."""
    readers: dict[Node, set[Node]] = defaultdict(set)
    for node in graph.nodes:
        if node.kind is not Kind.VIEW:
            for operand in node.inputs:
                readers[base_of(operand)].add(node)
    return readers


def _readers(graph: Graph) -> dict[Node, list[Node]]:
    """Return fusible readers of each value, through views."""
    readers: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if is_fusible(node):
            for base in dict.fromkeys(base_of(i) for i in node.inputs):
                readers[base].append(node)
    return readers


def _groups(drafts: Iterable[DraftGroup], stored: set[Node]) -> list[Group]:
    groups = []
    claimed: set[Node] = set()
    for draft in drafts:
        stores = tuple(n for n in draft.nodes if n in stored)
        claimed.update(stores)
        if stores:
            groups.append(_trimmed(draft, stores))
    loose = sorted(stored - claimed, key=lambda n: n.serial)  # constants that a call reads
    groups += [Group(Schedule.POINTWISE, (node,), (node,)) for node in loose]
    return groups


def _trimmed(draft: DraftGroup, stores: tuple[Node, ...]) -> Group:
    """Drop members that no store needs (their readers compute them)."""
    live = set(stores)
    for node in reversed(draft.nodes):
        if node in live:
            live.update(base_of(i) for i in node.inputs)
    nodes = tuple(n for n in draft.nodes if n in live)
    has_reduction = any(n.kind is Kind.REDUCTION for n in nodes)
    return Group(draft.schedule if has_reduction else Schedule.POINTWISE, nodes, stores)


def _in_order(
    graph: Graph, groups: list[Group], calls: list[Node], stored: set[Node]
) -> tuple[Group | Node, ...]:
    """Order steps topologically, close to the user's order (by each step's last node)."""
    position = _positions(graph)
    steps: list[Group | Node] = [*groups, *calls]
    writer: dict[Node, int] = {}
    for index, step in enumerate(steps):
        for node in step.stores if isinstance(step, Group) else (step,):
            writer[node] = index
    reads = [loaded(step, stored) for step in steps]
    needs = [{writer[v] for v in found if v in writer} - {i} for i, found in enumerate(reads)]
    for index, step in enumerate(steps):  # what computes from an argument's old values comes first
        if isinstance(step, Node) and step.op == "write":
            target = base_of(step.inputs[0])
            needs[index] |= {i for i, found in enumerate(reads) if target in found} - {index}
    readers: dict[int, list[int]] = defaultdict(list)
    for index, sources in enumerate(needs):
        for source in sources:
            readers[source].append(index)
    rank = [max(position[n] for n in (s.stores if isinstance(s, Group) else (s,))) for s in steps]
    ready = [(rank[i], i) for i, sources in enumerate(needs) if not sources]
    heapq.heapify(ready)
    order: list[Group | Node] = []
    waiting = [len(sources) for sources in needs]
    while ready:
        _, index = heapq.heappop(ready)
        order.append(steps[index])
        for reader in readers[index]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (rank[reader], reader))
    assert len(order) == len(steps), "the fusion plan has a cycle"
    return tuple(order)


def _positions(graph: Graph) -> dict[Node, int]:
    """Return each node's position; what lays out a result has that of what it reads, as it stands
    at the end of the graph and would have to wait there for all the others."""
    position: dict[Node, int] = {}
    results = set(graph.outputs)
    for number, node in enumerate(graph.nodes):
        source = base_of(node.inputs[0]) if node.op == "copy" and node in results else node
        position[node] = number if source is node or source.op == "input" else position[source]
    return position


def loaded(step: Group | Node, stored: Set[Node]) -> set[Node]:
    """Return the computed values and the arguments that a step loads."""
    own = set(step.stores) if isinstance(step, Group) else set()
    stack = list(step.stores) if isinstance(step, Group) else [step]
    seen, loads = set(stack), set()
    while stack:
        for operand in stack.pop().inputs:
            base = base_of(operand)
            if base in seen:
                continue
            seen.add(base)
            if _is_call(base) or base.op == "input" or (base in stored and base not in own):
                loads.add(base)
            elif base.op != "constant":
                stack.append(base)
    return loads

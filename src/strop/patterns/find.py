"""Find the matches of one pattern in a graph, and near misses with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.errors import PatternError, StropError
from strop.ir.graph import Graph, Node, Shape, compute_nodes
from strop.ir.ops import OPS, Kind
from strop.patterns.match import (
    Bound,
    Skeleton,
    ValueNumbers,
    choices,
    is_number,
    is_transparent,
    replayed,
    stripped,
)
from strop.patterns.pattern import Pattern
from strop.patterns.values import AnySizeError, value_of

MOST_MISSES = 50  # of one pattern in one graph


@dataclass(frozen=True, slots=True)
class Match:
    """Describe a match. ``results`` as the search gives them; ``replaced``: the node of the graph
    that each is a view of; ``inside``: what nobody computes any more."""

    pattern: Pattern
    arguments: tuple[Node, ...]
    attributes: Mapping[str, Any]
    results: tuple[Node, ...]
    single: bool
    replaced: Mapping[Node, int]
    inside: frozenset[Node]
    origin: str


@dataclass(frozen=True, slots=True)
class Miss:
    """Say where a pattern nearly matched, and why it did not."""

    pattern: str
    origin: str
    reason: str


@dataclass(frozen=True, slots=True)
class Near:
    """Say how much of a search is there, from 0 to 1, and what is wrong."""

    share: float
    reason: str


@dataclass
class Finder:
    """Search one graph for one pattern, with the state of the search."""

    graph: Graph
    pattern: Pattern
    device: str
    matches: list[Match] = field(default_factory=list)
    misses: dict[Node, Miss] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.numbers = ValueNumbers(self.graph)
        self.users = self.graph.users()
        self.results = set(self.graph.outputs)
        self.match_of: dict[Node, Match] = {}  # of each node that it takes
        self.near: set[Node] = set()  # of which a miss tells
        self.skeleton = Skeleton(self.pattern.places)

    def run(self) -> None:
        wanted = self._main_result()
        roots: dict[str, list[Node]] = {}
        for node in self.graph.nodes:
            roots.setdefault(node.op, []).append(node)
        for node in roots.get(wanted.op, ()):
            self._try_at(wanted, node)
        for part in self._large_parts(wanted):
            for node in roots.get(part.op, ()):
                if node not in self.match_of and node not in self.near:
                    self._try_part(wanted, part, node)

    def _main_result(self) -> Node:
        """Return a result that depends on all arguments."""
        graph = self.pattern.skeleton
        behind = {node: set[Node]({node} if node.op == "input" else ()) for node in graph.nodes}
        for node in graph.nodes:
            for operand in node.inputs:
                behind[node] |= behind[operand]
        return stripped(max(graph.outputs, key=lambda node: len(behind[node])))

    def _try_at(self, wanted: Node, node: Node) -> None:
        best = self._best(wanted, node)
        if isinstance(best, Match):
            self.matches.append(best)
            self.match_of |= dict.fromkeys(best.inside | best.replaced.keys(), best)
        elif best is not None:
            self._miss(node, best.reason, self._computed_for(wanted, node))

    def _best(self, wanted: Node, node: Node) -> Match | Near | None:
        """Return what comes of binding the arguments so that ``wanted`` of the skeleton is
        ``node``: a match if there is one. None if nothing binds them all."""
        best: Near | None = None
        for bound in self.skeleton.bindings(wanted, node):
            if not all(argument in bound for argument in self.pattern.skeleton.inputs):
                continue
            for arguments in choices(self.pattern.skeleton.inputs, bound):
                found = self._exactly(arguments, self._attributes(bound), node)
                if isinstance(found, Match):
                    return found
                best = max(best or found, found, key=lambda near: near.share)
        return best

    def _attributes(self, bound: Bound) -> dict[str, Any]:
        return {name: bound.get(name, value) for name, value in self.pattern.attributes.items()}

    def _exactly(
        self, arguments: tuple[Node, ...], attributes: Mapping[str, Any], root: Node
    ) -> Match | Near:
        specs = [(node.shape, node.dtype) for node in arguments]
        try:
            searched = self.pattern.at(specs, attributes, self.graph.hints)
        except StropError as error:
            return Near(0, f"search cannot be traced for these arguments: {error}")
        new = replayed(searched.graph, arguments)
        work = list(compute_nodes(searched.graph))
        for number, node in enumerate(work):
            if not self._is_there(new[node], arguments):
                return Near(number / len(work), self._difference(new[node], set(new.values())))
        results = tuple(new[node] for node in searched.graph.outputs)
        replaced = {
            twin: number
            for number, result in enumerate(results)
            for twin in self.numbers.twins(_unviewed(result))
        }
        if root not in replaced and stripped(root) not in map(stripped, replaced):
            return Near(1, "its result is another value")
        inside = frozenset(self._inside(new.values(), arguments) - replaced.keys())
        reason = self._refused(arguments, attributes, replaced, inside)
        if reason:
            return Near(1, reason)
        return Match(
            self.pattern,
            arguments,
            attributes,
            results,
            searched.single,
            replaced,
            inside,
            _origin([*inside, *replaced], root),
        )

    def _is_there(self, node: Node, arguments: Sequence[Node]) -> bool:
        """Tell whether a node is in the graph. Views are where their base is: the graph may have
        folded them into others."""
        return not _is_work(node) or node in arguments or bool(self.numbers.twins(node))

    def _inside(self, nodes: Any, arguments: Sequence[Node]) -> set[Node]:
        """Return everything that the search computes, as nodes of the graph."""
        free = set(map(stripped, arguments)) | set(arguments)
        work = (n for n in nodes if _is_work(n) and n not in free and not is_number(n))
        return {
            twin
            for node in work
            if not (is_transparent(node) and stripped(node) in free)
            for twin in self.numbers.twins(node)
        }

    def _refused(
        self,
        arguments: Sequence[Node],
        attributes: Mapping[str, Any],
        replaced: Mapping[Node, int],
        inside: frozenset[Node],
    ) -> str:
        """Return why what is there may not be replaced, or nothing."""
        if not self.match_of.keys().isdisjoint(inside | replaced.keys()):
            return "a part of it belongs to another match"
        if not self._behind(arguments).isdisjoint(inside | replaced.keys()):
            return "an argument is computed from one of its values"
        for node in sorted(inside, key=lambda n: n.serial):
            why = self._seen_outside(node, inside, replaced)
            if why:
                return why
        return self._asked(arguments, attributes)

    def _behind(self, nodes: Iterable[Node]) -> set[Node]:
        """Return the nodes that these depend on, and themselves; a match counts as a whole."""
        stack, seen = list(nodes), set(nodes)
        while stack:
            node = stack.pop()
            match = self.match_of.get(node)
            needed = (*node.inputs, *match.arguments) if match else node.inputs
            new = [i for i in needed if i not in seen]
            seen.update(new)
            stack += new
        return seen

    def _seen_outside(
        self, node: Node, inside: frozenset[Node], replaced: Mapping[Node, int]
    ) -> str:
        """Return who else wants a value that the replacement does not give, or nothing."""
        stack = [node]
        while stack:
            value = stack.pop()
            if value in self.results:
                return f"its {node.op} is a result of the graph as well"
            for user in self.users[value]:
                if user in inside or user in replaced:
                    continue
                if user.kind is not Kind.VIEW:
                    return f"its {node.op} is read elsewhere, by {_place(user)}"
                stack.append(user)
        return ""

    def _asked(self, arguments: Sequence[Node], attributes: Mapping[str, Any]) -> str:
        """Return what ``when`` has against the match, or nothing."""
        when = self.pattern.when
        if when is None:
            return ""
        try:
            answer = when(*(value_of(node, self.device) for node in arguments), **attributes)
        except AnySizeError as error:
            return f"when asks for {error}, which is not the same for all sizes"
        except Exception as error:
            given = ", ".join(map(_typed, arguments))
            error.add_note(f"raised by when of the pattern {self.pattern.name!r}, for ({given})")
            raise
        if isinstance(answer, str):
            return f"when said: {answer}"
        if not isinstance(answer, bool):
            raise PatternError(
                f"pattern {self.pattern.name!r}: when returned {answer!r}; it returns True, or"
                " False or a text, the reason why not"
            )
        return "" if answer else "when said no"

    def _difference(self, wanted: Node, known: set[Node]) -> str:
        """Say what reads the operands of ``wanted`` instead of it."""
        mine = {twin for node in known for twin in self.numbers.twins(node)}
        found = [
            user
            for operand in wanted.inputs
            for twin in self._present(operand)
            for user in self._readers(twin)
            if user not in mine
        ]
        for user in found:
            if user.op == wanted.op:
                return f"differs at {_place(user)}: {_told(wanted, user)}"
        if found:
            return f"differs at {_place(found[0])}: {wanted.op} expected, {found[0].op} found"
        return f"it has no {wanted.op}({', '.join(map(_name, wanted.inputs))})"

    def _present(self, node: Node) -> Sequence[Node]:
        """Return the nodes of the graph that are this value, or what it is a view of."""
        twins = self.numbers.twins(node)
        if twins or node.kind is not Kind.VIEW:
            return twins
        return self._present(node.inputs[0])

    def _readers(self, node: Node) -> Iterator[Node]:
        """Yield the readers of a node, through views."""
        for user in self.users.get(node, ()):
            if user.kind is Kind.VIEW:
                yield from self._readers(user)
            else:
                yield user

    # near misses: a large part of the skeleton, and then something else

    def _large_parts(self, wanted: Node) -> list[Node]:
        """Return values inside the skeleton with at least half of its work, larger ones first."""
        sizes = {node: len(_work_behind(node)) for node in _work_behind(wanted)}
        parts = [
            n for n, size in sizes.items() if n is not wanted and size >= max(2, sizes[wanted] / 2)
        ]
        return sorted(parts, key=lambda n: -sizes[n])

    def _try_part(self, wanted: Node, part: Node, node: Node) -> None:
        bound = next(self.skeleton.bindings(part, node), None)
        covered = self._computed_for(part, node)
        if bound is None or not self.match_of.keys().isdisjoint(covered):
            return
        near = self._best(part, node)
        if near is not None:  # it binds all arguments, so that one can tell exactly
            self.near |= covered
            if isinstance(near, Near) and 0.5 <= near.share < 1:
                self._miss(node, near.reason, covered)
            return
        (reader, *_) = [n for n in _work_behind(wanted) if part in map(stripped, n.inputs)]
        users = [u for u in self._readers_through(node) if u not in covered]
        if not users:
            reason = f"differs behind {_place(node)}: {reader.op} expected, a result of the graph"
        else:
            found = next((u for u in users if u.op == reader.op), users[0])
            what = f"{reader.op} expected, {found.op} found"
            if found.op == reader.op:
                what = "its other operand is another one"
            reason = f"differs at {_place(found)}: {what}"
        self._miss(node, reason, covered)

    def _readers_through(self, node: Node) -> Iterator[Node]:
        for user in self.users[node]:
            if is_transparent(user):
                yield from self._readers_through(user)
            else:
                yield user

    def _computed_for(self, wanted: Node, node: Node) -> set[Node]:
        """Return nodes of the graph as far behind ``node`` as the skeleton reaches behind
        ``wanted``."""
        found, stack = set[Node](), [(wanted, node)]
        while stack:
            left, right = map(stripped, stack.pop())
            if left.op == right.op and left.op not in ("input", "constant") and right not in found:
                found.add(right)
                stack += zip(left.inputs, right.inputs, strict=False)
        return found

    def _miss(self, node: Node, reason: str, near: set[Node]) -> None:
        self.near |= near | {node}
        if len(self.misses) < MOST_MISSES:
            self.misses[node] = Miss(self.pattern.name, node.origin, reason)


def _origin(nodes: Iterable[Node], root: Node) -> str:
    """Return the module that most of them come from."""
    counts = Counter(node.origin for node in nodes)
    return max(counts, key=lambda origin: (counts[origin], origin == root.origin, origin))


def _unviewed(node: Node) -> Node:
    """Return what a result is all of, in another shape or order."""
    while OPS[node.op].has_all_once:
        node = node.inputs[0]
    return node


def _is_work(node: Node) -> bool:
    return node.kind is not Kind.VIEW and node.op not in ("input", "constant")


def _work_behind(node: Node) -> dict[Node, None]:
    """Return nodes of a skeleton that compute something, from the result back."""
    found, stack = dict[Node, None](), [node]
    while stack:
        value = stripped(stack.pop())
        if _is_work(value) and value not in found:
            found[value] = None
            stack += value.inputs
    return found


def _place(node: Node) -> str:
    return f"{node.op} in {node.origin or 'the module'}"


def _name(node: Node) -> str:
    if node.op == "constant":
        return str(node.attrs["value"])
    return "an argument" if node.op == "input" else node.op


def _type(dtype: Any, shape: Shape) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def _told(wanted: Node, found: Node) -> str:
    """Return what two nodes of one operator differ in."""
    for name, value in wanted.attrs.items():
        if repr(found.attrs.get(name)) != repr(value):
            return f"{name}={value} expected, {found.attrs.get(name)} found"
    if (wanted.dtype, wanted.shape) != (found.dtype, found.shape):
        return (
            f"{_type(wanted.dtype, wanted.shape)} expected, {_type(found.dtype, found.shape)} found"
        )
    for left, right in zip(wanted.inputs, found.inputs, strict=False):
        if left.op != right.op or repr(left.attrs) != repr(right.attrs):
            return f"operand {_name(left)} expected, {_name(right)} found"
    return "other operands"


def _typed(node: Node) -> str:
    return f"{str(node.dtype).removeprefix('torch.')}[{', '.join(map(str, node.shape))}]"

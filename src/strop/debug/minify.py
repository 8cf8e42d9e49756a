"""Find, by delta debugging, the smallest graph that still fails in the same way.

Each round tries smaller graphs and keeps those that fail: an earlier node as the only result,
runs of nodes replaced by inputs with random values, nodes replaced by one of their operands, and
smaller sizes. It ends when nothing more can go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from strop.debug.case import Case
from strop.ir.graph import Graph, Node, Ref, compute_nodes

Predicate = Callable[[Case], bool]
SMALL = (1, 2, 3, 5)  # sizes to try


@dataclass
class MinifyProgress:
    """Hold what ``watch`` is told after each try."""

    tries: int = 0
    num_nodes: int = 0


def minify(
    case: Case, fails: Predicate, watch: Callable[[MinifyProgress], None] = lambda p: None
) -> Case:
    """Find the smallest case that fails; ``case`` itself must fail."""
    search = _Search(case, fails, watch)
    search.one_output()
    search.earliest_output()
    while search.shrink():
        pass
    search.smaller_sizes()
    return search.best


@dataclass
class _Search:
    best: Case
    fails: Predicate
    watch: Callable[[MinifyProgress], None]

    def __post_init__(self) -> None:
        self.progress = MinifyProgress(num_nodes=num_nodes(self.best.graph))

    def try_graph(self, graph: Graph) -> bool:
        """Keep ``graph`` if it fails."""
        returned = tuple(Ref(i) for i in range(len(graph.outputs)))
        signature = replace(self.best.signature, returned=returned)
        return self.try_case(replace(self.best, graph=graph, signature=signature))

    def try_case(self, candidate: Case) -> bool:
        self.progress.tries += 1
        failed = self.fails(candidate)
        if failed:
            self.best = candidate
            self.progress.num_nodes = num_nodes(candidate.graph)
        self.watch(self.progress)
        return failed

    def one_output(self) -> None:
        graph = self.best.graph
        for output in graph.outputs if len(graph.outputs) > 1 else ():
            if self.try_graph(rebuilt(graph, [output])):
                return

    def earliest_output(self) -> None:
        """Bisect for a result as early as possible: what is wrong stays wrong downstream."""
        graph = self.best.graph
        nodes = [n for n in compute_nodes(graph) if _is_value(n)]
        low, high = 0, len(nodes) - 1
        while low < high:
            middle = (low + high) // 2
            if self.try_graph(rebuilt(graph, [nodes[middle]])):
                high = middle
            else:
                low = middle + 1

    def shrink(self) -> bool:
        """Run one round over all nodes, in runs from half of them down to one; tell whether it
        helped."""
        before = num_nodes(self.best.graph)
        size = max(before // 2, 1)
        while size:
            self._cut_runs(size)
            size //= 2
        self._bypass()
        return num_nodes(self.best.graph) < before

    def _cut_runs(self, size: int) -> None:
        position = 0
        while True:
            graph = self.best.graph
            nodes = [n for n in graph.nodes if n.op != "input" and n not in graph.outputs]
            run = [n for n in nodes[position : position + size] if _is_value(n)]
            if position >= len(nodes):
                return
            if not run or not self.try_graph(rebuilt(graph, graph.outputs, set(run))):
                position += size

    def _bypass(self) -> None:
        """Replace a node by an operand that looks the same."""
        position = 0
        while position < len(self.best.graph.nodes):
            graph = self.best.graph
            node = graph.nodes[position]
            smaller = (
                rebuilt(graph, graph.outputs, instead={node: operand}) for operand in _twins(node)
            )
            if not any(map(self.try_graph, smaller)):
                position += 1

    def smaller_sizes(self) -> None:
        for name in self.best.env:
            for value in SMALL:
                env = {**self.best.env, name: value}
                if value >= self.best.env[name] or not _allows(self.best, env):
                    continue
                if self.try_case(replace(self.best, sizes=env)):
                    break


def num_nodes(graph: Graph) -> int:
    """Count the nodes that are no inputs."""
    return sum(node.op != "input" for node in graph.nodes)


def rebuilt(
    graph: Graph,
    outputs: Sequence[Node],
    cut: Set[Node] = frozenset(),
    instead: Mapping[Node, Node] = {},
) -> Graph:
    """Rebuild what ``outputs`` need, with the nodes of ``cut`` as inputs and others ``instead`` of
    some."""
    live = _live(outputs, cut, instead)
    new: dict[Node, Node] = {}
    inputs = [n for n in graph.nodes if n in live and (n.op == "input" or n in cut)]
    for index, node in enumerate(inputs):
        state = node.op == "input" and bool(node.attrs["state"])
        attrs = {"index": index, "state": state, "merged": ()}
        new[node] = Node("input", (), attrs, node.shape, node.dtype, node.origin, node.order)
    for node in graph.nodes:
        if node in live and node not in new:
            operands = tuple(new[_final(i, instead)] for i in node.inputs)
            new[node] = Node(
                node.op, operands, node.attrs, node.shape, node.dtype, node.origin, node.order
            )
    results = tuple(new[_final(o, instead)] for o in outputs)
    return Graph(tuple(new.values()), tuple(new[i] for i in inputs), results, graph.hints)


def _live(outputs: Iterable[Node], cut: Set[Node], instead: Mapping[Node, Node]) -> set[Node]:
    stack = [_final(o, instead) for o in outputs]
    live = set(stack)
    while stack:
        node = stack.pop()
        if node in cut:
            continue
        operands = [_final(i, instead) for i in node.inputs]
        stack += [i for i in operands if i not in live]
        live.update(operands)
    return live


def _final(node: Node, instead: Mapping[Node, Node]) -> Node:
    while node in instead:
        node = instead[node]
    return node


def _is_value(node: Node) -> bool:
    """Tell whether a node is one tensor that an input or a result could be."""
    return node.op != "write" and not (node.op == "aten" and not node.attrs["single"])


def _twins(node: Node) -> Iterator[Node]:
    for operand in dict.fromkeys(node.inputs):
        is_same = (operand.shape, operand.dtype) == (node.shape, node.dtype)
        if is_same and _is_value(node) and _is_value(operand):
            yield operand


def _allows(case: Case, env: Mapping[str, int]) -> bool:
    return all(guard.holds(env) for guard in case.signature.guards)

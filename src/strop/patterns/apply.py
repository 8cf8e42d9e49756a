"""Put the calls of the patterns in force into a graph."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from strop.ir.device import EIGHT_BIT
from strop.ir.graph import Builder, Graph, Node, finish
from strop.ir.ops import OPS
from strop.options import Options
from strop.passes import PassRecord
from strop.passes.canonicalize import canonicalize
from strop.patterns import registry
from strop.patterns.find import Finder, Match, Miss

log = logging.getLogger("strop")
NAME = "patterns"  # in Options.disable


@dataclass(frozen=True, slots=True)
class Found:
    """Say what became of the patterns, for ``explain``. ``names``: of those in force."""

    names: tuple[str, ...] = ()
    misses: tuple[Miss, ...] = ()
    records: tuple[PassRecord, ...] = ()


def apply(graph: Graph, options: Options, device: str) -> tuple[Graph, Found]:
    """Apply each pattern in turn, in the order of their declaration."""
    patterns = registry.active()
    known = {*EIGHT_BIT, *(pattern.numerics for pattern in patterns)}
    for name in sorted({*options.pattern_numerics} - known):
        _warn_of(name)
    if not patterns or NAME in options.disable:
        return graph, Found()
    start, before, misses = time.perf_counter(), len(graph.nodes), list[Miss]()
    graph = canonicalize(graph, options)
    for pattern in patterns:
        if not pattern.allowed(options.numerics):
            why = f"numerics={pattern.numerics!r} is not allowed: Options(numerics=(...,)) lists it"
            misses.append(Miss(pattern.name, "", why))
            continue
        finder = Finder(graph, pattern, device)
        finder.run()
        misses += finder.misses.values()
        graph = _replaced(graph, finder.matches) if finder.matches else graph
    seconds = time.perf_counter() - start
    kept = graph if options.wants_graphs else None
    record = PassRecord(NAME, seconds, before, len(graph.nodes), kept)
    return graph, Found(tuple(p.name for p in patterns), tuple(misses), (record,))


@functools.cache  # once
def _warn_of(numerics: str) -> None:
    """Warn of names that no pattern has; this is no error, as patterns may be declared at any
    time."""
    log.warning("Options.numerics allows %r, which no pattern in force names", numerics)


def _replaced(graph: Graph, matches: Sequence[Match]) -> Graph:
    """Put a call in the place of each match; what nobody reads any more goes."""
    b, new = Builder(), dict[Node, Node]()
    match_of = {node: match for match in matches for node in match.replaced}
    for node in _in_order(graph, match_of):
        if node in new:
            continue
        b.origin = node.origin
        match = match_of.get(node)
        if match is None:
            new[node] = b.copy_of(node, tuple(new[i] for i in node.inputs))
            continue
        made = _call(b, match, new)
        for other, number in match.replaced.items():
            new[other] = _undone(b, match.results[number], made[number])
    inputs, outputs = ([new[n] for n in nodes] for nodes in (graph.inputs, graph.outputs))
    return finish(b, inputs, outputs, graph.hints)


def _in_order(graph: Graph, match_of: Mapping[Node, Match]) -> Iterator[Node]:
    """Yield each node behind what it needs; a node that a call gives needs that call's
    arguments."""
    done: set[Node] = set()
    for last in graph.nodes:
        stack = [last]
        while stack:
            node = stack[-1]
            match = match_of.get(node)
            needed = node.inputs if match is None else match.arguments
            missing = [n for n in needed if n not in done]
            if missing and node not in done:
                stack += missing
                continue
            stack.pop()
            if node not in done:
                done.add(node)
                yield node


def _call(b: Builder, match: Match, new: Mapping[Node, Node]) -> list[Node]:
    """Return the call, and each of its results."""
    outputs = tuple((node.shape, node.dtype) for node in match.results)
    shape, dtype = outputs[0]
    b.origin, pattern = match.origin, match.pattern
    call = b.make(
        "pattern",
        [new[n] for n in match.arguments],
        shape,
        dtype,
        name=pattern.name,
        key=pattern.key,
        attributes=tuple(sorted(match.attributes.items())),
        outputs=outputs,
        single=match.single,
        contiguous=pattern.contiguous,
        numerics=pattern.numerics,
    )
    if match.single:
        return [call]
    return [b.make("item", (call,), out[0], out[1], index=i) for i, out in enumerate(outputs)]


def _undone(b: Builder, result: Node, value: Node) -> Node:
    """Return what ``result`` is a view of, from ``value``, which has its shape."""
    while OPS[result.op].has_all_once:
        source = result.inputs[0]
        if result.op == "reshape":
            value = b.reshape(value, source.shape)
        else:
            dims = result.attrs["dims"]
            value = b.permute(value, sorted(range(len(dims)), key=lambda d: dims[d]))
        result = source
    return value

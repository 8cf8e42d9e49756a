"""The cut that we find is networkx's."""

from __future__ import annotations

import math
import random
from typing import Any

import networkx as nx

from strop.dispatch.least_cut import least_cut, least_cuts

USUAL = nx.minimum_cut


def drawn(seed: int) -> Any:
    """Return a random graph with edges that must not be cut."""
    draw, graph = random.Random(seed), nx.DiGraph()
    size, most = draw.randint(3, 14), draw.choice([1, 6])
    graph.add_edge("source", 0, capacity=draw.randint(1, 9))
    graph.add_edge(size - 1, "sink", capacity=draw.randint(1, 9))
    for _ in range(draw.randint(2, 40)):
        a = draw.choice(["source", *range(size)])
        b = draw.choice(["sink", *range(size)])
        if a != b:
            graph.add_edge(a, b, capacity=draw.choice([math.inf, *range(most + 2)]))
    return graph


def outcome(cut: Any, *args: Any) -> Any:
    try:
        value, (sources, sinks) = cut(*args)
    except nx.NetworkXUnbounded:
        return "unbounded"
    return value, set(sources), set(sinks)


def test_random_graphs_are_cut_alike() -> None:
    found = [outcome(least_cut, drawn(seed), "source", "sink", USUAL) for seed in range(400)]
    assert found == [outcome(USUAL, drawn(seed), "source", "sink") for seed in range(400)]
    assert 10 < found.count("unbounded") < 200


def test_an_edge_without_a_capacity_is_not_cut() -> None:
    graph = nx.DiGraph()
    graph.add_edge("source", "a", capacity=5)
    graph.add_edge("a", "b")
    graph.add_edge("b", "sink", capacity=3)
    found = outcome(least_cut, graph, "source", "sink", USUAL)
    assert found == outcome(USUAL, graph, "source", "sink") == (3, {"source", "a", "b"}, {"sink"})


def test_networkx_is_itself_again() -> None:
    graph = drawn(1)
    with least_cuts():
        assert nx.minimum_cut is not USUAL
        assert outcome(nx.minimum_cut, graph, "source", "sink") == outcome(
            USUAL, graph, "source", "sink"
        )
    assert nx.minimum_cut is USUAL

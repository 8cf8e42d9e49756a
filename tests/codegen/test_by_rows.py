"""Which values of a graph are made by rows, and that a batch of several then holds each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from strop.codegen.by_rows import made_by_rows
from strop.ir.dims import symbol
from strop.ir.graph import Builder, Node
from strop.ir.ops import Kind

F32, B, S = torch.float32, symbol("b"), symbol("s")


class Made:
    """An argument (b, 4), a vector (b,) and weights, and a builder."""

    def __init__(self) -> None:
        self.b = Builder()
        self.x = self.input((B, 4))
        self.t = self.input((B,))
        self.weight = self.input((6, 4), state=True)

    def input(self, shape: tuple[object, ...], *, state: bool = False) -> Node:
        return self.b.make("input", (), shape, F32, index=len(self.b.nodes), state=state, merged=())  # type: ignore[arg-type]

    def unary(self, x: Node) -> Node:
        return self.b.pointwise("silu", x, dtype=F32)

    def add(self, x: Node, y: Node) -> Node:
        return self.b.pointwise("add", x, y, dtype=F32, alpha=1)

    def linear(self, x: Node, w: Node) -> Node:
        return self.b.make("linear", (x, w), (*x.shape[:-1], w.shape[0]), F32)


CASES: dict[str, tuple[Callable[[Made], Node], bool]] = {
    "pointwise": (lambda m: m.unary(m.x), True),
    "with a weight's row": (lambda m: m.add(m.x, m.b.slice(m.weight, 0, 0, 1)), True),
    "with a constant": (lambda m: m.add(m.x, m.b.constant(2.0, F32)), True),
    "with a size": (lambda m: m.add(m.x, m.b.constant(B, F32)), False),
    "a column of times": (lambda m: m.add(m.x, m.b.reshape(m.t, (B, 1))), True),
    "a row of times": (
        lambda m: m.add(m.b.expand(m.b.reshape(m.t, (1, B)), (B, B)), m.b.constant(1, F32)),
        False,
    ),
    "a vector beside a matrix": (
        lambda m: m.b.make("add", (m.input((B, B)), m.t), (B, B), F32, alpha=1),
        False,
    ),
    "linear": (lambda m: m.linear(m.x, m.weight), True),
    "linear by itself": (lambda m: m.linear(m.x, m.x), False),
    "linear by an argument": (lambda m: m.linear(m.x, m.input((6, 4))), False),
    "cat of columns": (lambda m: m.b.make("cat", (m.x, m.x), (B, 8), F32, dim=1), True),
    "cat of rows": (lambda m: m.b.make("cat", (m.x, m.x), (2 * B, 4), F32, dim=0), False),
    "a slice of columns": (lambda m: m.b.slice(m.x, 1, 1, 2), True),
    "all but the first row": (lambda m: m.b.slice(m.x, 0, 1, B - 1), False),
    "rows backwards": (lambda m: m.b.slice(m.x, 0, B - 1, B, -1), False),
    "rows in pieces": (lambda m: m.b.reshape(m.x, (B, 2, 2)), True),
    "rows of others": (lambda m: m.b.reshape(m.x, (2 * B, 2)), False),
    "turned": (lambda m: m.b.permute(m.x, (1, 0)), False),
    "a mean of rows": (lambda m: m.b.reduce("mean", m.x, (0,), F32), False),
    "what a mean was taken off": (lambda m: m.add(m.x, m.b.reduce("mean", m.x, (0,), F32)), False),
    "numbers of rows": (lambda m: m.b.make("iota", (), (B,), F32, start=0, step=1), False),
    "another size": (lambda m: m.add(m.input((S, 4)), m.b.constant(1, F32)), True),
    "columns that the batch tells": (
        lambda m: m.b.slice(
            m.b.make("cat", (m.x, m.input((B, B))), (B, B + 4), F32, dim=1), 1, 0, 4
        ),
        False,
    ),
    "columns from a place that the batch tells": (
        lambda m: m.b.slice(m.input((B, 99)), 1, B, 4),
        False,
    ),
    "a square in one row": (lambda m: m.b.reshape(m.input((B, B, 4)), (B, 4 * B)), False),
    "from elsewhere": (
        lambda m: m.b.make("take", (m.x, m.t), (B, 4), F32, walks=(None, 1), bounds="known"),
        False,
    ),
}


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "in one kernel"])
@pytest.mark.parametrize("case", CASES)
def test_made_by_rows(case: str, stored: bool) -> None:
    make, expected = CASES[case]
    made = Made()
    found = make(made)
    node = made.unary(found) if found.kind is Kind.VIEW else found
    values = [n for n in made.b.nodes if n.kind is not Kind.VIEW]
    kept = values if stored else [*(n for n in values if n.op == "input"), node]
    assert (node in made_by_rows(made.b.nodes, set(kept))) == expected


def test_a_step_is_looked_at_by_itself() -> None:
    """What is stored may have come from anywhere; the next step may be by its rows all the same."""
    made = Made()
    reversed_rows = made.b.make("copy", (made.b.slice(made.x, 0, B - 1, B, -1),), (B, 4), F32)
    node = made.unary(reversed_rows)
    inputs = {n for n in made.b.nodes if n.op == "input"}
    assert node in made_by_rows(made.b.nodes, inputs | {reversed_rows, node})
    assert node not in made_by_rows(made.b.nodes, inputs | {node})

"""Make one operator of GELU that a model's code spells out, by the error function or by tanh.

GPT-2's own (``NewGELUActivation`` of transformers) is ``0.5 x (1 + tanh(k (x + 0.044715 x^3)))``
with k = sqrt(2 / pi), other code has the factors in another order, and BERT's first had
``0.5 x (1 + erf(x / sqrt(2)))`` (https://arxiv.org/abs/1606.08415, section 2). As one operator it
can be the end of a product (``activated_linear``, ``gated_linear``). It is computed in fp32 and
rounded once, where eager rounds each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch

from strop.ir.contractions import GELU, GELU_TANH
from strop.ir.functions import HALVES
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.options import Options

Polynomial = Mapping[int, float]  # coefficients by powers
K = math.sqrt(2 / math.pi)
HALF: Polynomial = {1: 0.5}
ONE: Polynomial = {0: 1.0}
# By the function that is spelled out: the operator, and of what the function is taken.
FORMS: Mapping[str, tuple[str, Polynomial]] = {
    "tanh": (GELU_TANH, {1: K, 3: K * 0.044715}),
    "erf": (GELU, {1: math.sqrt(0.5)}),
}
NEAR = 1e-6  # how much coefficients may differ, of their size: codes write 7 digits and more
HIGHEST, MOST_STEPS = 3, 8  # powers, and operators one inside the other
DTYPES = (*HALVES, torch.float32)


def spelled_gelu(graph: Graph, options: Options) -> Graph:
    users = graph.users()

    def is_alone(node: Node) -> bool:
        return len(users[node]) == 1 and node not in graph.outputs

    found = {node for node in graph.nodes if node.op == "mul" and _form_of(node, is_alone)}

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node not in found:
            return None
        form = _form_of(b.copy_of(node, inputs), lambda each: True)
        assert form is not None
        op, x = form
        return b.pointwise(op, x, dtype=node.dtype)

    return rewrite(graph, rule) if found else graph


def _form_of(node: Node, is_alone: Callable[[Node], bool]) -> tuple[str, Node] | None:
    """Return the operator that a product spells out, and its operand, or None. What only the
    product reads must not be needed by others, as by a backward pass."""
    if node.dtype not in DTYPES:
        return None
    for gate, function in _gates(node, MOST_STEPS):
        if not (is_alone(gate) and is_alone(function)):
            continue
        op, wanted = FORMS[function.op]
        for x in _factors(node, MOST_STEPS):
            is_base = x is not gate and x.dtype == node.dtype and x.shape == node.shape
            if not is_base or not _agree(_polynomial(node, {x: {1: 1.0}, gate: ONE}), HALF):
                continue
            if _agree(_polynomial(function.inputs[0], {x: {1: 1.0}}), wanted):
                return op, x
    return None


def _factors(node: Node, steps: int) -> Iterator[Node]:
    """Yield all that is multiplied, from the outside to the inside."""
    for each in node.inputs if node.op == "mul" and steps else ():
        if each.op != "constant":
            yield each
            yield from _factors(each, steps - 1)


def _gates(node: Node, steps: int) -> Iterator[tuple[Node, Node]]:
    """Yield each factor that is 1 + f(...), and f's node."""
    for factor in _factors(node, steps):
        for one, function in (factor.inputs, factor.inputs[::-1]) if factor.op == "add" else ():
            if function.op in FORMS and _agree(_polynomial(one, {}), ONE):
                yield factor, function


def _polynomial(
    node: Node, known: Mapping[Node, Polynomial], steps: int = MOST_STEPS
) -> Polynomial | None:
    """Return a value as a polynomial of what is known as one, or None where it is none, or one of
    a higher power."""
    if node in known:
        return known[node]
    if node.op == "constant":
        value = node.attrs["value"]
        return {0: float(value)} if isinstance(value, int | float) else None
    if node.op not in ("mul", "div", "add", "sub", "square", "neg") or not steps:
        return None
    parts = [_polynomial(each, known, steps - 1) for each in node.inputs]
    known_parts = [part for part in parts if part is not None]
    if len(known_parts) < len(parts):
        return None
    first, last = known_parts[0], known_parts[-1]
    if node.op == "neg":
        return _sum({}, first, -1.0)
    if node.op in ("add", "sub"):
        return _sum(first, last, 1.0 if node.op == "add" else -1.0)
    return _share(first, last) if node.op == "div" else _product(first, last)


def _sum(a: Polynomial, b: Polynomial, factor: float) -> Polynomial:
    return {n: a.get(n, 0.0) + factor * b.get(n, 0.0) for n in {*a, *b}}


def _product(a: Polynomial, b: Polynomial) -> Polynomial | None:
    found: dict[int, float] = {}
    for n, first in a.items():
        for m, second in b.items():
            found[n + m] = found.get(n + m, 0.0) + first * second
    return found if max(found, default=0) <= HIGHEST else None


def _share(a: Polynomial, b: Polynomial) -> Polynomial | None:
    """Return a polynomial over a number, or None where it is over another polynomial, or zero."""
    number = b.get(0, 0.0)
    return {n: part / number for n, part in a.items()} if number and {*b} == {0} else None


def _agree(found: Polynomial | None, wanted: Polynomial) -> bool:
    if found is None:
        return False
    return all(
        math.isclose(found.get(n, 0.0), wanted.get(n, 0.0), rel_tol=NEAR) for n in {*found, *wanted}
    )

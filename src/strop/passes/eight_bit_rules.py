"""Hold the one table of which linears stay exact under ``Options.numerics`` of 8 bits, and why."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from strop.ir.affine import base_of
from strop.ir.eight_bit import NAMED, Format
from strop.ir.functions import HALVES
from strop.ir.graph import Graph, Node
from strop.ir.ops import Kind

# Below it a row of codes and its scale cost about what they save in the product.
LEAST_WIDTH = 64
# Names of layers that make shifts, scales and gates of a block out of the time: one wrong by a
# percent shifts all tokens of a picture alike.
_OF_TIME = re.compile(
    r"time_emb|time_proj|time_text|timestep|temb|emb_layers|adaln|modulation|guidance"
    r"|(^|\.)(img_mod|txt_mod|norm\w*\.linear(_\d)?)(\.|$)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """Hold what a rule may look at: a linear, the format that is asked for, and where in the graph
    the linear stands."""

    linear: Node
    format: Format
    exact_layers: Sequence[str]
    is_first: bool
    is_last: bool

    @property
    def weights(self) -> tuple[Node, ...]:
        return self.linear.inputs[1:]

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(size.value for size in self.weights[0].shape)


@dataclass(frozen=True, slots=True)
class ExactRule:
    """Say of which linears ``reason`` holds. Later rules may rely on earlier ones to fail."""

    reason: str
    holds: Callable[[Asked], bool]


def _is_computed(asked: Asked) -> bool:
    return not all(
        w.op == "input" and w.attrs["state"] and not w.attrs["merged"] for w in asked.weights
    ) or not all(size.is_const for size in asked.weights[0].shape)


def _has_another_type(asked: Asked) -> bool:
    able = {*HALVES} if asked.format.dtype.is_floating_point else {*HALVES, torch.float32}
    return not {asked.linear.dtype, *(n.dtype for n in asked.linear.inputs)} <= able


def is_named(layer: Node, exact_layers: Sequence[str]) -> bool:
    """Tell whether a layer is to stay exact by its name."""
    return any(fnmatch.fnmatchcase(layer.origin, name) for name in exact_layers)


def _is_factor(asked: Asked) -> bool:
    return bool(asked.weights[0].attrs.get("small"))


def _has_no_tokens(asked: Asked) -> bool:
    return len(asked.linear.inputs[0].shape) < 3


def _is_of_time(asked: Asked) -> bool:
    return bool(_OF_TIME.search(asked.linear.origin))


def _is_small(asked: Asked) -> bool:
    return min(asked.widths) < LEAST_WIDTH


def _is_uneven(asked: Asked) -> bool:
    return any(width % asked.format.multiple for width in asked.widths)


RULES: tuple[ExactRule, ...] = (
    ExactRule("its weight is computed in each call, or has no fixed size", _is_computed),
    ExactRule("it is a factor of low rank, of an adapter", _is_factor),
    ExactRule("its type is none that is multiplied in 8 bits", _has_another_type),
    ExactRule(
        "its operand has no tokens: it is of a time, or of a picture as a whole", _has_no_tokens
    ),
    ExactRule("it makes modulations of the time", _is_of_time),
    ExactRule("it is a first layer, which reads an argument", lambda asked: asked.is_first),
    ExactRule("it is a last layer, whose result the caller gets", lambda asked: asked.is_last),
    ExactRule(f"it is too small to gain: fewer than {LEAST_WIDTH} channels", _is_small),
    ExactRule("libraries multiply codes of 8 (int8) or 16 (fp8) channels at a time", _is_uneven),
    ExactRule(NAMED, lambda asked: is_named(asked.linear, asked.exact_layers)),
)


def reasons(graph: Graph, format: Format, exact_layers: Sequence[str]) -> dict[Node, str]:
    """Return, for each linear of a graph, why it stays exact, or nothing."""
    linears = [node for node in graph.nodes if node.op == "linear"]
    if not linears:
        return {}
    raw, last = _of_arguments(graph), _for_the_caller(graph)
    found = dict[Node, str]()
    for linear in linears:
        asked = Asked(linear, format, exact_layers, linear.inputs[0] in raw, linear in last)
        found[linear] = next((rule.reason for rule in RULES if rule.holds(asked)), "")
    return found


def _is_product(node: Node) -> bool:
    return node.kind in (Kind.CONTRACTION, Kind.OPAQUE) and node.op not in ("input", "constant")


def _of_arguments(graph: Graph) -> Collection[Node]:
    """Return the values that come of arguments by no product."""
    found, plain = set[Node](), set[Node]()  # plain: of weights and numbers alone
    for node in graph.nodes:
        if node.op == "input" and not node.attrs["state"]:
            found.add(node)
        elif _is_product(node):
            continue
        elif all(x in plain for x in node.inputs):
            plain.add(node)
        elif all(x in plain or x in found for x in node.inputs):
            found.add(node)
    return found


def _for_the_caller(graph: Graph) -> Collection[Node]:
    """Return the values that no product reads, on any way to the results."""
    users: Mapping[Node, Sequence[Node]] = graph.users()
    given, found = {*map(base_of, graph.outputs), *graph.outputs}, set[Node]()
    for node in reversed(graph.nodes):
        readers = users[node]
        if not readers and node not in given:
            continue
        if all(not _is_product(reader) and reader in found for reader in readers):
            found.add(node)
    return found

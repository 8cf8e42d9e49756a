"""Make the sum of a linear and of another sum where the linear's product is added up.

A library's GEMM adds to what lies where its result goes, in fp32 and before it rounds; the bias has
gone to the kernel that computes the other sum. Where a library call reads the result next, no
kernel would have made it on its way: at the end of each transformer block of a UNet that is a
launch less. Eager rounds the other sum, the linear and the result, we the other sum, bias and all,
and the result. What is no sum may be exact in eager, and with a bias it no longer would be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from strop.ir.contractions import FACTORS, LINEARS, alike
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.ir.ops import Kind
from strop.options import Options

KERNELS = (Kind.POINTWISE, Kind.REDUCTION)
Users = Mapping[Node, Sequence[Node]]


def linear_add(graph: Graph, options: Options) -> Graph:
    users, outputs = graph.users(), set(graph.outputs)

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        which = side_of(node, users, outputs)
        if which is None:
            return None
        linear, bias = inputs[which].inputs
        moved = b.pointwise("add", inputs[1 - which], bias, dtype=node.dtype, alpha=1)
        op = alike("linear_add", linear.op)
        return b.make(op, (*linear.inputs, moved), node.shape, node.dtype)

    return rewrite(graph, rule)


def side_of(node: Node, users: Users, outputs: Collection[Node]) -> int | None:
    """Return which operand of a sum is the linear, with its bias, to whose product a library adds
    the other; None where it is not to."""

    def is_read_once(side: Node) -> bool:
        return len(users[side]) == 1 and side not in outputs

    if is_sum(node) and node not in outputs and not is_kernel_next(node, users):
        for which, biased in enumerate(node.inputs):
            other = node.inputs[1 - which]
            if (
                is_biased(biased)
                and _is_alike(node, biased, other)
                and all(map(is_read_once, (biased, biased.inputs[0])))
            ):
                return which
    return None


def is_sum(node: Node) -> bool:
    return node.op == "add" and node.attrs.get("alpha") == 1 and len(node.inputs) == 2


def is_biased(node: Node) -> bool:
    """Tell whether it is a linear and its bias, as ``bias_to_consumer`` writes them."""
    if not is_sum(node):
        return False
    linear, bias = node.inputs
    is_bare = linear.op in LINEARS and len(linear.inputs) == FACTORS[linear.op]
    return is_bare and len(bias.shape) == 1


def _is_alike(total: Node, biased: Node, other: Node) -> bool:
    """Tell whether the other value is a sum, which a kernel computes and to which it can add the
    bias, and nothing is broadcast or converted."""
    nodes = (total, biased, biased.inputs[0], other, *other.inputs)
    same = len({n.shape for n in nodes}) == len({n.dtype for n in nodes}) == 1
    return same and is_sum(other) and total.dtype.is_floating_point


def is_kernel_next(node: Node, users: Users) -> bool:
    """Tell whether a kernel is the first to read it."""
    readers = readers_of(node, users)
    return not readers or min(readers, key=lambda n: n.serial).kind in KERNELS


def readers_of(node: Node, users: Users) -> list[Node]:
    """Return the readers of a value, through views."""
    readers, stack = list[Node](), [*users[node]]
    while stack:
        user = stack.pop()
        if user.kind is Kind.VIEW:
            stack += users[user]
        else:
            readers.append(user)
    return readers

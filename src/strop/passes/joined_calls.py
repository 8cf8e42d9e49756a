"""Let calls write their results where a cat has them, so that no kernel moves them there.

The single blocks of Flux multiply attention's result and the feed-forward layer's, side by side,
by one weight: a kernel that only puts them together takes 100 us of each, on an H100. Kernels of
ours for attention and for products store by the tensor memory accelerator, which takes any
distance between rows; cuBLAS takes it as well. At sizes where another library is chosen its result
is copied, which is no more than the kernel for the cat did.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from strop.ir.affine import base_of
from strop.ir.contractions import AMONG_COLUMNS, FACTORS, GELU_TANH, LINEARS
from strop.ir.dims import Expr
from strop.ir.functions import HALVES
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.ir.ops import OPS, Kind
from strop.ir.parts import ZERO, has_strides, join, place_of
from strop.options import Options
from strop.passes.activated_linear import can_end_in_gelu
from strop.passes.gated_linear import fits
from strop.passes.linear_add import Users

PIECE = 8  # rows of results begin at multiples of it: 16 bytes
WIDTH = 128  # columns of an activated product are a multiple of it, as of tiles of ours
MOST_OTHERS = 1  # pieces that kernels compute: each would be a kernel, and the cat is one


def joined_calls(graph: Graph, options: Options) -> Graph:
    users = graph.users()
    joined = {cat: list(_pieces(cat, graph, users)) for cat in _cats(graph, users)}
    joined = {cat: pieces for cat, pieces in joined.items() if _pays(cat, pieces)}
    told = {base_of(piece) for pieces in joined.values() for piece in pieces}

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node in told and node.op == "linear_gelu":
            attrs = {**node.attrs, AMONG_COLUMNS: True}
            return b.make(node.op, inputs, node.shape, node.dtype, order=node.order, **attrs)
        if node not in joined:
            return None
        pieces = zip(inputs, node.inputs, strict=True)
        return join(b, node, inputs, {new for new, old in pieces if old in joined[node]})

    return rewrite(graph, rule) if joined else graph


def joined_activations(graph: Graph, options: Options) -> set[Node]:
    """Return the linears whose results go through GELU into a cat that calls write, with what an
    adapter adds to them or without. They are products of their own: GELU is computed at the end of
    all columns."""
    if not {"joined_calls", "activated_linear"}.isdisjoint(options.disable):
        return set()
    if "wgmma_gemm" in options.kernels_off:
        return set()
    users, found = graph.users(), set[Node]()
    for cat in _cats(graph, users):
        pieces = list(_pieces(cat, graph, users))
        if any(base_of(piece).op == "attention" for piece in pieces):
            linears = map(_activated, cat.inputs)
            found |= {linear for linear in linears if linear and _may_end_in_gelu(linear, graph)}
    return found


def _cats(graph: Graph, users: Users) -> Iterator[Node]:
    """Yield the cats that calls alone read, or callers: what a kernel reads it puts together on its
    way."""
    for node in graph.nodes:
        if node.op == "cat" and _is_for_calls(node, graph.outputs, users):
            yield node


def _is_for_calls(node: Node, results: Collection[Node], users: Users) -> bool:
    return all(
        user.kind in (Kind.CONTRACTION, Kind.OPAQUE)
        or (user.kind is Kind.VIEW and _is_for_calls(user, results, users))
        for user in users[node]
    ) and bool(users[node] or node in results)


def _pays(cat: Node, pieces: Collection[Node]) -> bool:
    others = [piece for piece in cat.inputs if piece not in pieces and ZERO not in piece.shape]
    return bool(pieces) and len(others) <= MOST_OTHERS


def _pieces(cat: Node, graph: Graph, users: Users) -> Iterator[Node]:
    """Yield the pieces that calls can write where the cat has them."""
    start, dim = ZERO, cat.attrs["dim"]
    for piece in cat.inputs:
        is_alone = cat.inputs.count(piece) == 1 and _is_alone(piece, graph, users)
        if is_alone and _can_write(piece, cat, start):
            yield piece
        start = start + piece.shape[dim]


def _is_alone(piece: Node, graph: Graph, users: Users) -> bool:
    """Tell whether one reader alone has what a call makes, through views of all its elements."""
    while len(users[piece]) == 1 and piece not in graph.outputs:
        if not OPS[piece.op].has_all_once:
            return True
        piece = piece.inputs[0]
    return False


def _can_write(piece: Node, cat: Node, start: Expr) -> bool:
    call = base_of(piece)
    may_write = CALLS.get(call.op)
    if may_write is None or not may_write(call) or call.dtype != cat.dtype:
        return False
    whole = Builder().make("join", (), cat.shape, cat.dtype, order=cat.order, **cat.attrs)
    return has_strides(place_of(whole, piece, start), PIECE)


def _is_plain_attention(call: Node) -> bool:
    """Tell whether kernels of ours may compute it: those for masks store dense results."""
    head = call.shape[-1]
    is_plain = len(call.inputs) == 3 and not call.attrs["causal"] and call.dtype in HALVES
    return is_plain and head.is_const and head.value % PIECE == 0


def _is_bare(linear: Node) -> bool:
    """Tell whether it has no bias, for which torch would fill the result first."""
    return len(linear.inputs) == FACTORS[linear.op]


# The calls that may write among columns, and which of each.
CALLS: Mapping[str, Callable[[Node], bool]] = {
    "attention": _is_plain_attention,
    **dict.fromkeys(LINEARS, _is_bare),
    "linear_gelu": lambda call: fits(call, WIDTH, halves=1),
}


def _activated(piece: Node) -> Node | None:
    """Return the linear whose GELU a piece is."""
    value = base_of(piece)
    if value.op != GELU_TANH:
        return None
    layers: list[Node] = [value.inputs[0]]
    while layers and layers[0].op == "add":  # with an adapter's part
        layers = [x for x in layers[0].inputs if x.op == "add" or _is_biased(x)]
    return layers[0] if layers and _is_biased(layers[0]) else None


def _is_biased(node: Node) -> bool:
    return node.op == "linear" and len(node.inputs) == 3


def _may_end_in_gelu(linear: Node, graph: Graph) -> bool:
    return can_end_in_gelu(linear, graph) and fits(linear, WIDTH, halves=1)

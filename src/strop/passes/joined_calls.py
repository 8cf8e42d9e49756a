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
from strop.ir.dims import Expr, product
from strop.ir.functions import HALVES
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.ir.ops import OF_ROWS, OPS, Kind
from strop.ir.parts import ZERO, as_rows, has_strides, join, place_of
from strop.options import Options
from strop.passes.activated_linear import LEAST_ROWS, can_end_in_gelu
from strop.passes.gated_linear import fits
from strop.passes.linear_add import Users

PIECE = 8  # rows of results begin at multiples of it: 16 bytes
WIDTH = 128  # columns of an activated product are a multiple of it, as of tiles of ours
MOST_OTHERS = 1  # pieces that kernels compute: each would be a kernel, and the cat is one


def joined_calls(graph: Graph, options: Options) -> Graph:
    users = graph.users()
    found = {cat: set(_pieces(cat, graph, users, _writes)) for cat in _cats(graph, users)}
    joined = {cat: pieces for cat, pieces in found.items() if _pays(cat, pieces)}
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
    adapter adds to them or without: weights lie in one way with both. These are products of their
    own, as GELU is computed at the end of all columns."""
    is_off = not {"joined_calls", "activated_linear"}.isdisjoint(options.disable)
    if is_off or "wgmma_gemm" in options.kernels_off:
        return set()

    def will_write(value: Node, graph: Graph) -> bool:
        return _writes(value, graph) or _linear_of(value, graph) is not None

    users, found = graph.users(), set[Node]()
    for cat in _cats(graph, users):
        pieces = list(_pieces(cat, graph, users, will_write))
        if _pays(cat, pieces):
            linears = (_linear_of(base_of(piece), graph) for piece in pieces)
            found |= {linear for linear in linears if linear is not None}
    return found


def _cats(graph: Graph, users: Users) -> Iterator[Node]:
    """Yield the cats that calls alone read, or callers: what a kernel reads it puts together on its
    way."""
    for node in graph.nodes:
        if node.op == "cat" and _is_for_calls(node, graph.outputs, users):
            yield node


def _is_for_calls(node: Node, results: Collection[Node], users: Users) -> bool:
    return bool(users[node] or node in results) and all(
        user.kind in (Kind.CONTRACTION, Kind.OPAQUE)
        or (user.kind is Kind.VIEW and _is_for_calls(user, results, users))
        for user in users[node]
    )


def _pays(cat: Node, pieces: Collection[Node]) -> bool:
    """Tell whether no more kernels are left than the one of the cat."""
    others = [piece for piece in cat.inputs if piece not in pieces and ZERO not in piece.shape]
    return bool(pieces) and len(others) <= MOST_OTHERS


def _pieces(
    cat: Node, graph: Graph, users: Users, writes: Callable[[Node, Graph], bool]
) -> Iterator[Node]:
    """Yield the pieces that can be written where the cat has them, by what ``writes``."""
    start, dim = ZERO, cat.attrs["dim"]
    for piece in cat.inputs:
        made = base_of(piece)
        may_write = made.dtype == cat.dtype and writes(made, graph)
        is_alone = cat.inputs.count(piece) == 1 and _is_alone(piece, graph, users)
        if may_write and is_alone and _has_place(piece, cat, start):
            yield piece
        start = start + piece.shape[dim]


def _is_alone(piece: Node, graph: Graph, users: Users) -> bool:
    """Tell whether one reader alone has what is made, through views of all its elements."""
    while len(users[piece]) == 1 and piece not in graph.outputs:
        if not OPS[piece.op].has_all_once:
            return piece.kind is not Kind.VIEW
        piece = piece.inputs[0]
    return False


def _has_place(piece: Node, cat: Node, start: Expr) -> bool:
    b = Builder()
    whole = b.make("join", (), cat.shape, cat.dtype, order=cat.order, **cat.attrs)
    place = place_of(whole, piece, start)
    is_of_rows = base_of(piece).op in (*OF_ROWS, GELU_TANH)
    return has_strides(as_rows(b, place) if is_of_rows else place, PIECE)


def _is_plain_attention(call: Node) -> bool:
    """Tell whether kernels of ours may compute it: those for masks store dense results."""
    head = call.shape[-1]
    is_plain = len(call.inputs) == 3 and not call.attrs["causal"] and call.dtype in HALVES
    return is_plain and head.is_const and head.value % PIECE == 0


def _is_bare(linear: Node, hints: Mapping[str, int]) -> bool:
    """Tell whether it has no bias, for which torch would fill the result first, and rows enough
    that no kernel for a few is faster than a library."""
    is_bare = len(linear.inputs) == FACTORS[linear.op]
    return is_bare and product(linear.shape[:-1]).eval(hints) >= LEAST_ROWS


def _writes(value: Node, graph: Graph) -> bool:
    if not value.row.anchor.takes_gaps:
        return False
    if value.op in LINEARS:
        return _is_bare(value, graph.hints)
    return fits(value, WIDTH, halves=1) if value.op in OF_ROWS else _is_plain_attention(value)


def _linear_of(value: Node, graph: Graph) -> Node | None:
    """Return the linear that can end in the GELU that a value is, of it or of its sum with an
    adapter's part."""
    layers = [value.inputs[0]] if value.op == GELU_TANH else []
    while layers and layers[0].op == "add":
        layers = [x for x in layers[0].inputs if x.op == "add" or _is_biased(x)]
    fitting = (x for x in layers[:1] if can_end_in_gelu(x, graph) and fits(x, WIDTH, halves=1))
    return next(fitting, None)


def _is_biased(node: Node) -> bool:
    return node.op == "linear" and len(node.inputs) == 3

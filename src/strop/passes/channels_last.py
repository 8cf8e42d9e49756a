"""Give every value a memory order, and copy where an anchor cannot read what it gets.

Convolutions read and write channels-last. Any other value follows the order in which its
largest operand lies in memory, so that kernels stream, and views stay free. A value computed of
smaller ones alone lies nowhere yet, and is followed where there is nothing else. Runs under
symbols: orders are compared on strides at the traced sizes. Copies are ordinary pointwise nodes and
fuse into whatever makes their operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from strop.ir.affine import Strided, merge, reduced_runs, strided
from strop.ir.contractions import NHWC
from strop.ir.dims import const
from strop.ir.graph import Builder, Graph, Node, Shape, dense_strides, finish
from strop.ir.op import Anchor
from strop.ir.ops import OPS, Kind
from strop.options import Options

Order = tuple[int, ...] | None


def channels_last(graph: Graph, options: Options) -> Graph:
    b = Builder()
    new: dict[Node, Node] = {}
    unbound = set[Node]()
    for node in graph.nodes:
        b.origin = node.origin
        inputs = tuple(new[i] for i in node.inputs)
        new[node] = _relaid(b, node, inputs, graph.hints, unbound)
        if _is_unbound(new[node], unbound):
            unbound.add(new[node])
    given = set(graph.outputs[: len(graph.outputs) - graph.num_saved])
    laid = {node.inputs[0]: node for node in b.nodes if node.op == "copy" and not node.attrs}
    outputs = [_result(b, o, new) if o in given else _saved(b, o, new, laid) for o in graph.outputs]
    return finish(b, [new[i] for i in graph.inputs], outputs, graph.hints, graph.num_saved)


def _saved(b: Builder, node: Node, new: Mapping[Node, Node], laid: Mapping[Node, Node]) -> Node:
    """Lay out what only a backward graph reads: as it lies, where all of its memory belongs to it,
    or as a library wanted it, because that of the backward wants the same."""
    if new[node] in laid:
        return laid[new[node]]
    view = strided(new[node])
    if view is None or view.strides is None or view.base.numel != node.numel:
        return _result(b, node, new)
    return new[node]


def _result(b: Builder, node: Node, new: Mapping[Node, Node]) -> Node:
    """Return what the user gets: dense, or a view of something that is."""
    if node.kind is not Kind.VIEW:
        return _contiguous(b, new[node], node.order if node.op in ("input", "copy") else None)
    view = b.copy_of(node, (_result(b, node.inputs[0], new),))
    return view if _strides(view) is not None else _contiguous(b, new[node], None)


def _is_unbound(node: Node, unbound: Set[Node]) -> bool:
    """Tell whether a value is computed, or is a view of one, without an operand as large that lies
    in memory: broadcast ones say nothing of the order in which it is to lie."""
    if node.kind is Kind.VIEW:
        return node.inputs[0] in unbound
    if node.kind is not Kind.POINTWISE:
        return False
    if not OPS[node.op].is_elementwise:
        return not node.inputs  # a constant, or numbers in turn
    return all(x in unbound or x.numel != node.numel or _is_spread(x) for x in node.inputs)


def _is_spread(x: Node) -> bool:
    """Tell whether a view has elements several times."""
    view = strided(x)
    return (
        view is not None
        and view.base.numel != x.numel
        and view.strides is not None
        and any(step == const(0) for step in view.strides)
    )


def _relaid(
    b: Builder,
    node: Node,
    inputs: tuple[Node, ...],
    hints: Mapping[str, int],
    unbound: Set[Node],
) -> Node:
    if node.kind is Kind.VIEW:
        return _affine(b, node, inputs[0])
    if node.op in ("input", "constant", "item"):
        return b.copy_of(node, inputs)
    order: Order = node.order
    anchor = OPS[node.op].anchor
    if "wants" in node.attrs:
        inputs = tuple(
            _contiguous(b, x, wanted) if wanted or _strides(x) is None else x
            for x, wanted in zip(inputs, node.attrs["wants"], strict=True)
        )
    elif order is not None:
        pass  # the frontend knows what the user expects
    elif anchor.order is not None or anchor.rows:
        inputs, order = _for_anchor(b, anchor, inputs), anchor.order
    elif node.op == "pattern":
        inputs, order = _for_pattern(b, node, inputs, hints)
    elif node.kind in (Kind.OPAQUE, Kind.CONTRACTION):
        inputs = tuple(x if _strides(x) is not None else _contiguous(b, x, None) for x in inputs)
    else:
        inputs = _readable(b, node, inputs, hints)
        largest = inputs[:1] if node.op == "take" else inputs
        largest = tuple(x for x in largest if x not in unbound) or largest
        of_rows = node.op == "bag"
        order = None if of_rows else order_of_largest(largest, hints, len(node.shape))
    return b.make(node.op, inputs, node.shape, node.dtype, order=order, **node.attrs)


def _for_anchor(b: Builder, anchor: Anchor, inputs: tuple[Node, ...]) -> tuple[Node, ...]:
    """Operands as a library, or a kernel in its place, reads them."""
    if anchor.has_dense_ends:
        return tuple(_unit_last(b, x) for x in inputs)
    count = anchor.rows or anchor.pictures
    laid = (_rows(b, x) if anchor.rows else _contiguous(b, x, NHWC) for x in inputs[:count])
    others = (x if _strides(x) is not None else _contiguous(b, x, None) for x in inputs[count:])
    return (*laid, *others)


def _for_pattern(
    b: Builder, node: Node, inputs: tuple[Node, ...], hints: Mapping[str, int]
) -> tuple[tuple[Node, ...], Order]:
    """Return the arguments as the replacement takes them, and the order of its result: one that
    takes values as they lie gives back the like."""
    if node.attrs["contiguous"]:
        return tuple(_contiguous(b, x, None) for x in inputs), None
    inputs = tuple(x if _strides(x) is not None else _contiguous(b, x, None) for x in inputs)
    return inputs, order_of_largest(inputs, hints, len(node.shape)) if node.attrs[
        "single"
    ] else None


def _affine(b: Builder, view: Node, x: Node) -> Node:
    """View x, or a dense copy of it where indices into x do not divide."""
    made = b.copy_of(view, (x,))
    return made if strided(made) else b.copy_of(view, (_contiguous(b, x, None),))


def _one_step(b: Builder, x: Node, dim: int) -> Node:
    """Copy a piece of a cat that has not one stride along ``dim``: it is read at shifted places."""
    view = strided(x)
    if view is not None and len(merge(view.dims[dim])) <= 1:
        return x
    return _contiguous(b, x, None)


def _readable(
    b: Builder, node: Node, inputs: tuple[Node, ...], hints: Mapping[str, int]
) -> tuple[Node, ...]:
    """Return the operands of a node of kernels, copied where their memory cannot be walked as it
    needs."""
    if node.kind is Kind.REDUCTION:
        return (_reducible(b, inputs[0], node.attrs["dims"], hints),)
    if node.op == "cat":
        return tuple(_one_step(b, x, node.attrs["dim"]) for x in inputs)
    if node.op == "bag":
        table, *others = inputs
        return (_one_step(b, table, 0), *(_contiguous(b, x, None) for x in others))
    if node.op == "take":
        return (_looked_up(b, inputs[0], node.attrs["walks"]), *inputs[1:])
    return inputs


def _looked_up(b: Builder, source: Node, walks: Sequence[int | None]) -> Node:
    """Return the source of a take, with one stride for each dim that is looked up."""
    for dim, walk in enumerate(walks):
        if walk is None:
            source = _one_step(b, source, dim)
    return source


def _reducible(b: Builder, x: Node, dims: tuple[int, ...], hints: Mapping[str, int]) -> Node:
    """Return x, or a copy with the reduced dims innermost where kept and reduced ones alternate."""
    runs = reduced_runs(x, dims, hints)
    if runs is not None and len(runs) <= 4 and runs != [True, False, True, False]:
        return x
    return _contiguous(b, x, tuple(sorted(range(len(x.shape)), key=lambda d: d in dims)))


def _strides(x: Node) -> tuple[object, ...] | None:
    view = strided(x)
    return view.strides if view else None


def _contiguous(b: Builder, x: Node, order: Order) -> Node:
    """Return x itself when it lies dense in ``order``, else a copy that does."""
    view = strided(x)
    whole = view is not None and view.offset == const(0) and view.base.numel == x.numel
    if view is not None and whole and _is_dense(view, x.shape, order):
        return x
    return b.make("copy", (x,), x.shape, x.dtype, order=order)


def _is_dense(view: Strided, shape: Shape, order: Order) -> bool:
    strides = view.strides
    return strides is not None and all(
        a == b or size == const(1)
        for a, b, size in zip(strides, dense_strides(shape, order), shape, strict=True)
    )


def _rows(b: Builder, x: Node) -> Node:
    """Make a matrix for BLAS: leading dims that step as one, and one unit stride in either
    place."""
    view = strided(b.reshape(x, (x.numel.exact_div(x.shape[-1]) or x.numel, x.shape[-1])))
    strides = view.strides if view else None
    if strides and (strides[-1] == const(1) or strides[0] == const(1)):
        return x
    return _contiguous(b, x, None)


def _unit_last(b: Builder, x: Node) -> Node:
    """Make the last dim dense, which attention kernels want; other strides may be any."""
    strides = _strides(x)
    return x if strides and strides[-1] == const(1) else _contiguous(b, x, None)


def order_of_largest(inputs: tuple[Node, ...], hints: Mapping[str, int], rank: int) -> Order:
    """Return the physical order of the biggest operand of full rank, as a permutation of dims.

    Of several a contiguous one: results that somebody gets lie so. Where dims of size 1 lie means
    nothing, and a wider result is not to follow it: a column (M, 1) asks for no (M, N) by columns.
    """
    candidates = [x for x in inputs if len(x.shape) == rank and x.op != "constant"]
    if not candidates:
        return None

    def rank_of(x: Node) -> tuple[int, bool, list[int], Shape]:
        """Rank by the innermost atom of each dim, which says where it lies; dims of size 1 sort as
        outermost."""
        view = strided(x)
        dims = view.dims if view else ()
        places = [abs(dim[-1][1].eval(hints)) if dim else 1 << 60 for dim in dims]
        return x.numel.eval(hints), places == sorted(places, reverse=True), places, x.shape

    *_, places, shape = max(map(rank_of, candidates), key=lambda ranked: ranked[:2])
    if not places or 0 in places:
        return None
    order = tuple(sorted(range(rank), key=lambda d: (-places[d], d)))
    wide = [d for d in order if shape[d] != const(1)]
    return None if wide == sorted(wide) else order

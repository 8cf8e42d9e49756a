"""Find kernels that do nothing but to lay out a piece of a value for calls.

Whether the piece lies as the copy would may be a matter of sizes: the tokens of texts and pictures,
cut apart behind their attention, have rows at one distance where there is one picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from strop.fusion.plan import Group
from strop.ir.affine import base_of, strided
from strop.ir.dims import const
from strop.ir.graph import Graph, Node
from strop.ir.program import Buffer, Copied, TensorRef

ALIGNMENT = 16  # bytes of an address, which a copy has and libraries want


def copies_for_calls(
    graph: Graph,
    groups: Sequence[Group],
    numbers: Mapping[Node, int],
    buffers: Sequence[Buffer],
) -> Iterator[tuple[Group, Copied]]:
    """Yield the kernels that copy a piece of one computed value, and what they copy. ``numbers``
    are those of ``buffers``, by value."""
    results = {base_of(output) for output in graph.outputs}
    for group in groups:
        node = group.nodes[0]
        if len(group.nodes) > 1 or node.op != "copy" or node in results:
            continue
        view = strided(node.inputs[0])
        if view is None or view.strides is None or view.base not in numbers:
            continue
        source = buffers[numbers[view.base]]
        unit = const(ALIGNMENT // node.dtype.itemsize or 1)
        is_like = source.kind in ("arena", "call") and source.dtype == node.dtype
        if is_like and view.offset.exact_div(unit) is not None and numbers.get(node) is not None:
            piece = TensorRef(numbers[view.base], view.offset, node.shape, view.strides)
            yield group, Copied(numbers[node], piece, node.strides)

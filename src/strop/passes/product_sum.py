"""Fuse the sum of a linear, its bias and another value into the linear, which writes over the other
value.

Kernels of ours for products begin with the bias and have the tensor memory accelerator add what
they leave to what is there (``kernels.gemm``), so that no kernel reads and writes
all of it once more: a residual stream stays in one memory from block to block. Rounded as in eager:
the layer, and the sum. The other value must lie in memory anyway, and all else that reads it comes
before the linear; it may be seen through a view, as pictures are behind a transformer.

What a library can add to its own product (``linear_add.py``) is left to it, and so is the sum that
the bias goes to then: the feed-forward layer at the end of a UNet's transformer, deep and with few
rows, for which the kernel cuts the sum in three (22.8 us of 512 x 5120 x 1280 on an H100). A linear
with adapters beside its weights is not: a library would need two products.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from strop.ir.contractions import alike
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.ir.ops import OPS, Kind
from strop.ir.parts import undone
from strop.options import Options
from strop.passes.gated_linear import fits_sum
from strop.passes.linear_add import Users, is_biased, is_sum, readers_of, side_of


def product_sum(graph: Graph, options: Options) -> Graph:
    if "wgmma_gemm" in options.kernels_off:
        return graph
    users, outputs = graph.users(), set(graph.outputs)
    left = _left(graph, users, outputs) if "linear_add" not in options.disable else set[Node]()

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if not is_sum(node) or node in outputs or node in left:
            return None
        for which, side in enumerate(node.inputs):
            other, views = node.inputs[1 - which], _views(side)
            biased = views[-1].inputs[0] if views else side
            alone = (*views, biased, biased.inputs[0]) if is_biased(biased) else ()
            once = alone and all(len(users[n]) == 1 and n not in outputs for n in alone)
            if once and _is_alike(node, biased, other) and _is_over(other, node, biased, users):
                return _made(b, node, views, inputs[which], inputs[1 - which])
        return None

    return rewrite(graph, rule)


def _left(graph: Graph, users: Users, outputs: Collection[Node]) -> set[Node]:
    """Return what is left to ``linear_add``: sums, and those that are added to their products."""
    found = set[Node]()
    for node in graph.nodes:
        which = side_of(node, users, outputs)
        if which is not None and node.inputs[which].inputs[0].op == "linear":
            found |= {node, node.inputs[1 - which]}
    return found


def _views(value: Node) -> list[Node]:
    """Return the views through which a value is seen, the last one first."""
    found = list[Node]()
    while OPS[value.op].has_all_once:
        found.append(value)
        value = value.inputs[0]
    return found


def _is_alike(total: Node, biased: Node, other: Node) -> bool:
    """Tell whether the kernel can do it, and nothing is broadcast or converted."""
    linear, bias = biased.inputs
    dtypes = {n.dtype for n in (total, biased, linear, other, bias, *linear.inputs)}
    return other.shape == total.shape and len(dtypes) == 1 and fits_sum(linear)


def _is_over(other: Node, total: Node, biased: Node, users: Users) -> bool:
    """Tell whether the value is stored for others that have all read it before the linear runs."""
    views = _views(other)
    base = views[-1].inputs[0] if views else other
    if base.op in ("input", "constant") or base.kind in (Kind.VIEW, Kind.OPAQUE):
        return False
    linear = biased.inputs[0]
    readers = [reader for reader in readers_of(base, users) if reader is not total]
    is_stored = base.kind is Kind.CONTRACTION or bool(readers)
    return is_stored and all(reader.serial < linear.serial for reader in readers)


def _made(b: Builder, node: Node, views: Sequence[Node], side: Node, other: Node) -> Node:
    """Make the sum where the other value lies, which is seen through the views of the linear
    backwards. ``side`` and ``other`` are the builder's twins."""
    for view in views:
        other = undone(b, view, other)
        side = side.inputs[0] if OPS[side.op].has_all_once else side
    linear, bias = side.inputs
    op = alike("linear_add", linear.op)
    total = b.make(op, (*linear.inputs, other, bias), side.shape, node.dtype)
    for view in reversed(views):
        total = b.copy_of(view, (total,))
    return total

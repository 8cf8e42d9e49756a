"""Lay out what a graph gives back in eager's memory: its order, its gaps, and what shares it.

Clones, flips and repeats are views in the graph IR, and kernels write any dense order. A result is
laid out, or copied, so that its strides are those of the trace, and is a view of another result, or
of an argument, where the trace has it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.errors import ShapeError, UnsupportedError
from strop.frontend.functional import storage_of, view_root
from strop.ir.affine import base_of, strided
from strop.ir.dims import Expr, const
from strop.ir.graph import Builder, Node, Ref, Shape, dense_strides, memory_order
from strop.ir.ops import OPS, Kind

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

Order = tuple[int, ...] | None


def lay_out(importer: Importer, returned: Sequence[Any]) -> None:
    """Lay out values that hold results in the order that eager gives them, before anything is
    given."""
    for item in returned:
        holder = _holder(importer, item) if isinstance(item, FxNode) else None
        if holder is None:
            continue
        value = importer.node(holder)
        if value.kind is not Kind.VIEW and value not in importer.shared:
            laid = _in_user_order(importer, holder, value)
            if laid is not value:
                importer.shared[value] = storage_of(item)
                importer.copies[value, storage_of(item)] = laid


def refuse_retyped(returned: Sequence[Any]) -> None:
    """Raise UnsupportedError where eager gives a view as another type, or conjugated, of an
    argument, or of what is given as well: kernels write each into memory of its own."""
    given = {item for item in returned if isinstance(item, FxNode)}
    for item in given:
        root = view_root(item)
        if _reads_alike(root, item):
            continue
        others = {other for other in given - {item} if storage_of(other) == storage_of(root)}
        if others or root.op != "call_function":
            raise UnsupportedError(
                "a view as another type, or conjugated, is returned beside what it looks at"
            )


def _reads_alike(whole: FxNode, view: FxNode) -> bool:
    """Tell whether equal bits are equal numbers in both."""
    a, b = whole.meta["val"], view.meta["val"]
    return bool((a.dtype, a.is_conj(), a.is_neg()) == (b.dtype, b.is_conj(), b.is_neg()))


def give(importer: Importer, item: Any, outputs: list[Node], *, is_saved: bool = False) -> Any:
    """Return one result as an index into ``outputs``, one for each value, or what is no tensor."""
    value = importer.values.get(item, item) if isinstance(item, FxNode) else item
    if not isinstance(value, Node):
        return importer.literal(item)
    holder = None if is_saved else _holder(importer, item)
    if holder is None:
        value = _in_place(importer, item, value, len(outputs))
        if not is_saved and value.kind is not Kind.VIEW:
            value = _in_user_order(importer, item, value)
    else:
        memory = _memory(importer, holder, len(outputs))
        if holder is not item:
            value = _view_of(importer, item, value, importer.values[holder], memory)
        else:
            value = memory
    importer.shared.setdefault(base_of(value), storage_of(item))
    outputs.append(value)
    place = len(outputs) - 1
    return Ref(place if is_saved else importer.given.setdefault(item, place))


def _holder(importer: Importer, item: FxNode) -> FxNode | None:
    """Return the value that has all of the memory in which a result lies in eager, as it was last
    written; None where that is not dense, or no value of the graph."""
    found = view_root(item)
    if not isinstance(importer.values.get(found), Node):
        return None
    if not _reads_alike(found, item):
        return None  # such a view is a call
    if order_or_none(importer, found) is _NONE:
        return None
    return found if importer.size(found.meta["val"].storage_offset()) == const(0) else None


def _memory(importer: Importer, holder: FxNode, number: int) -> Node:
    """Return a value that lies as ``holder`` does in eager, in memory that nobody else is given."""
    value, storage = importer.node(holder), storage_of(holder)
    if (value, storage) in importer.copies:
        return importer.copies[value, storage]
    base = base_of(value)
    is_own = importer.shared.get(base, storage) == storage
    order = user_order(importer, holder, value)
    if is_own and value.kind is not Kind.VIEW:
        return _in_user_order(importer, holder, value)
    if is_own and _steps(value) == (const(0), dense_strides(value.shape, order)):
        return value
    importer.copies[value, storage] = _copy(importer, holder, value, number)
    return importer.copies[value, storage]


def _view_of(importer: Importer, item: FxNode, view: Node, whole: Node, memory: Node) -> Node:
    """Return the part of ``memory`` that a result is in eager; ``view`` is what the graph has for
    it."""
    wanted, shape = importer.symbols.shape(item.meta["val"].stride()), view.shape
    offset = importer.size(item.meta["val"].storage_offset())
    over = _over(importer.builder, view, whole, memory)
    found = _steps(over) if over is not None else None
    if (
        over is not None
        and found is not None
        and found[0] == offset
        and all(a == b or n == const(1) for a, b, n in zip(found[1], wanted, shape, strict=True))
    ):
        return over
    return importer.builder.make(
        "window", (base_of(memory),), shape, view.dtype, strides=wanted, start=offset
    )


def _steps(value: Node) -> tuple[Expr, Shape] | None:
    """Return offset and strides, if it has one stride a dim."""
    view = strided(value)
    return None if view is None or view.strides is None else (view.offset, view.strides)


def _in_place(importer: Importer, item: FxNode, value: Node, number: int) -> Node:
    """Return a result as it lies, unless it shares memory with what it does not in eager."""
    base, storage = base_of(value), storage_of(item)
    laid = importer.copies.get((base, storage))
    if laid is not None:
        over = _over(importer.builder, value, base, laid)
        assert over is not None
        return over
    if base in importer.shared:
        is_own = importer.shared[base] == storage
    elif value.kind is not Kind.VIEW or (value.op == "reshape" and value.inputs[0] is base):
        is_own = True
    else:
        is_own = any(
            isinstance(made, Node) and _is_all_of(base, made) and storage_of(fx) == storage
            for fx, made in importer.values.items()
        )
    return value if is_own else _copy(importer, item, value, number)


def _is_all_of(base: Node, value: Node) -> bool:
    """Tell whether ``value`` has each element of ``base`` once."""
    while value is not base and OPS[value.op].has_all_once:
        value = value.inputs[0]
    return value is base


def _over(b: Builder, view: Node, whole: Node, other: Node) -> Node | None:
    """Take the same view of another value; None if it is none of ``whole``."""
    if view is whole:
        return other
    if view.kind is not Kind.VIEW:
        return None
    inner = _over(b, view.inputs[0], whole, other)
    return inner and b.copy_of(view, (inner,))


def _copy(importer: Importer, fx: FxNode, value: Node, number: int) -> Node:
    return importer.builder.make(
        "copy",
        (value,),
        value.shape,
        value.dtype,
        order=user_order(importer, fx, value),
        result=number,
    )


def _in_user_order(importer: Importer, fx: FxNode, value: Node) -> Node:
    """Lay out the result as eager would; contiguous needs no word."""
    order = user_order(importer, fx, value)
    if order is None or value.op == "input":
        return value
    return importer.builder.make("copy", (value,), value.shape, value.dtype, order=order)


def user_order(importer: Importer, fx: FxNode, value: Node) -> Order:
    return order_or_contiguous(importer.symbols.shape(fx.meta["val"].stride()), value.shape)


_NONE: Any = object()


def order_or_none(importer: Importer, fx: FxNode) -> Any:
    """Return the order of a dense value; ``_NONE`` for any other."""
    value: torch.Tensor = fx.meta["val"]
    try:
        return memory_order(importer.symbols.shape(value.stride()), importer.shape(fx))
    except ShapeError:
        return _NONE


def order_or_contiguous(strides: Sequence[Expr], shape: Sequence[Expr]) -> Order:
    """Return the order; arguments that are not dense are copied at the door."""
    try:
        return memory_order(strides, shape)
    except ShapeError:
        return None

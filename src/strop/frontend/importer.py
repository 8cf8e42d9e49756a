"""FX graph of ATen calls -> graph IR. Views become views, pointwise rows pointwise nodes, the
operators with a decomposition are taken apart, and every other call stays a call into torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from strop.errors import ShapeError, UnsupportedError
from strop.frontend.decompositions import DECOMPOSITIONS
from strop.frontend.functional import storage_of
from strop.frontend.pointwise import COMPOSITES
from strop.frontend.symbols import Symbols
from strop.frontend.views import VIEWS
from strop.ir.affine import base_of
from strop.ir.dims import Expr, const
from strop.ir.graph import Builder, Graph, Node, Ref, finish
from strop.ir.ops import Kind, Op, Operands, Types, compute_dtype, rows_for

Value = Any  # Node, a tuple of Nodes, or a literal that is not a tensor


@dataclass
class Importer:
    """State of one import. ``builder`` makes the nodes, ``symbols`` translates the sizes."""

    symbols: Symbols
    builder: Builder = field(default_factory=Builder)
    values: dict[FxNode, Value] = field(default_factory=dict)
    constants: list[torch.Tensor] = field(default_factory=list)

    def node(self, fx: Any) -> Node:
        value = self.values[fx] if isinstance(fx, FxNode) else fx
        if not isinstance(value, Node):
            raise UnsupportedError(f"a tensor was expected, got {value!r}")
        return value

    def shape(self, fx: FxNode) -> tuple[Expr, ...]:
        return self.symbols.shape(fx.meta["val"].shape)

    def literal(self, value: Any) -> Any:
        """An argument that is no tensor: sizes become Exprs, nodes that hold sizes too."""
        if isinstance(value, FxNode):
            value = value.meta["val"]
        if isinstance(value, torch.SymInt):
            return self.symbols.size(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise UnsupportedError("a number that is read from a tensor or computed from a size")
        if isinstance(value, list | tuple):
            return tuple(self.literal(v) for v in value)
        return value

    def size(self, value: Any) -> Expr:
        return self.symbols.size(value.meta["val"] if isinstance(value, FxNode) else value)

    def operand(self, arg: Any, dtype: torch.dtype) -> Node:
        """A tensor operand, or a number (or size) as a constant of ``dtype``."""
        if isinstance(arg, FxNode) and isinstance(self.values.get(arg), Node):
            return self.node(arg)
        value = self.literal(arg)
        if isinstance(value, Expr) and value.is_const:
            value = value.value
        return self.builder.constant(value, dtype)


@dataclass(frozen=True, slots=True)
class Imported:
    """``returned``: what the graph gives back, each item an index into ``graph.outputs`` wrapped
    in Ref, an Expr, or a plain value. ``constants``: tensors made while tracing, the last inputs.
    """

    graph: Graph
    returned: list[Any]
    constants: list[torch.Tensor]


def import_graph(
    gm: GraphModule,
    symbols: Symbols,
    hints: Mapping[str, int],
    origins: Mapping[str, str],
    num_state: int = 0,
) -> Imported:
    """The graph IR of ``gm``.

    The first ``num_state`` placeholders are Parameters and buffers, whose memory the runtime may
    lay out anew.
    """
    importer = Importer(symbols)
    inputs: list[Node] = []
    nodes = list(gm.graph.nodes)
    num_placeholders = sum(fx.op == "placeholder" for fx in nodes)
    for fx in nodes:
        importer.builder.origin = origins.get(fx.name, "")
        if fx.op == "placeholder":
            inputs.append(_input(importer, fx, len(inputs), len(inputs) < num_state))
        elif fx.op == "get_attr":
            value = getattr(gm, fx.target).detach()
            fx.meta["val"] = value
            inputs.append(_input(importer, fx, num_placeholders + len(importer.constants), True))
            importer.constants.append(value)
        elif fx.op == "call_function":
            importer.values[fx] = _call(importer, fx)
        elif fx.op == "output":
            returned = fx.args[0]
    outputs: list[Node] = []
    result = [_returned(importer, item, outputs) for item in returned]
    graph = finish(importer.builder, inputs, outputs, hints)
    return Imported(graph, result, importer.constants)


def _returned(importer: Importer, item: Any, outputs: list[Node]) -> Any:
    value = importer.values.get(item, item) if isinstance(item, FxNode) else item
    if isinstance(value, Node):
        outputs.append(_unaliased(_in_user_order(importer, item, value), importer, item))
        return Ref(len(outputs) - 1)
    return importer.literal(item)


def _unaliased(value: Node, importer: Importer, fx: FxNode) -> Node:
    """A result that eager would not give as a view of an argument is none here either."""
    base = base_of(value)
    given = {importer.values[p]: p for p in fx.graph.nodes if p.op == "placeholder"
             and p in importer.values}  # fmt: skip
    if base not in given or storage_of(given[base]) == storage_of(fx):
        return value
    return importer.builder.make("copy", (value,), value.shape, value.dtype, order=value.order)


def _in_user_order(importer: Importer, fx: FxNode, value: Node) -> Node:
    """The result as eager would lay it out; contiguous needs no word."""
    try:
        order = memory_order(importer.symbols.shape(fx.meta["val"].stride()), value.shape)
    except ShapeError:
        return value  # a strided view: returned as whatever it is
    if order is None or value.op == "input":
        return value
    return importer.builder.make("copy", (value,), value.shape, value.dtype, order=order)


def _input(importer: Importer, fx: FxNode, index: int, is_state: bool) -> Node:
    """Argument ``index``. A size becomes a one-element shape, which tells its root."""
    value = fx.meta["val"]
    shape: tuple[Expr, ...] = ()
    dtype, order = torch.int64, None
    if isinstance(value, torch.Tensor):
        shape, dtype = importer.shape(fx), value.dtype
        order = _order_or_contiguous(importer.symbols.shape(value.stride()), shape)
    elif isinstance(value, torch.SymInt):
        shape = (importer.size(value),)
    node = importer.builder.make("input", (), shape, dtype, order=order, index=index,
                                 state=is_state, merged=())  # fmt: skip
    if isinstance(value, torch.Tensor):
        importer.values[fx] = node
    return node


def _order_or_contiguous(strides: Sequence[Expr], shape: Sequence[Expr]) -> tuple[int, ...] | None:
    """Arguments that are not dense are copied at the door."""
    try:
        return memory_order(strides, shape)
    except ShapeError:
        return None


def memory_order(strides: Sequence[Expr], shape: Sequence[Expr]) -> tuple[int, ...] | None:
    """The order of dims in memory for dense strides; None when contiguous."""
    remaining = [d for d in range(len(shape)) if shape[d] != const(1)]
    ones = [d for d in range(len(shape)) if shape[d] == const(1)]
    order: list[int] = []
    step = const(1)
    while remaining:
        dim = next((d for d in reversed(remaining) if strides[d] == step), None)
        if dim is None:
            raise ShapeError(f"input strides {list(map(str, strides))} are not dense")
        order.insert(0, dim)
        remaining.remove(dim)
        step = step * shape[dim]
    full = ones + order
    return None if [d for d in full if d not in ones] == sorted(order) else tuple(full)


def _call(importer: Importer, fx: FxNode) -> Value:
    if not _is_tensorial(fx.meta.get("val")):
        return None  # arithmetic on sizes; users read the value from its meta
    if fx.target is operator.getitem:
        return importer.values[fx.args[0]][fx.args[1]]  # type: ignore[index]
    for table in (VIEWS, DECOMPOSITIONS, COMPOSITES):
        rule = table.get(fx.target)
        value = rule(importer, fx, *fx.args, **fx.kwargs) if rule else None
        if value is not None:
            return value
    bound = bind_arguments(fx)
    for row in rows_for(fx.target):
        if row.kind is Kind.REDUCTION and row.when(bound):
            return _reduction(importer, fx, row, bound)
        if row.kind is Kind.POINTWISE and row.when(bound):
            operands = _operands(bound)
            computed = _computed_in(fx, row, operands)
            if Types.of(computed) in row.types:
                return _pointwise(importer, fx, row, bound, operands, computed)
    return opaque_call(importer, fx)


def _is_tensorial(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(v, torch.Tensor) for v in value)
    return isinstance(value, torch.Tensor)


def bind_arguments(fx: FxNode) -> dict[str, Any]:
    """Arguments by their schema names, in that order, defaults included."""
    schema = fx.target._schema.arguments  # type: ignore[union-attr]
    bound = {a.name: a.default_value for a in schema if a.has_default_value()}
    bound |= dict(zip((a.name for a in schema), fx.args, strict=False))
    bound |= dict(fx.kwargs)
    return {a.name: bound[a.name] for a in schema if a.name in bound}


_OPERAND_NAMES = frozenset({
    "self", "other", "condition", "input", "tensor1", "tensor2", "exponent", "end", "weight",
    "min", "max", "values", "grad_output", "grad_out", "output", "self_or_result",
})  # fmt: skip


def _operands(bound: Mapping[str, Any]) -> list[Any]:
    """Tensor and number arguments in schema order; whatever else the schema has is an attribute."""
    return [v for name, v in bound.items() if name in _OPERAND_NAMES and v is not None]


def _computed_in(fx: FxNode, row: Op, operands: Sequence[Any]) -> torch.dtype:
    """The type whose rules the row follows."""
    result: torch.dtype = fx.meta["val"].dtype
    return _promoted(operands) if row.operands is Operands.PROMOTED else result


def _pointwise(importer: Importer, fx: FxNode, row: Op, bound: Mapping[str, Any],
               operands: Sequence[Any], computed: torch.dtype) -> Node:  # fmt: skip
    result = fx.meta["val"].dtype
    inputs = [importer.operand(o, compute_dtype(computed)) for o in operands]
    if row.name == "cast":
        return importer.builder.cast(inputs[0], result)
    if row.operands is Operands.PROMOTED and len(inputs) > 1:
        # what is compared has been rounded to the common type, numbers too
        inputs = [_rounded(importer, x, computed) for x in inputs]
    attrs = {name: importer.literal(bound[name]) for name in row.attrs}
    return importer.builder.pointwise(row.name, *inputs, dtype=result, **attrs)


def _promoted(operands: Sequence[Any]) -> torch.dtype:
    """ATen's promotion: 0-dim tensors and numbers only decide between bool, int and float."""
    values = [o.meta["val"] if isinstance(o, FxNode) else o for o in operands]
    first, *others = values
    dtype: torch.dtype = first.dtype if not others else torch.result_type(first, others[0])
    return dtype


def _rounded(importer: Importer, x: Node, dtype: torch.dtype) -> Node:
    value = x.attrs.get("value")
    if x.op == "constant" and not isinstance(value, Expr):
        number = torch.tensor(value, dtype=dtype).item()
        return importer.builder.constant(number, compute_dtype(dtype))
    return importer.builder.cast(x, dtype) if x.dtype != compute_dtype(dtype) else x


def _reduction(importer: Importer, fx: FxNode, row: Op, bound: Mapping[str, Any]) -> Node | None:
    x, value = importer.node(bound["self"]), fx.meta["val"]
    dims = bound.get("dim")
    dims = tuple(range(len(x.shape))) if not dims and dims != 0 else dims
    dims = (dims,) if isinstance(dims, int) else tuple(d % len(x.shape) for d in dims)
    attrs = {}
    if row.name == "var":
        correction = bound.get("correction")
        attrs["correction"] = 1 if correction is None else int(correction)
    reduced = importer.builder.reduce(row.name, x, tuple(sorted(dims)), value.dtype, **attrs)
    return importer.builder.reshape(reduced, importer.shape(fx))


def opaque_call(importer: Importer, fx: FxNode) -> Value:
    """Any other overload: torch runs it. Its tensors become inputs, the rest a template."""
    inputs: list[Node] = []

    def template(arg: Any) -> Any:
        if isinstance(arg, FxNode) and isinstance(importer.values.get(arg), Node):
            inputs.append(importer.values[arg])
            return Ref(len(inputs) - 1)
        if isinstance(arg, list | tuple):
            return tuple(template(a) for a in arg)
        return importer.literal(arg)

    args = tuple(template(a) for a in fx.args)
    kwargs = tuple(sorted((k, template(v)) for k, v in fx.kwargs.items()))
    value = fx.meta["val"]
    values = value if isinstance(value, list | tuple) else [value]
    outputs = tuple(
        (importer.symbols.shape(v.shape), v.dtype) if isinstance(v, torch.Tensor) else None
        for v in values
    )
    single = not isinstance(value, list | tuple)
    shape, dtype = outputs[0] if single and outputs[0] else ((), torch.uint8)
    call = importer.builder.make(
        "aten", inputs, shape, dtype, target=str(fx.target), args=args, kwargs=kwargs,
        outputs=outputs, single=single, tag=fx.name if _is_random(fx.target) else "",
    )  # fmt: skip
    if single:
        return call
    return tuple(
        importer.builder.make("item", (call,), out[0], out[1], index=i) if out else None
        for i, out in enumerate(outputs)
    )


def _is_random(target: Callable[..., Any] | str) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())

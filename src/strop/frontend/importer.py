"""Turn an FX graph of ATen calls into graph IR. Views become views, pointwise rows pointwise nodes,
the operators with a decomposition are taken apart, and every other call stays a call into torch."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._higher_order_ops.out_dtype import out_dtype
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from strop.errors import ShapeError, UnsupportedError
from strop.frontend.bits import (
    BITS,
    BYTES,
    are_bytes,
    bits_read,
    in_own_type,
    is_short,
    of_bytes,
)
from strop.frontend.complex_numbers import without_complex
from strop.frontend.creation import CREATION
from strop.frontend.decompositions import DECOMPOSITIONS
from strop.frontend.draws import stands_for
from strop.frontend.exchanges import EXCHANGES
from strop.frontend.four_bits import of_bitsandbytes
from strop.frontend.functional import storage_of
from strop.frontend.gradients import KEPT_LAYOUTS
from strop.frontend.grid_samples import GRIDS
from strop.frontend.host_draws import unused_draw
from strop.frontend.indexing import INDEXING
from strop.frontend.library_operators import int_product
from strop.frontend.lookups import LOOKUPS
from strop.frontend.numbers import is_number
from strop.frontend.padding import PADDING
from strop.frontend.pointwise import COMPOSITES
from strop.frontend.reductions import reduction, rounded
from strop.frontend.resize import RESIZING
from strop.frontend.results import give, lay_out, order_or_contiguous, refuse_retyped
from strop.frontend.scalars import node_of, of_sizes
from strop.frontend.searching import SEARCHING
from strop.frontend.shape_rules import env_of
from strop.frontend.symbols import OutsideLanguage, Symbols, always_holds
from strop.frontend.views import COPYING, OF_MEMORY, VIEWS, refuse_shared_memory
from strop.frontend.whole import IN_TORCH
from strop.ir.affine import strided
from strop.ir.dims import Expr, const
from strop.ir.functions import HALVES
from strop.ir.graph import Builder, GeneratorRef, Graph, Node, Ref, finish
from strop.ir.ops import (
    KERNEL_DTYPES,
    Kind,
    Op,
    Operands,
    Types,
    compute_dtype,
    is_foreign,
    rows_for,
)
from strop.ir.program import Guard, HostDraw

log = logging.getLogger("strop")

_IN_TORCH = {**COPYING, **IN_TORCH, out_dtype: torch.ops.strop.int_mm.default}
_MOST_LITERALS = 16  # a longer tensor made from Python data is an input of the graph

_TABLES = (
    VIEWS,
    CREATION,
    INDEXING,
    LOOKUPS,
    SEARCHING,
    RESIZING,
    GRIDS,
    PADDING,
    DECOMPOSITIONS,
    COMPOSITES,
    BITS,
    EXCHANGES,
)

_NO_ORDER: Any = object()

Value = Any  # Node, a tuple of Nodes, or a literal that is not a tensor


@dataclass
class Importer:
    """Hold the state of one import. ``builder`` makes the nodes, ``symbols`` translates the
    sizes."""

    symbols: Symbols
    hints: Mapping[str, int] = field(default_factory=dict)  # of the sizes
    builder: Builder = field(default_factory=Builder)
    values: dict[FxNode, Value] = field(default_factory=dict)
    constants: list[torch.Tensor] = field(default_factory=list)
    devices: frozenset[str] = frozenset()  # of all values
    reads_bytes: bool = False  # of weights in floats of 8 bits
    shared: dict[Node, int | None] = field(default_factory=dict)  # memory that the caller sees
    needed: dict[Guard, None] = field(default_factory=dict)  # what nodes want of sizes
    copies: dict[tuple[Node, int | None], Node] = field(default_factory=dict)  # base, memory
    given: dict[FxNode, int] = field(default_factory=dict)  # results, by place among the outputs
    orders: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)  # import_graph's
    host_draws: list[HostDraw] = field(default_factory=list)
    last_exchange: Node | None = None  # with other processes, whose order is part of the graph

    def node(self, fx: Any) -> Node:
        value = self.values[fx] if isinstance(fx, FxNode) else fx
        if not isinstance(value, Node):
            raise UnsupportedError(f"a tensor was expected, got {value!r}")
        return value

    def shape(self, fx: FxNode) -> tuple[Expr, ...]:
        return self.symbols.shape(fx.meta["val"].shape)

    def literal(self, value: Any) -> Any:
        """Return an argument that is no tensor: sizes become Exprs, nodes that hold sizes too."""
        if isinstance(value, FxNode):
            value = value.meta["val"]
        if isinstance(value, torch.SymInt):
            return self.symbols.size(value)
        if isinstance(value, torch.SymFloat):
            return self.symbols.number(value)
        if isinstance(value, torch.SymBool):
            raise UnsupportedError("a condition that is read from a tensor")
        if isinstance(value, list | tuple):
            return tuple(self.literal(v) for v in value)
        return value

    def needs_place(self, place: Expr, size: Expr) -> None:
        """Have a guard that a place lies within a dim of this size. torch asks nothing of symbols
        where it treats all as sizes that depend on data, as in a trace of ours."""
        for guard in (Guard(size - place, ">", const(0)), Guard(place, ">=", const(0))):
            if not always_holds(guard):
                self.needed[guard] = None

    def has_other_sizes(self, fx: FxNode, value: Node) -> bool:
        """Tell whether a rule has made of operands what torch would not: a sum may be spread over
        more dims than a result has."""
        traced = fx.meta["val"]
        if not isinstance(traced, torch.Tensor) or traced.is_complex():
            return False
        shape = self.shape(fx)
        if shape == value.shape:
            return False
        return [n.eval(self.hints) for n in shape] != [n.eval(self.hints) for n in value.shape]

    def size(self, value: Any) -> Expr:
        return self.symbols.size(value.meta["val"] if isinstance(value, FxNode) else value)

    def operand(self, arg: Any, dtype: torch.dtype) -> Node:
        """Return a tensor operand, or a number (or size) as a constant of ``dtype``."""
        if isinstance(arg, FxNode) and is_number(arg.meta.get("val")):
            return self.builder.cast(node_of(self, arg), dtype)
        if isinstance(arg, FxNode) and isinstance(self.values.get(arg), Node):
            return self.node(arg)
        try:
            value = self.literal(arg)
        except OutsideLanguage as error:  # a number that Python code has made of sizes
            exact = of_sizes(self.builder, self.symbols, error.expression, torch.float64)
            return self.builder.cast(exact, dtype)  # Python computes in 64 bits, too
        if isinstance(value, Expr) and value.is_const:
            value = value.value
        return self.builder.constant(value, dtype)


@dataclass(frozen=True, slots=True)
class Imported:
    """Hold what an import gives. ``returned``: what the graph gives back, each item an index into
    ``graph.outputs`` wrapped in Ref, an Expr, or a plain value. ``constants``: tensors made while
    tracing, the last inputs. ``guards``: what the import has asked of sizes, beyond the trace.
    ``host_draws`` are those of a graph for a GPU that nobody reads."""

    graph: Graph
    returned: list[Any]
    constants: list[torch.Tensor]
    guards: tuple[Guard, ...] = ()
    host_draws: tuple[HostDraw, ...] = ()


def import_graph(
    gm: GraphModule,
    symbols: Symbols,
    hints: Mapping[str, int],
    origins: Mapping[str, str],
    num_state: int = 0,
    num_saved: int = 0,
    orders: Mapping[str, tuple[int, ...] | None] = MappingProxyType({}),
    small: Set[int] = frozenset(),
    tied: Set[int] = frozenset(),
    may_draw_on_host: bool = False,
) -> Imported:
    """Turn ``gm`` into graph IR.

    The first ``num_state`` placeholders are Parameters and buffers, whose memory the runtime may
    lay out anew, but for those of the places in ``tied``, which share theirs with others; those in
    ``small`` are factors of low rank. The last ``num_saved``
    results that are tensors are for a backward graph; ``orders`` says how those that a forward
    graph has left lie in memory, by placeholder. ``may_draw_on_host``: who runs the program makes
    its ``host_draws``; else they are refused.
    """
    importer = Importer(symbols, hints=hints, orders=orders)
    inputs: list[Node] = []
    traced, origins = without_complex(gm, origins)
    nodes = list(traced.nodes)
    env = env_of(pytree.tree_leaves([fx.meta.get("val") for fx in nodes]))
    asked: Sequence[Any] = () if env is None else env.guards
    num_asked = len(asked)
    importer.devices, importer.reads_bytes = _devices(nodes), bits_read(nodes)
    num_placeholders = sum(fx.op == "placeholder" for fx in nodes)
    for fx in nodes:
        importer.builder.origin = origins.get(fx.name, "")
        if fx.op == "placeholder":
            place = len(inputs)
            marks = {name: True for name, of in (("small", small), ("tied", tied)) if place in of}
            inputs.append(_input(importer, fx, place, place < num_state, marks))
        elif fx.op == "get_attr":
            inputs += _kept(importer, fx, getattr(gm, fx.target), num_placeholders)
        elif fx.op == "call_function":
            draw = unused_draw(fx, importer.devices) if may_draw_on_host else None
            importer.host_draws += [draw] if draw else []
            importer.values[fx] = None if draw else _call(importer, fx)
        elif fx.op == "output":
            returned = fx.args[0]
    for fx in nodes:
        if fx.op == "placeholder" and fx in importer.values:
            importer.shared[importer.values[fx]] = storage_of(fx)
    outputs: list[Node] = []
    tensors = [item for item in returned if _is_tensorial(_traced(item))]
    first_saved = len(tensors) - num_saved
    refuse_retyped(tensors[:first_saved])
    lay_out(importer, tensors[:first_saved])
    saved = set(tensors[first_saved:])
    result = [give(importer, item, outputs, is_saved=item in saved) for item in returned]
    graph = finish(importer.builder, inputs, outputs, hints, len(outputs) - first_saved)
    guards = (*symbols.guards(guard.expr for guard in asked[num_asked:]), *importer.needed)
    return Imported(graph, result, importer.constants, guards, tuple(importer.host_draws))


def _kept(importer: Importer, fx: FxNode, kept: Any, num_placeholders: int) -> list[Node]:
    """Import what a trace has kept, and return its input if it is one, behind all arguments."""
    kept = torch.view_as_real(kept) if fx.meta.get("pairs") else kept
    if not _attribute(importer, fx, kept):
        return []
    found = _input(importer, fx, num_placeholders + len(importer.constants), True)
    importer.constants.append(fx.meta["val"])
    return [found]


def _attribute(importer: Importer, fx: FxNode, given: Any) -> bool:
    """Tell whether what a trace has kept is an input of the graph; a few numbers are part of it."""
    if isinstance(given, torch.Generator) and (own := stands_for(given)) is not None:
        importer.values[fx] = own
        return False
    if not isinstance(given, torch.Tensor):  # a generator, whose copy nobody seeds
        raise UnsupportedError(f"its forward uses a {type(given).__name__} of its own")
    with unset_fake_temporarily():  # torch.compile imports under its fake tensors
        value = fx.meta["val"] = given.detach()
        if value.numel() > _MOST_LITERALS or value.dtype not in KERNEL_DTYPES:
            return True
        importer.values[fx] = _literals(importer, value)
    return False


def _literals(importer: Importer, value: torch.Tensor) -> Node:
    """Make a few numbers, which Python code made into a tensor, constants of the graph."""
    b = importer.builder
    numbers = [b.constant(v, value.dtype) for v in value.flatten().tolist()]
    if not numbers:
        empty = b.view_as_rank(b.constant(0, value.dtype), value.dim())
        return b.expand(empty, value.shape)
    if len(numbers) == 1:
        return b.reshape(numbers[0], value.shape)
    flat = b.make("cat", [b.reshape(n, (1,)) for n in numbers], (len(numbers),), value.dtype, dim=0)
    return b.reshape(flat, value.shape)


def _traced(item: Any) -> Any:
    return item.meta.get("val") if isinstance(item, FxNode) else item


def _input(
    importer: Importer,
    fx: FxNode,
    index: int,
    is_state: bool,
    marks: Mapping[str, bool] = MappingProxyType({}),
) -> Node:
    """Import argument ``index``, with these marks on it. A size becomes a one-element shape, which
    tells its root."""
    value = fx.meta["val"]
    shape: tuple[Expr, ...] = ()
    dtype, order = torch.int64, None
    if isinstance(value, torch.Tensor):
        shape, dtype = importer.shape(fx), value.dtype
        dtype = BYTES if is_state and is_short(fx) and importer.reads_bytes else dtype
        order = importer.orders.get(fx.name, _NO_ORDER)
        if order is _NO_ORDER:
            order = order_or_contiguous(importer.symbols.shape(value.stride()), shape)
    elif isinstance(value, torch.SymInt):
        shape = (importer.size(value),)
    elif is_number(value):
        dtype = torch.float64
    node = importer.builder.make(
        "input", (), shape, dtype, order=order, index=index, state=is_state, merged=(), **marks
    )
    if isinstance(value, torch.Tensor) or is_number(value):
        importer.values[fx] = node
    return node


def _call(importer: Importer, fx: FxNode) -> Value:
    if not _is_tensorial(fx.meta.get("val")):
        return None  # arithmetic on sizes; users read the value from its meta
    if fx.target is operator.getitem:
        return importer.values[fx.args[0]][fx.args[1]]  # type: ignore[index]
    if (operands := int_product(fx)) is not None:
        return opaque_call(importer, fx, operands)
    if isinstance(fx.target, HigherOrderOperator):
        raise UnsupportedError(f"{fx.target} runs other operators")
    try:
        value = of_bytes(importer, fx) or of_bitsandbytes(importer, fx)
        value = value or _expressed(importer, fx)
    except ShapeError as error:  # sizes that are equal, but not as polynomials
        log.debug("%s runs in torch: %s", fx.target, error)
        return opaque_call(importer, fx, why=str(error))
    if isinstance(value, Node) and importer.has_other_sizes(fx, value):
        return opaque_call(importer, fx, why="its operands do not fit, which torch says")
    return opaque_call(importer, fx) if value is None else value


def _expressed(importer: Importer, fx: FxNode) -> Value | None:
    """Return the call as nodes of the graph IR, if there is a way."""
    if fx.target in OF_MEMORY:
        refuse_shared_memory(importer, fx.all_input_nodes[0])
    if not all(_is_for_kernels(x) for x in (fx, *fx.all_input_nodes)):
        return None
    if any(isinstance(importer.values.get(x), GeneratorRef) for x in fx.all_input_nodes):
        return None  # torch draws by it
    for table in _TABLES:
        rule = table.get(fx.target)
        value = rule(importer, fx, *fx.args, **fx.kwargs) if rule else None
        if value is not None:
            return value
    bound = bind_arguments(fx)
    for row in rows_for(fx.target):
        if row.kind is Kind.REDUCTION and row.when(bound):
            return reduction(importer, fx, row, bound)
        if row.kind is Kind.POINTWISE and row.when(bound):
            operands = _operands(bound)
            computed = _computed_in(fx, row, operands)
            if Types.of(computed) in row.types:
                return _pointwise(importer, fx, row, bound, operands, computed)
    return None


def _is_for_kernels(fx: FxNode) -> bool:
    """Tell whether kernels can take it: complex, quantised and 8-bit float tensors stay in
    torch."""
    values = pytree.tree_leaves(fx.meta.get("val"))
    return all(v.dtype in KERNEL_DTYPES for v in values if isinstance(v, torch.Tensor))


def _is_tensorial(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(v, torch.Tensor) for v in value)
    return isinstance(value, torch.Tensor)


def bind_arguments(fx: FxNode) -> dict[str, Any]:
    """Return arguments by their schema names, in that order, defaults included."""
    schema = fx.target._schema.arguments  # type: ignore[union-attr]
    bound = {a.name: a.default_value for a in schema if a.has_default_value()}
    bound |= dict(zip((a.name for a in schema), fx.args, strict=False))
    bound |= dict(fx.kwargs)
    return {a.name: bound[a.name] for a in schema if a.name in bound}


_OPERAND_NAMES = frozenset(
    {
        "self",
        "other",
        "condition",
        "input",
        "tensor1",
        "tensor2",
        "exponent",
        "end",
        "weight",
        "min",
        "max",
        "values",
        "grad_output",
        "grad_out",
        "output",
        "self_or_result",
    }
)


def _operands(bound: Mapping[str, Any]) -> list[Any]:
    """Return tensor and number arguments in schema order; whatever else the schema has is an
    attribute."""
    return [v for name, v in bound.items() if name in _OPERAND_NAMES and v is not None]


def _computed_in(fx: FxNode, row: Op, operands: Sequence[Any]) -> torch.dtype:
    """Return the type whose rules the row follows."""
    result: torch.dtype = fx.meta["val"].dtype
    return _promoted(operands) if row.operands is Operands.PROMOTED else result


def _pointwise(
    importer: Importer,
    fx: FxNode,
    row: Op,
    bound: Mapping[str, Any],
    operands: Sequence[Any],
    computed: torch.dtype,
) -> Node:
    result = fx.meta["val"].dtype
    inputs = [importer.operand(o, compute_dtype(computed)) for o in operands]
    if row.name == "cast":
        return importer.builder.cast(_in_own_half(importer, inputs[0], result), result)
    if row.operands is Operands.PROMOTED and len(inputs) > 1:
        # what is compared has been rounded to the common type, numbers too
        inputs = [_rounded(importer, x, computed) for x in inputs]
    attrs = {name: importer.literal(bound[name]) for name in row.attrs}
    return importer.builder.pointwise(row.name, *inputs, dtype=result, **attrs)


def _in_own_half(importer: Importer, x: Node, dtype: torch.dtype) -> Node:
    """Round a value to its own half type on the way to the other one, as ``_rounded`` does."""
    is_other = x.dtype in HALVES and dtype in HALVES and x.dtype != dtype
    return _rounded(importer, x, x.dtype) if is_other else x


def _promoted(operands: Sequence[Any]) -> torch.dtype:
    """Promote as ATen does: 0-dim tensors and numbers only decide between bool, int and float."""
    values = [o.meta["val"] if isinstance(o, FxNode) else o for o in operands]
    values = [1.0 if isinstance(v, torch.SymFloat) else v for v in values]
    first, *others = values
    dtype: torch.dtype = first.dtype if not others else torch.result_type(first, others[0])
    return dtype


def _rounded(importer: Importer, x: Node, dtype: torch.dtype) -> Node:
    """Round what is decided by. A kernel that computes it and one that reads it from memory, where
    it is rounded, would decide differently else."""
    value = x.attrs.get("value")
    if x.op == "constant" and not isinstance(value, Expr):
        number = torch.tensor(value, dtype=dtype).item()
        return importer.builder.constant(number, compute_dtype(dtype))
    if x.op == "cast" and x.inputs[0].dtype in HALVES and x.dtype not in HALVES:
        return importer.builder.cast(rounded(importer.builder, x.inputs[0]), x.dtype)
    wide = x.dtype == compute_dtype(dtype)
    return x if wide else rounded(importer.builder, importer.builder.cast(x, dtype))


def opaque_call(
    importer: Importer, fx: FxNode, given: Sequence[Any] | None = None, why: str = ""
) -> Value:
    """Leave any other overload to torch. Its tensors become inputs, the rest a template. ``given``
    are other arguments than those that were traced; ``why`` there is a rule that did not do, which
    people hear of where nobody decided that torch runs the operator."""
    inputs: list[Node] = []

    def template(arg: Any) -> Any:
        if isinstance(arg, FxNode) and isinstance(importer.values.get(arg), Node):
            lying = _contiguous_as_traced if fx.target in BY_CONTIGUITY else _dense_as_traced
            given, own = lying(importer, arg), arg.meta["val"].dtype
            inputs.append(in_own_type(importer, given, own) if are_bytes(importer, arg) else given)
            return Ref(len(inputs) - 1)
        if isinstance(arg, FxNode) and isinstance(importer.values.get(arg), GeneratorRef):
            return importer.values[arg]
        if isinstance(arg, list | tuple):
            return tuple(template(a) for a in arg)
        return importer.literal(arg)

    _refuse_host_values(importer, fx)
    args = tuple(template(a) for a in (fx.args if given is None else given))
    kwargs = tuple(sorted((k, template(v)) for k, v in fx.kwargs.items()))
    value = fx.meta["val"]
    values = value if isinstance(value, list | tuple) else [value]
    outputs = tuple(
        (importer.symbols.shape(v.shape), v.dtype) if isinstance(v, torch.Tensor) else None
        for v in values
    )
    single = not isinstance(value, list | tuple)
    kept, target = KEPT_LAYOUTS.get(fx.target), str(_IN_TORCH.get(fx.target, fx.target))
    more: dict[str, Any] = {"wants": kept.operands(inputs)} if kept else {}
    more |= {"why": why} if why and is_foreign(target) else {}
    shape, dtype = outputs[0] if single and outputs[0] else ((), torch.uint8)
    call = importer.builder.make(
        "aten",
        inputs,
        shape,
        dtype,
        order=kept.result(0, shape) if kept and single else None,
        target=target,
        args=args,
        kwargs=kwargs,
        outputs=outputs,
        single=single,
        tag=fx.name if _is_random(fx.target) else "",
        **more,
    )
    if single:
        return call
    return tuple(
        importer.builder.make(
            "item", (call,), out[0], out[1], index=i, order=kept.result(i, out[0]) if kept else None
        )
        if out
        else None
        for i, out in enumerate(outputs)
    )


def _dense_as_traced(importer: Importer, fx: FxNode) -> Node:
    """Make an operand of an opaque call dense. Some of torch's kernels take contiguous operands
    only, and the copy that made one was dropped at import as the value itself."""
    value, traced = importer.node(fx), fx.meta["val"]
    view = strided(value)
    if value.kind is not Kind.VIEW or view is None or view.strides == value.strides:
        return value
    if importer.symbols.shape(traced.stride()) != value.strides:
        return value
    return importer.builder.make("copy", (value,), value.shape, value.dtype)


# These decompose the transpose of a contiguous matrix, which their gradient has to know.
BY_CONTIGUITY = {
    torch.ops.aten._linalg_det.default,
    torch.ops.aten._linalg_slogdet.default,
    torch.ops.aten._linalg_solve_ex.default,
}


def _contiguous_as_traced(importer: Importer, fx: FxNode) -> Node:
    """Make an operand (..., m, n) contiguous if it was so in the trace, else column by column."""
    value, traced = importer.node(fx), fx.meta["val"]
    rank = len(value.shape)
    strides = importer.symbols.shape(traced.stride())
    order = None if strides == value.strides else (*range(rank - 2), rank - 1, rank - 2)
    return importer.builder.make("copy", (value,), value.shape, value.dtype, order=order)


def _refuse_host_values(importer: Importer, fx: FxNode) -> None:
    """Refuse values that torch would compute on the CPU, which kernels of a GPU cannot read."""
    others = importer.devices
    if others - {"cpu"} and _devices([fx]) == {"cpu"}:
        raise UnsupportedError(
            f"{fx.target} makes a tensor on the CPU in a graph for {set(others)}"
        )


def _devices(nodes: Iterable[FxNode]) -> frozenset[str]:
    """Return the kinds of devices on which the results of these nodes lie."""
    values = pytree.tree_leaves([fx.meta.get("val") for fx in nodes])
    return frozenset(v.device.type for v in values if isinstance(v, torch.Tensor))


def _is_random(target: Callable[..., Any] | str) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())

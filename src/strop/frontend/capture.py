"""Trace a module once, for every size: make_fx over fake tensors with symbolic sizes.

``strop.optimize`` owns its inputs, so it needs no Dynamo: fake inputs are made with the sizes
that we want (for a UNet ``(b, 4, 8*h, 8*w)``, whence every size in the graph is a monomial of b,
h, w) and the module runs on them in Python. Nothing is specialised that the model does not
itself ask for; what it asks for comes back as guards. Measured on SD1.5: 5 s and 6 guards,
against 28 s through Dynamo and AOTAutograd (docs/decisions/0002).
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.fx.experimental._config as fx_config
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.overrides import TorchFunctionMode

from strop.errors import CaptureError
from strop.frontend.affine_codes import opened_codes
from strop.frontend.block_reuse import BlockReuse
from strop.frontend.composed_tensors import is_composed
from strop.frontend.differentiated import refuse_gradients_outside, refuse_wrapped
from strop.frontend.effects import check_constants, check_state, no_effects
from strop.frontend.exchanges import functional_collectives, refuse_unread, traced_collectives
from strop.frontend.fake_tensors import fake_weights
from strop.frontend.formats import UnknownSizeError
from strop.frontend.functional import WriteThroughViewError, make_functional
from strop.frontend.inlined import inlined
from strop.frontend.layout_reads import LayoutReads
from strop.frontend.layouts import overlap_by_traced_sizes
from strop.frontend.library_operators import opened
from strop.frontend.module_tensors import named_state, putting_together, tensor_places
from strop.frontend.numbers import Numbers, python_floats, python_texts
from strop.frontend.numbers import NumbersNeeded as NumbersNeeded  # for the runtime
from strop.frontend.objects import as_tree, check_leaves
from strop.frontend.of_torch import DECOMPOSITIONS
from strop.frontend.origins import record_origins, settle_origins
from strop.frontend.other_memory import refuse_unfollowed
from strop.frontend.padded_encoders import padded_encoders
from strop.frontend.python_classes import mark_parameters
from strop.frontend.python_sizes import symbolic_builtins
from strop.frontend.quick import without_loading_compilers, without_tensor_meta
from strop.frontend.ragged_tables import ragged_tables
from strop.frontend.repeated_blocks import UNWATCHED, RepeatedBlocks, TraceWatch
from strop.frontend.scalars import is_operand
from strop.frontend.shape_rules import TracedSizes, place, shape_rules
from strop.frontend.silent_logs import silent
from strop.frontend.symbols import OutsideLanguage, Symbols
from strop.frontend.tables import fake_tables, row_specs, rows_read_otherwise
from strop.ir.dims import Expr, const, symbol
from strop.ir.program import Guard, NumberGuard
from strop.ir.tensor_spec import TensorSpec

log = logging.getLogger("strop")


# Tracing sets what belongs to the process: hooks on all modules, settings of fx. Modules of several
# threads take turns.
ONE_AT_A_TIME = threading.RLock()
_CARRIED, _MOST_CARRIED = 6, 2**40  # sizes that one tensor brings into a trace, and elements


@dataclass(frozen=True, slots=True)
class Same:
    """Leaf ``place`` of a result is a tensor that the caller knows: ``kind`` is "argument", "state"
    (a weight or a buffer) or "result" (an earlier leaf), ``number`` says which."""

    place: int
    kind: str
    number: int


@dataclass(frozen=True, slots=True)
class Captured:
    """Hold a traced module. Placeholders of ``gm``: the state in ``state_names`` order, then
    inputs."""

    gm: GraphModule
    state_names: tuple[str, ...]
    input_specs: tuple[TensorSpec, ...]
    symbols: Symbols
    guards: tuple[Guard, ...]
    hints: Mapping[str, int]
    out_spec: pytree.TreeSpec
    origins: Mapping[str, str]  # FX node name -> module path
    fixed: tuple[str, ...] = ()  # sizes that the module's code fixes, each with what asked for it
    layout_reads: tuple[str, ...] = ()  # what it asks about the memory of its arguments
    number_guards: tuple[NumberGuard, ...] = ()  # what it asks about numbers that are inputs
    has_gradients: bool = False  # whether it turns gradients on: which weights want one matters
    same: tuple[Same, ...] = ()  # leaves of its result that are other tensors themselves
    rows: tuple[TensorSpec, ...] = ()  # of each table, as many elements as it has rows
    blocks: BlockReuse = field(default_factory=BlockReuse)  # repeated ones


def capture(
    module: nn.Module,
    call: Callable[..., Any],
    specs: Sequence[TensorSpec],
    hints: Mapping[str, int],
    numbers: Sequence[float] = (),
    tables: Sequence[str] = (),
    watch: TraceWatch = UNWATCHED,
    device: torch.device | None = None,
) -> Captured:
    """Trace ``call(*tensors, *numbers)``, which runs ``module``, with symbolic sizes and numbers.
    The last ``specs`` are those of the numbers, each a tensor without dims. Weights require a
    gradient if they do now, arguments none. ``tables`` are the names of weights whose numbers of
    rows are sizes, too. Weights are traced as if on ``device``, if there is one.

    Raises NumbersNeeded when the module needs the value of a number, and CaptureError when it does
    something that depends on tensor values. A size that is traced as 0 is no symbol: torch takes
    symbols to be positive, and keeps no guard on that.
    """
    specs, hints = without_empty(specs, hints)
    shape_env = TracedSizes()
    shape_env.numbers = Numbers(numbers)
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # to look up symbolic sizes takes longer than to work results out
    with ONE_AT_A_TIME, settings():
        state = named_state(module)
        rows = dict(zip(tables, row_specs([state[n] for n in tables], device), strict=True))
        hints |= {spec.shape[0]: len(state[name]) for name, spec in rows.items()}
        roots = fake_roots(mode, hints)
        fake_state = fake_weights(mode, state, device)
        with mode:
            fake_state |= fake_tables(state, rows, roots)
            fakes = [fake_input(spec, roots) for spec in specs[: len(specs) - len(numbers)]]
        fakes += [shape_env.numbers.symbol(shape_env, n) for n in range(len(numbers))]
        traced = functools.partial(_traced, module, call, fake_state, fakes, mode, watch)
        try:
            gm, out_spec, origins, reads, same, blocks = traced()
        except WriteThroughViewError:  # torch can take these out too, at the price of copies
            apart = functools.partial(functionalize, remove="mutations")
            gm, out_spec, origins, reads, same, blocks = traced(apart)
    check_constants(gm, module)
    pinned, own = rows_read_otherwise(gm, tuple(state), rows), [*specs, *rows.values()]
    found = known_sizes(module, shape_env, gm, roots, own, hints, pinned=pinned)
    return Captured(
        gm,
        tuple(state),
        found.specs[: len(specs)],
        found.symbols,
        found.guards,
        found.hints,
        out_spec,
        origins,
        found.fixed,
        tuple(reads.asked),
        shape_env.numbers.guards,
        reads.has_gradients,
        same,
        found.specs[len(specs) :],
        blocks,
    )


@dataclass(frozen=True, slots=True)
class KnownSizes:
    """Hold what a trace has found out of its sizes."""

    symbols: Symbols
    guards: tuple[Guard, ...]
    specs: tuple[TensorSpec, ...]  # of the arguments, in roots that are left
    hints: Mapping[str, int]
    fixed: tuple[str, ...]


def known_sizes(
    module: nn.Module,
    shape_env: ShapeEnv,
    gm: GraphModule,
    roots: Mapping[str, torch.SymInt],
    specs: Sequence[TensorSpec],
    hints: Mapping[str, int],
    *,
    fixes_numbers: bool = True,
    pinned: Set[str] = frozenset(),
) -> KnownSizes:
    """Return what is known of sizes. Roots that the trace has fixed or divided are replaced
    everywhere, and those that are ``pinned`` are the traced sizes. ``fixes_numbers``: what is
    computed from sizes for a tensor has to be one number, but for operands of arithmetic."""
    known = {name: const(hints[name]) if name in pinned else symbol(name) for name in roots}
    symbols, guards = _settled(shape_env, gm, roots, known, hints, fixes_numbers)
    # node.expr would give what a root was specialised to
    sizes = {n: symbols.names[str(root.node._expr)] for n, root in roots.items()}
    own_specs = [replace(s, shape=tuple(str(e.substitute(sizes)) for e in s.sizes)) for s in specs]
    fixed = (*_fixed(shape_env, roots, sizes, pinned), *_fixed_quotients(shape_env, symbols))
    for text in fixed:
        log.info("%s: its graph fixes %s", type(module).__name__, text)
    own_hints = symbols.root_values(symbols.hints)
    unseen = own_hints.keys() - set().union(*(e.roots for s in own_specs for e in s.sizes))
    kept = {n: v for n, v in own_hints.items() if n not in unseen}
    return KnownSizes(symbols, guards, tuple(own_specs), kept, fixed)


def without_empty(
    specs: Sequence[TensorSpec], hints: Mapping[str, int]
) -> tuple[list[TensorSpec], dict[str, int]]:
    empty = {name: const(0) for name, size in hints.items() if size == 0}
    fixed = [
        replace(spec, shape=tuple(str(size.substitute(empty)) for size in spec.sizes))
        for spec in specs
    ]
    return fixed, {name: size for name, size in hints.items() if size}


def _fixed(
    shape_env: ShapeEnv,
    roots: Mapping[str, torch.SymInt],
    sizes: Mapping[str, Expr],
    pinned: Set[str],
) -> Iterator[str]:
    """Yield which sizes the graph holds for at one value only, and what asked for that."""
    for root, size in sizes.items():
        if not size.is_const or root in pinned:
            continue
        why = _question(shape_env, {str(roots[root].node._expr)})
        yield f"the size {root} at {size.value}{why}"


def _fixed_quotients(shape_env: ShapeEnv, symbols: Symbols) -> Iterator[str]:
    """Yield which quotients of sizes the graph holds for at one value only, such as a picture's
    patches a side where the code asks whether they are those of its table."""
    for quotient, value in sorted(symbols.floors.items(), key=str):
        roots = quotient.numerator.roots
        traced = {name for name in symbols.names if symbols.size_of(name).roots & roots}
        yield f"the size {quotient} at {value}{_question(shape_env, traced)}"


def _question(shape_env: ShapeEnv, traced: Set[str]) -> str:
    """Return what asked for one value of these sizes, and where, or nothing."""
    guards = [g for g in shape_env.guards if traced & {s.name for s in g.expr.free_symbols}]
    first = next((g for g in guards if isinstance(g.expr, sympy.Eq)), (*guards, None)[0])
    return f": {first.expr} at {place(first)}" if first is not None else ""


def _settled(
    shape_env: ShapeEnv,
    gm: GraphModule,
    roots: Mapping[str, torch.SymInt],
    known: Mapping[str, Expr],
    hints: Mapping[str, int],
    fixes_numbers: bool,
) -> tuple[Symbols, tuple[Guard, ...]]:
    """Return the names of all sizes, and what must hold of them."""
    names = {str(root.node._expr): known[name] for name, root in roots.items()}
    traced = {str(root.node._expr): hints[name] for name, root in roots.items()}
    symbols = Symbols(names, traced)
    symbols.replace(shape_env.replacements)
    expressions = [guard.expr for guard in shape_env.guards]
    indices = list(_indices(gm, fixes_numbers))
    symbols.settle(_sizes(gm), expressions, indices)
    while True:
        try:
            checks = (*symbols.guards(expressions), *symbols.assumed.values())
            return symbols, tuple(dict.fromkeys((*checks, *_not_negative(symbols, gm))))
        except OutsideLanguage as error:
            symbols.pin(error)
            symbols.settle(_sizes(gm), expressions, indices)


def _not_negative(symbols: Symbols, gm: GraphModule) -> Iterator[Guard]:
    """Yield the guards of sizes that may not be negative: ``x[1:]`` has a row less than x, which
    torch notes nowhere, but for an x without rows."""
    for node in gm.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            for size in symbols.shape(value.shape if isinstance(value, Tensor) else ()):
                if size.may_be_negative:
                    yield Guard(size, ">=", const(0))


def _sizes(gm: GraphModule) -> Iterator[int | torch.SymInt]:
    """Yield every size of a tensor in the graph."""
    for node in gm.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            yield from value.shape if isinstance(value, Tensor) else ()


def _indices(gm: GraphModule, with_numbers: bool) -> Iterator[Any]:
    """Yield what else is computed from sizes, and the numbers among that which a tensor is computed
    from."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        yield from (v for v in pytree.tree_leaves(value) if isinstance(v, torch.SymInt))
        for source in node.all_input_nodes if with_numbers and isinstance(value, Tensor) else ():
            number = source.meta.get("val")
            if isinstance(number, torch.SymFloat) and not is_operand(source, node):
                yield number


@contextmanager
def settings() -> Iterator[None]:
    """Set torch's symbolic shapes so that equal hints stay distinct symbols, and sizes 0 and 1 are
    not special."""
    with (
        fx_config.patch(  # type: ignore[attr-defined]
            use_duck_shape=False, backed_size_oblivious=True
        ),
        shape_rules(),
        without_loading_compilers(),
        torch.no_grad(),
    ):
        yield


def fake_roots(mode: FakeTensorMode, hints: Mapping[str, int]) -> dict[str, torch.SymInt]:
    """Make one symbol per root name, with its hint as traced value."""
    roots: dict[str, torch.SymInt] = {}
    for part in _carried(hints):
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC] * len(part)
        )
        carrier = mode.from_tensor(
            torch.empty(tuple(part.values()), device="meta"), symbolic_context=context
        )
        roots |= zip(part, carrier.shape, strict=True)  # type: ignore[arg-type]
    return roots


def _carried(hints: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield sizes that fit in one tensor each: torch counts its elements in 64 bits, and six tables
    of 100,000 rows have more."""
    part: dict[str, int] = {}
    for name, size in hints.items():
        if len(part) == _CARRIED or math.prod(part.values()) * size > _MOST_CARRIED:
            yield part
            part = {}
        part[name] = size
    if part:
        yield part


def fake_input(spec: TensorSpec, roots: Mapping[str, torch.SymInt]) -> Tensor:
    sizes = [expr.value if expr.is_const else expr.eval(roots) for expr in spec.sizes]  # type: ignore[arg-type]
    return spec.empty(sizes)


def _traced(
    module: nn.Module,
    call: Callable[..., Any],
    state: dict[str, Tensor],
    fakes: list[Any],
    mode: FakeTensorMode,
    watch: TraceWatch,
    transform: Callable[[Any], Any] | None = None,
) -> tuple[GraphModule, pytree.TreeSpec, dict[str, str], LayoutReads, tuple[Same, ...], BlockReuse]:
    specs: list[pytree.TreeSpec] = []
    same: list[Same] = []
    assert isinstance(mode.shape_env, TracedSizes)
    numbers = mode.shape_env.numbers
    reads = LayoutReads([fake for fake in fakes if isinstance(fake, Tensor)])
    places = list(tensor_places(module.named_modules()))
    reads.has_composed = any(is_composed(table[key]) for _, table, key in places)
    kept = {
        name: (table, key)
        for name, table, key in places
        if not (key.startswith("_") and "_parameters" in table)
    }  # but for caches
    put = putting_together(module) if reads.has_composed else dict
    own = named_state(module)

    def flat(state: dict[str, Tensor], *inputs: Tensor) -> list[Any]:
        mark_parameters((state[name], tensor) for name, tensor in own.items())
        held = put(state)
        swapped = torch.nn.utils.stateless._reparametrize_module(module, held, tie_weights=True)
        with swapped:
            with reads.of_forward((*inputs, *state.values())):
                result = call(*inputs)
            leaves, spec = pytree.tree_flatten(as_tree(result))
            check_leaves(leaves)
            numbers.check(leaves)
            now = {name: table.get(key) for name, (table, key) in kept.items()}
            check_state(now, {name: held[name] for name in now})
            refuse_gradients_outside(leaves, (*state.values(), *inputs))
        reads.results(leaves, inputs, state.values())
        same[:] = _known(leaves, {"argument": inputs, "state": tuple(state.values())})
        specs.append(spec)
        return leaves

    origins: dict[str, str] = {}
    blocks = RepeatedBlocks(module, origins, watch, reads, numbers)
    with (
        no_effects(module, private=False),
        _use_lazy_graph_module(True),  # nobody runs the graph: its code need not be compiled
        tracing(module, mode, reads, origins, watch.entered),
        python_floats() if numbers.values else nullcontext(),
        # what torch takes writes out of is wrapped, and has no node of its own
        nullcontext() if transform else blocks.watched(),
    ):
        function = transform(flat) if transform else flat
        gm = make_fx(function, _rules(), tracing_mode="real")(state, *fakes)
    refuse_wrapped(gm)
    refuse_unfollowed(gm)
    refuse_unread(gm)
    settle_origins(gm, module, origins)
    reads.views.mark(gm)
    make_functional(gm)
    return gm, specs[-1], origins, reads, tuple(same), blocks.reuse


def _rules() -> dict[Any, Callable[..., Any]]:
    """Return what operators are traced as that no graph has."""
    rules = {**DECOMPOSITIONS, **dict(opened()), **dict(opened_codes())}
    return rules | functional_collectives()


def _known(leaves: Sequence[Any], given: Mapping[str, Sequence[Tensor]]) -> Iterator[Same]:
    """Leaves that are ``given`` tensors, or earlier leaves."""
    places = {
        id(t): (kind, number) for kind, tensors in given.items() for number, t in enumerate(tensors)
    }
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if id(leaf) in places:
                yield Same(number, *places[id(leaf)])
            places.setdefault(id(leaf), ("result", number))


@contextmanager
def tracing(
    module: nn.Module,
    mode: FakeTensorMode,
    retarget: TorchFunctionMode,
    origins: dict[str, str],
    entered: Callable[[nn.Module], object] = id,
) -> Iterator[None]:
    """Run ``module`` on fake tensors under make_fx in the body; its error becomes a CaptureError.
    ``origins`` gets the module of each traced node, and ``entered`` is told of each module."""
    python = enable_python_dispatcher()  # shape rules in Python know symbols, C++ ones do not
    try:
        with (
            mode,
            python,
            _as_compiling(),
            symbolic_builtins(module),
            inlined(),
            ragged_tables(),
            padded_encoders(),
            python_texts(),
            retarget,
            overlap_by_traced_sizes(),
            record_origins(module, origins, entered),
            without_tensor_meta(),
            without_reports(),
            traced_collectives(),
        ):
            yield
    except CaptureError:  # ours, which says what it is about
        raise
    except Exception as error:  # a module may raise anything when it meets fake tensors
        where = origins.get("<current>", "") or type(module).__name__
        raise CaptureError(
            f"tracing {type(module).__name__} failed in {where}{_line(error)}: {_cause(error)}"
        ) from error


def without_reports() -> AbstractContextManager[None]:
    """Silence the page of its own code with which torch logs an error on fake tensors: it raises
    the error all the same, and who traces says what becomes of it."""
    return silent("torch._subclasses.fake_tensor")


def _cause(error: Exception) -> str:
    """Return the cause in one line; torch's advice fills a page."""
    if isinstance(error, GuardOnDataDependentSymNode | UnknownSizeError):  # speaks of Eq(u0, 1)
        return "the code asks about a number or a size that the values of a tensor decide"
    first, *_ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first}"


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def _line(error: Exception) -> str:
    """Return the place of the innermost code that is neither torch's nor ours when an error was
    raised."""
    lines = [
        (frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
    ]
    own = [(file, number) for file, number in lines if not file.startswith((*_LIBRARIES, "<"))]
    return f" ({Path(own[-1][0]).name}:{own[-1][1]})" if own else ""


@contextmanager
def _as_compiling() -> Iterator[None]:
    """Say so, as torch.export does: libraries then leave out caches keyed by sizes, and checks of
    values. Other threads may see it too. Code that computes something else while torch
    compiles has other results than in eager. torch's encoders do: see ``padded_encoders``."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before

"""Training steps that Strop has traced itself: a pair of programs behind one autograd function.

A step serves every size that its guards admit, and is known by everything else that a call depends
on: the module's structure, who wants a gradient, training mode, autocast, and how arguments look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from strop.backend import Compiled, compile_captured
from strop.codegen.assemble import Signature
from strop.dispatch.arguments import misfit_in_memory
from strop.dispatch.dynamo import AotLog, AotProgram, AotRecord, refuse_foreign, root_of
from strop.dispatch.effects import Effects
from strop.dispatch.first_order import once
from strop.dispatch.gc_pause import collection_paused
from strop.dispatch.gradient_listeners import told_of
from strop.dispatch.module_state import ModuleState
from strop.dispatch.partition import Joint
from strop.dispatch.shared_gradients import refuse_shared, watch_shared
from strop.dispatch.signature import Shapes, Skeleton, rebuild, served_sizes, solve_roots
from strop.dispatch.step_graphs import StepGraphs
from strop.dispatch.variants import REFUSALS, device_of, library_for
from strop.errors import EagerOnlyError, ShapeError, StropError, UnsupportedError
from strop.frontend.absent_gradients import without
from strop.frontend.clones import clone_structure
from strop.frontend.importer import import_graph
from strop.frontend.joint import TANGENT
from strop.frontend.objects import Contents
from strop.frontend.repeated_blocks import TraceWatch
from strop.frontend.step import CapturedStep, capture_step
from strop.ir.dims import Expr
from strop.ir.graph import Ref
from strop.ir.program import Guard
from strop.ir.tensor_spec import TensorSpec
from strop.options import Options
from strop.patterns import registry
from strop.runtime.build.loader import KernelLoader
from strop.runtime.run import choices, library_warm_up

MOST_STEPS = 16  # pairs that differ in sizes alone


@dataclass(frozen=True, slots=True)
class BackwardArgument:
    """Say where the backward graph has an argument from: ``kind`` is "argument" or "result" of the
    forward, "tangent", or "size"."""

    kind: str
    number: int = 0
    size: Expr | None = None


@dataclass(frozen=True, slots=True)
class Backward:
    """A compiled backward graph, and where its arguments are among tangents, what the forward has
    saved, and ``sizes``, in this order."""

    program: AotProgram
    places: tuple[int, ...]
    sizes: tuple[Expr, ...]

    def arguments(
        self, tangents: Sequence[Any], saved: Sequence[Tensor], env: Mapping[str, int]
    ) -> list[Any]:
        known = [*tangents, *saved, *(size.eval(env) for size in self.sizes)]
        return [known[place] for place in self.places]


def _backward_of(
    program: AotProgram,
    wanted: Sequence[BackwardArgument],
    given: Sequence[BackwardArgument],
    num_tangents: int,
) -> Backward:
    """``wanted`` are the arguments of the program, ``given`` those of the step's whole backward,
    for which the forward saves."""
    saved = {argument: place for place, argument in enumerate(filter(_is_saved, given))}
    sizes = [argument.size for argument in wanted if argument.size is not None]
    places, first_size = [], num_tangents + len(saved)
    for argument in wanted:
        if argument.kind == "tangent":
            places.append(argument.number)
        elif argument.size is not None:
            places.append(first_size + sizes.index(argument.size))
        else:
            places.append(num_tangents + saved[argument])
    return Backward(program, tuple(places), tuple(sizes))


def _is_saved(argument: BackwardArgument) -> bool:
    return argument.kind in ("argument", "result")


class BackwardParts:
    """Makes the backward graphs of one step for results of which some have no gradient, as autograd
    does: who has no gradient gets None."""

    def __init__(
        self,
        graph: GraphModule,
        compiled: Callable[[GraphModule], Backward],
    ) -> None:
        """``graph`` is the whole backward; ``compiled`` compiles one like it."""
        self._graph, self._compiled = graph, compiled
        self._known: dict[frozenset[int], Backward] = {}
        self._lock = threading.Lock()

    @property
    def known(self) -> list[Backward]:
        with self._lock:
            return list(self._known.values())

    def without(self, absent: frozenset[int]) -> Backward:
        """Return the backward without these tangents."""
        with self._lock:
            if absent not in self._known:
                names = {f"{TANGENT}{number}" for number in absent}
                self._known[absent] = self._compiled(without(self._graph, names))
            return self._known[absent]


@dataclass(frozen=True, slots=True)
class Step:
    """A compiled pair, and how its calls look."""

    forward: AotProgram
    backward: Backward
    specs: tuple[TensorSpec, ...]
    guards: tuple[Guard, ...]
    leaves: tuple[Any, ...]
    out_spec: pytree.TreeSpec
    differentiable: tuple[bool, ...]
    saved: tuple[BackwardArgument, ...]  # the backward's arguments that the forward saves
    wants: tuple[bool, ...]  # of state and arguments: who gets a gradient
    parts: BackwardParts  # for calls of which not all results have a gradient
    graphs: StepGraphs  # what of it is captured
    layout_reads: tuple[str, ...] = ()  # see ``CapturedStep``
    within: tuple[tuple[int, ...], ...] = ()  # see ``CapturedStep``
    written: tuple[int, ...] = ()  # see ``CapturedStep``

    @property
    def keeps_tensors(self) -> bool:
        """Tell whether gradients depend on more than the gradients of the results."""
        return bool(self.saved)

    def env(self, shapes: Sequence[Sequence[int]]) -> dict[str, int] | None:
        """Values of the sizes; None for arguments that this step does not serve."""
        return served_sizes(self.specs, self.guards, shapes)

    def __call__(self, env: Mapping[str, int], primals: Sequence[Tensor]) -> Any:
        results = _Run.apply(self, env, *primals)  # type: ignore[no-untyped-call]
        for number, outer in enumerate(self.within):
            if outer:
                watch_shared(results[number], outer)
        leaves = [results[x.index] if isinstance(x, Ref) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.out_spec)


class _Run(torch.autograd.Function):
    """One call, with gradients."""

    @staticmethod
    def forward(ctx: Any, step: Step, env: Mapping[str, int], *primals: Tensor) -> Any:
        with torch._C._DisableAutocast():  # the graph has its own casts
            leased = step.graphs.lease(step, env, primals)
            found = step.forward.run(primals, env) if leased is None else leased[1]
        if step.written:  # by kernels: who keeps values that are computed of them looks at versions
            torch.autograd.graph.increment_version([primals[n] for n in step.written])
        results = found[: len(step.differentiable)]
        ctx.set_materialize_grads(False)
        ctx.lease = None if leased is None else leased[0]
        sources: dict[str, Sequence[Any]] = {"argument": primals, "result": found}
        kept = (k for k in step.saved if leased is None or k.kind == "argument")
        ctx.save_for_backward(*(sources[k.kind][k.number] for k in kept))
        plain = [r for r, d in zip(results, step.differentiable, strict=True) if not d]
        ctx.mark_non_differentiable(*plain)
        ctx.step, ctx.env = step, env
        # not saved, as nothing reads them: to be written to later is no fault of theirs
        ctx.sources = [p for p, wants in zip(primals, step.wants, strict=True) if wants]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        step: Step = ctx.step
        refuse_shared(ctx, gradients)
        tangents = [g for g, d in zip(gradients, step.differentiable, strict=True) if d]
        present = [t for t in tangents if t is not None]
        if not present:
            _let_go(ctx)
            return None, None, *(None for _ in step.wants)
        with torch._C._DisableAutocast():
            backward = step.backward
            if len(present) < len(tangents):
                absent = frozenset(n for n, tangent in enumerate(tangents) if tangent is None)
                backward = step.parts.without(absent)
            lease, told = ctx.lease, told_of(ctx.sources)
            saved = ctx.saved_tensors if lease is None else lease.saved(ctx.saved_tensors)
            computed = None
            if lease is not None and told is None:
                computed = lease.gradients(backward, tangents, saved)
            if computed is None:
                arguments = backward.arguments(tangents, saved, ctx.env)
                computed = backward.program.run(arguments, ctx.env, told)
        depends = step.keeps_tensors or any(t.requires_grad for t in present)
        found = iter(once(computed, (*ctx.sources, *present)) if depends else computed)
        _let_go(ctx)
        return None, None, *(next(found) if wants else None for wants in step.wants)


def _let_go(ctx: Any) -> None:
    """Let go of what a further backward would need, unless the caller wants one."""
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.sources = ()
        if ctx.lease is not None:
            ctx.lease.end()


def is_compiled_backward(node: Any) -> bool:
    """Tell whether a node of autograd is the backward graph of a step."""
    return isinstance(node, _Run._backward_cls)


@dataclass
class Steps:
    """Finds or makes the step for a call."""

    module: nn.Module
    options: Options
    log: AotLog
    by_key: dict[Hashable, list[Step]] = field(default_factory=dict)
    refused: dict[Hashable, StropError] = field(default_factory=dict)  # why not these calls
    latest_refusal: Hashable = None
    values_seen: dict[Hashable, set[str]] = field(default_factory=dict)  # of settings, by key

    def get(
        self, state: ModuleState, skeleton: Skeleton, tensors: Sequence[Tensor], shapes: Shapes
    ) -> tuple[Step, dict[str, int]]:
        """Raises one of REFUSALS."""
        wants = tuple(t.requires_grad for t in (*state.tensors, *tensors))
        looks = (state.structure, state.rows, skeleton, wants, _looks(shapes.specs), _modes(state))
        key = (looks, self._values_of_settings(state, looks))
        sizes = [t.shape for t in tensors]
        for step in self.by_key.get(key, ()):
            env = step.env(sizes)
            if env is not None:
                return _checked(step, tensors), env
        if key in self.refused:
            raise self.refused[key].with_traceback(None)
        self.latest_refusal = key
        if len(self.by_key.get(key, ())) >= MOST_STEPS:
            self.refused[key] = UnsupportedError(
                f"it has {MOST_STEPS} pairs of graphs, each for some sizes only"
            )
            raise self.refused[key]
        exact = replace(shapes, hints=solve_roots(shapes.specs, sizes), is_exact=True)
        for tried in (shapes, exact):  # the usual hints may give guards that exclude this call
            try:
                step = self._make(state, skeleton, tried, wants)
            except REFUSALS as error:
                self.refused[key] = error
                raise
            self.by_key.setdefault(key, []).append(step)
            env = step.env(sizes)
            if env is not None:
                return _checked(step, tensors), env
        self.refused[key] = ShapeError(
            f"its graph has guards that exclude the sizes it was traced for: {sizes}"
        )
        raise self.refused[key]

    def _values_of_settings(self, state: ModuleState, key: Hashable) -> str:
        """Return the numbers among the settings of modules that have changed before, which are no
        part of the structure: a step has them as constants. Raises EagerOnlyError where there are
        too many."""
        text = state.turned.text
        known = self.values_seen.setdefault(key, set())
        if text not in known and len(known) >= MOST_STEPS:
            raise EagerOnlyError(
                f"settings of its modules have had {MOST_STEPS} values, each in a graph of its own:"
                " pass a number that changes in each step as a tensor"
            )
        known.add(text)
        return text

    def share(self, other: Steps) -> None:
        """Have the steps of ``other``, and give it those that are made here: its module may be
        another with the same structure, as weights are arguments of a step."""
        self.by_key, self.refused = other.by_key, other.refused
        self.values_seen = other.values_seen

    def forget_refusal(self) -> None:
        """The latest call was wrong in itself, which says nothing of others like it."""
        self.refused.pop(self.latest_refusal, None)

    def _make(
        self, state: ModuleState, skeleton: Skeleton, shapes: Shapes, wants: tuple[bool, ...]
    ) -> Step:
        for name, _ in state.make_ups:
            raise UnsupportedError(f"{name} is quantised, and is part of a step that trains others")
        for name in state.casts:
            raise UnsupportedError(f"{name} is under layerwise casting")
        if state.exchanges_with:
            raise UnsupportedError("its tokens are divided among processes (context parallelism)")
        for name in state.computed:
            raise UnsupportedError(f"hooks of torch make weights of {name}")
        device = device_of(state, shapes)
        library = library_for(device, self.options)
        library.warm_up()
        try:
            with collection_paused():
                started = time.perf_counter()
                captured = self._captured(state, skeleton, shapes, wants)
                seconds = {"capture": time.perf_counter() - started}
                if captured.state_names != tuple(state.names):
                    raise UnsupportedError("the module's parameters are not those of its graph")
                return self._compiled(captured, device, library, wants, seconds)
        finally:
            library.cool_down()

    def _captured(
        self, state: ModuleState, skeleton: Skeleton, shapes: Shapes, wants: tuple[bool, ...]
    ) -> CapturedStep:
        clone = clone_structure(self.module)
        effects = Effects(clone)

        def call(*tensors: Tensor) -> Any:
            args, kwargs = rebuild(skeleton, tensors)
            contents = Contents((args, kwargs))
            result = clone.forward(*args, **kwargs)  # its own hooks run outside
            if contents.left():
                raise UnsupportedError("it takes items out of a list among its arguments")
            return result

        try:
            captured = capture_step(
                clone, call, shapes.specs, shapes.hints, wants, TraceWatch(effects.so_far)
            )
        finally:
            effects.undo()
        effects.check(private=True)
        return captured

    def _compiled(
        self,
        captured: CapturedStep,
        device: torch.device,
        library: KernelLoader,
        wants: tuple[bool, ...],
        seconds: dict[str, float],
    ) -> Step:
        joint, started = Joint(self.options.memory_budget), time.perf_counter()
        count, written = captured.num_results, captured.written
        graphs = joint.partition(captured.graph, (), num_fwd_outputs=count + len(written))
        _write_at_end(*graphs, count, written)
        joint.num_results = count
        _return_no_arguments(graphs[0], count)
        seconds["partition"] = time.perf_counter() - started
        halves = [
            _Half(role, gm, joint, captured, self.options.in_training, library)
            for role, gm in zip(("forward", "backward"), graphs, strict=True)
        ]
        halves[0].seconds |= seconds
        if device.type == "cuda":
            halves[0].prime(device)
        forward, backward = (half.program(device, self.log) for half in halves)
        given, num_tangents = _arguments(captured, *graphs), sum(captured.differentiable)

        asked = dict.fromkeys((*captured.sizes.guards, *halves[0].guards, *halves[1].guards))

        def compiled(part: GraphModule) -> Backward:
            library.warm_up()
            try:
                half = _Half("backward", part, joint, captured, self.options.in_training, library)
                if more := [guard for guard in half.guards if guard not in asked]:
                    raise UnsupportedError(f"a part of its backward asks whether {more[0]}")
                wanted = _arguments(captured, graphs[0], part)
                return _backward_of(half.program(device, self.log), wanted, given, num_tangents)
            finally:
                library.cool_down()

        return Step(
            forward,
            _backward_of(backward, given, given, num_tangents),
            captured.sizes.specs,
            tuple(asked),
            captured.leaves,
            captured.out_spec,
            captured.differentiable,
            tuple(filter(_is_saved, given)),
            wants,
            BackwardParts(graphs[1], compiled),
            StepGraphs(self.options, self.log),
            captured.layout_reads,
            captured.within,
            captured.written,
        )


def _checked(step: Step, tensors: Sequence[Tensor]) -> Step:
    """Return a step. Raises UnsupportedError where its forward asks how arguments lie in memory,
    and these lie otherwise."""
    if reason := misfit_in_memory(step.layout_reads, tensors, step.specs):
        raise UnsupportedError(reason)
    return step


class _Half:
    """One of the two graphs, compiled; its kernels are being built."""

    def __init__(
        self,
        role: str,
        gm: GraphModule,
        joint: Joint,
        captured: CapturedStep,
        options: Options,
        library: KernelLoader,
    ) -> None:
        started, sizes = time.perf_counter(), captured.sizes
        is_forward = role == "forward"
        self.role, self.library = role, library
        imported = import_graph(
            gm,
            sizes.symbols,
            sizes.hints,
            captured.origins,
            num_saved=joint.num_saved(gm) if is_forward else 0,
            orders={} if is_forward else joint.orders,
        )
        self.built = library.counts[0]
        self.constants, self.guards = imported.constants, imported.guards
        device = next(
            t.meta["val"].device.type
            for t in gm.graph.find_nodes(op="placeholder")
            if isinstance(t.meta["val"], Tensor)
        )
        self.compiled: Compiled = compile_captured(
            gm,
            imported.graph,
            Signature(imported.returned, ()),
            device,
            options,
            role,
            library,
        )
        program = self.compiled.program
        refuse_foreign(program, options)
        if is_forward:
            joint.note(gm, program)
        self.needed = program.sources_at(dict(program.hints))
        library.begin(self.needed)
        self.values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        self.seconds = dict[str, float]()  # of stages that ``compiled`` knows nothing of
        self.is_checked, self.compile_seconds = options.check, time.perf_counter() - started

    def prime(self, device: torch.device) -> None:
        """Make the first calls of libraries while compilers work. A backward runs in a thread of
        autograd's, for which cuDNN would make its plans anew."""
        started, program = time.perf_counter(), self.compiled.program
        num_ready = self.library.watch(self.needed)
        with torch.no_grad(), torch._C._DisableAutocast():
            library_warm_up.prime(
                program,
                dict(program.hints),
                device,
                self.library.device,
                lambda: num_ready() < len(self.needed),
            )
        self.seconds["libraries"] = time.perf_counter() - started

    def program(self, device: torch.device, log: AotLog) -> AotProgram:
        """Waits for the kernels."""
        program, started = self.compiled.program, time.perf_counter()
        self.library.build(self.needed)
        self.seconds["kernels"] = time.perf_counter() - started
        elsewhere = choices.sources_elsewhere(program, self.needed, self.library.device)
        later = self.library.later(elsewhere)
        roots = list(map(root_of, self.values))
        runner = AotProgram(
            program,
            self.library,
            device,
            roots,
            self.constants,
            self.compiled if self.is_checked else None,
            later,
            is_backward=self.role == "backward",
        )
        seconds = self.compile_seconds + time.perf_counter() - started
        built = self.library.counts[0] - self.built
        log.records.append(
            AotRecord(self.compiled, seconds, built, self.role, runner, self.seconds)
        )
        return runner


def _write_at_end(
    forward: GraphModule, backward: GraphModule, place: int, written: Sequence[int]
) -> None:
    """Have a forward write what it gives from this place on into its arguments. Raises
    UnsupportedError where the backward reads what such an argument held before."""
    given = list(forward.graph.find_nodes(op="placeholder"))
    read = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    (output,) = forward.graph.find_nodes(op="output")
    returned = list(output.args[0])
    for number, value in zip(written, returned[place : place + len(written)], strict=True):
        if given[number].name in read:
            raise UnsupportedError("its backward reads a buffer that its forward writes to")
        with forward.graph.inserting_before(output):
            copy = forward.graph.call_function(torch.ops.aten.copy_.default, (given[number], value))
        copy.meta["val"] = given[number].meta["val"]
    del returned[place : place + len(written)]
    output.args = (returned,)


def _return_no_arguments(forward: GraphModule, num_results: int) -> None:
    """Have a forward not give back the arguments that its backward reads, among them all weights:
    whoever calls it has them."""
    (output,) = forward.graph.find_nodes(op="output")
    returned = output.args[0]
    kept = [node for node in returned[num_results:] if node.op != "placeholder"]
    output.args = ((*returned[:num_results], *kept),)


def _arguments(
    captured: CapturedStep, forward: GraphModule, backward: GraphModule
) -> tuple[BackwardArgument, ...]:
    """Placeholders of the backward have the names of what the forward has or leaves."""
    placeholders = enumerate(forward.graph.find_nodes(op="placeholder"))
    primals = {node.name: number for number, node in placeholders}
    (output,) = forward.graph.find_nodes(op="output")
    results = {
        node.name: number for number, node in enumerate(output.args[0]) if isinstance(node, FxNode)
    }
    found = []
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name.startswith(TANGENT):
            found.append(BackwardArgument("tangent", int(node.name.removeprefix(TANGENT))))
        elif not isinstance(node.meta["val"], Tensor):
            found.append(
                BackwardArgument("size", size=captured.sizes.symbols.size(node.meta["val"]))
            )
        elif node.name in primals:
            found.append(BackwardArgument("argument", primals[node.name]))
        else:
            found.append(BackwardArgument("result", results[node.name]))
    return tuple(found)


def _looks(specs: Sequence[TensorSpec]) -> Hashable:
    return tuple(
        (s.dtype, s.device, s.order, len(s.shape), *(n == "0" for n in s.shape)) for s in specs
    )


def _modes(state: ModuleState) -> Hashable:
    """Return what a trace depends on besides the module's structure."""
    casts = [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    return (*casts, bytes(m.training for m in state.modules), registry.active())

"""Dynamo and AOTAutograd run around the same compiler in ``torch.compile(model, backend="strop")``.

Torch decides when to trace again. Each further graph then costs little: kernels are shared by the
process and the disk. Forward and backward graphs of a training step come the same way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._guards import detect_fake_mode
from torch.fx import GraphModule

from strop.backend import Compiled, compile_captured
from strop.codegen.assemble import Signature
from strop.dispatch.first_order import refuse_twice
from strop.dispatch.gc_pause import collection_paused
from strop.dispatch.partition import Joint
from strop.errors import ShapeError, UnsupportedError
from strop.frontend.absent_gradients import without
from strop.frontend.argument_views import ArgumentViews, argument_views
from strop.frontend.importer import import_graph
from strop.frontend.joint import DECOMPOSITIONS
from strop.frontend.of_torch import DECOMPOSITIONS as OF_TORCH
from strop.frontend.operators import retarget
from strop.frontend.quick import quick
from strop.frontend.symbols import Symbols
from strop.ir.dims import Expr, symbol
from strop.ir.program import Program
from strop.options import Options
from strop.patterns import registry
from strop.runtime.build.background import BackgroundBuild
from strop.runtime.build.loader import KernelLoader, kernel_loader
from strop.runtime.run import choices
from strop.runtime.run.executor import Bound
from strop.runtime.run.limits import looks_too_far
from strop.runtime.run.ready_results import Told
from strop.runtime.run.workspace import workspace_of
from strop.wording import counted

log = logging.getLogger("strop")


@dataclass(frozen=True, slots=True)
class AotRecord:
    """This describes one graph that torch asked for, for ``explain``."""

    compiled: Compiled
    seconds: float
    kernels_built: int
    role: str = "inference"  # or "forward", "backward" of a training step
    runner: AotProgram | None = None
    stages: Mapping[str, float] = field(default_factory=dict)  # seconds of those around compilation


@dataclass
class AotLog:
    """This lists what was compiled through torch.compile, in this process or for one module.
    ``served`` are the graphs that Strop traced again itself, as long as somebody calls them, and
    ``through_aot`` counts why others went through AOTAutograd."""

    records: list[AotRecord] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    served: WeakSet[Any] = field(default_factory=WeakSet)
    through_aot: dict[str, int] = field(default_factory=dict)
    step_captures: int = 0  # pairs of CUDA graphs, forward and backward
    step_replays: int = 0  # calls that were replayed from one
    against_step_graphs: dict[str, int] = field(default_factory=dict)  # shapes, by the reason


AOT_LOG = AotLog()
FEW_WORKERS = 2
_DETACHING = {"detach", "detach_", "detach.default", "_get_data_attr"}


@dataclass(frozen=True, slots=True)
class Job:
    """This says how one graph is to be compiled. ``joint`` is the training step that it is half
    of."""

    options: Options
    log: AotLog
    role: str = "inference"
    joint: Joint | None = None


def compile_dynamo(gm: GraphModule, example_inputs: Sequence[Any], **given: Any) -> Any:
    """Compile what Dynamo hands over, as its backend. ``options={...}`` of torch.compile are fields
    of strop.Options."""
    record_in = given.pop("record_in", None)
    options = given.get("options")
    if not isinstance(options, Options):
        options = Options.from_environment(**(options or given))
    registry.watch_once(torch.compiler.reset)  # Dynamo knows nothing of patterns

    trains = torch.is_grad_enabled() and any(
        t.requires_grad for t in example_inputs if isinstance(t, Tensor)
    )
    # autocast knows torch's operators, and would leave ours in the type of their operands
    keeps_torchs = trains or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    retarget(gm, trains=keeps_torchs)
    job = Job(options, record_in or AOT_LOG)
    joint = Joint(options.memory_budget)

    def compiler(job: Job) -> Callable[[GraphModule, Sequence[Any]], Any]:
        return lambda graph, inputs: _compile(graph, inputs, job)

    trained = replace(job, options=options.in_training, joint=joint)
    backend = aot_autograd(
        fw_compiler=compiler(replace(trained, role="forward")),
        bw_compiler=compiler(replace(trained, role="backward")),
        inference_compiler=compiler(job),
        partition_fn=joint.partition,
        decompositions=DECOMPOSITIONS if keeps_torchs else OF_TORCH,
        keep_inference_input_mutations=True,
    )
    with quick(), _views_of_results(gm):
        return _telling(backend(gm, example_inputs))


def _views_of_results(gm: GraphModule) -> AbstractContextManager[Any]:
    """Have torch go by strides where it makes results that share memory anew. It makes them from
    one of them, by the views that it has written down, and for ``y.t().detach()`` it writes down
    none."""
    named = {
        getattr(node.target, "__name__", node.target)
        for m in gm.modules()
        if isinstance(m, GraphModule)
        for node in m.graph.nodes
    }
    if named.isdisjoint(_DETACHING):
        return nullcontext()
    patch: AbstractContextManager[Any] = config.patch(view_replay_for_aliased_outputs=False)
    return patch


def _compile(gm: GraphModule, inputs: Sequence[Any], job: Job) -> Any:
    started, options, records = time.perf_counter(), job.options, job.log.records
    library: KernelLoader | None = None
    try:
        device = _device_of(inputs)
        library = kernel_loader(
            device.type,
            device.index or 0,
            options.cache_dir,
            options.build_workers,
            options.arch,
            options.target,
        )
        # a further graph shares most kernels with the first one
        library.warm_up(FEW_WORKERS if records else None)
        adapted = options.on(has_wgmma=library.device.has_wgmma)
        with collection_paused():
            program, compiled, constants = _program(gm, inputs, replace(job, options=adapted))
        refuse_foreign(program, options)
    except (UnsupportedError, ShapeError) as error:
        if options.strict:
            raise
        if library is not None:
            library.cool_down()
        _note_fallback(gm, f"{job.role} graph: {error}", job.log)
        return _boxed(_Backward(gm, gm.forward, job) if job.role == "backward" else gm.forward)
    needed = choices.sources_at(program, dict(program.hints), library.device)
    before = library.counts[0]
    try:
        library.build(needed)
        later = library.later(choices.sources_elsewhere(program, needed, library.device))
    finally:
        library.cool_down()
    built = library.counts[0] - before
    roots = [root_of(fx.meta["val"]) for fx in gm.graph.nodes if fx.op == "placeholder"]
    checked = compiled if options.check else None
    num_results = len(program.returned)
    if job.joint and job.role == "forward":
        num_results -= job.joint.num_saved(gm)
    views = None if job.role == "backward" else argument_views(gm, num_results)
    runner = AotProgram(
        program,
        library,
        device,
        roots,
        constants,
        checked,
        later,
        views,
        is_backward=job.role == "backward",
    )
    records.append(AotRecord(compiled, time.perf_counter() - started, built, job.role, runner))
    if job.role == "backward":
        return _boxed(_Backward(gm, runner, job))
    overwritten = job.joint.overwritten if job.joint and job.role == "forward" else []
    return _boxed(partial(_keeping, runner, overwritten) if overwritten else runner)


def _keeping(
    runner: AotProgram, overwritten: Sequence[tuple[int, int]], *arguments: Any
) -> list[Any]:
    """Run a forward that writes to arguments which its backward reads as they were before: results
    at the first places are copies of the arguments at the second ones."""
    copies = [(place, arguments[number].clone()) for place, number in overwritten]
    results = runner(*arguments)
    for place, copy in copies:
        results[place] = copy
    return results


class _Backward:
    """This runs a backward of AOTAutograd, and leaves out results that have no gradient."""

    def __init__(self, gm: GraphModule, runner: Callable[..., Any], job: Job) -> None:
        self._gm, self._runner, self._job = gm, runner, job
        self._given = gm.graph.find_nodes(op="placeholder")
        self._parts: dict[frozenset[int], tuple[Any, list[int]]] = {}

    def __call__(self, *arguments: Any) -> list[Any]:
        refuse_twice()
        if all(argument is not None for argument in arguments):
            return self._runner(*arguments)  # type: ignore[no-any-return]
        absent = frozenset(place for place, value in enumerate(arguments) if value is None)
        if absent not in self._parts:
            part = without(self._gm, {self._given[place].name for place in absent})
            left = part.graph.find_nodes(op="placeholder")
            places = {node.name: place for place, node in enumerate(self._given)}
            compiled = _compile(part, [n.meta["val"] for n in left], self._job)
            self._parts[absent] = compiled, [places[node.name] for node in left]
        compiled, wanted = self._parts[absent]
        return compiled([arguments[place] for place in wanted])  # type: ignore[no-any-return]


def _telling(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Have the backward of AOTAutograd see which results have no gradient, and not zeros there."""

    @wraps(compiled)
    def call(*arguments: Any) -> Any:
        results = compiled(*arguments)
        for result in results:
            node: Any = result.grad_fn if isinstance(result, Tensor) else None
            if type(node).__name__ == "CompiledFunctionBackward":
                node.set_materialize_grads(False)
        return results

    return call


def refuse_foreign(program: Program, options: Options) -> None:
    """Raise UnsupportedError for operators that torch would run, where ``strict`` forbids that."""
    if program.foreign_calls and options.strict:
        causes = "; ".join(program.foreign_causes)
        raise UnsupportedError(f"torch would run operators: {causes} (strict=True forbids them)")


def _note_fallback(gm: GraphModule, reason: str, into: AotLog) -> None:
    if reason not in into.fallbacks:
        nodes = counted(len(gm.graph.nodes), "node")
        log.warning("a graph of %s runs in torch: %s", nodes, reason)
    into.fallbacks[reason] = into.fallbacks.get(reason, 0) + 1


def _program(
    gm: GraphModule, inputs: Sequence[Any], job: Job
) -> tuple[Program, Compiled, list[Tensor]]:
    mode = detect_fake_mode(inputs)
    symbols, hints, guards = Symbols(), {}, ()
    if mode is not None and mode.shape_env is not None:
        env = mode.shape_env
        # the name changed from torch 2.11 to 2.13
        values = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
        torch_hints = {s.name: int(v) for s, v in values.items()}
        expressions = [guard.expr for guard in env.guards]
        symbols.decide = env.evaluate_expr
        symbols.unite_divisors(_sizes(gm), torch_hints)
        symbols.replace(env.replacements)
        symbols.solve(expressions, torch_hints)
        hints = symbols.root_values(torch_hints)
    joint, is_forward = job.joint, job.role == "forward"
    imported = import_graph(
        gm,
        symbols,
        hints,
        _origins(gm),
        num_saved=joint.num_saved(gm) if joint and is_forward else 0,
        orders=joint.orders if joint and not is_forward else {},
    )
    signature = Signature(imported.returned, guards, generic=True)
    compiled = compile_captured(
        gm, imported.graph, signature, _device_of(inputs).type, job.options, "dynamo"
    )
    if joint and is_forward:
        joint.note(gm, compiled.program)
    return compiled.program, compiled, imported.constants


def _sizes(gm: GraphModule) -> Iterator[Any]:
    """Yield the sizes of all tensors in the graph that are no numbers, as torch's expressions."""
    for fx in gm.graph.nodes:
        value = fx.meta.get("val")
        for size in value.shape if isinstance(value, Tensor) else ():
            if isinstance(size, torch.SymInt):
                yield size.node.expr


def _origins(gm: GraphModule) -> dict[str, str]:
    """Return the innermost module of each node, as Dynamo recorded it."""
    found = {}
    for fx in gm.graph.nodes:
        stack = fx.meta.get("nn_module_stack")
        if stack:
            path = list(stack.values())[-1][0]
            found[fx.name] = path.removeprefix("L['self'].").removeprefix("L['fn'].")
    return found


def _device_of(inputs: Sequence[Any]) -> torch.device:
    devices = [t.device for t in inputs if isinstance(t, Tensor)]
    kinds = {d for d in devices if d.type != "cpu"}
    if len(kinds) > 1:
        raise UnsupportedError(f"one graph over several devices: {sorted(map(str, kinds))}")
    return kinds.pop() if kinds else torch.device("cpu")


def root_of(value: Any) -> Any:
    """Return what a placeholder tells about sizes: the sizes of a tensor, or the value itself, such
    as a SymInt."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return value


def _boxed(function: Callable[..., Any]) -> Any:
    """Let a function take its arguments in a list: AOTAutograd then hands activations over and
    frees them early."""

    def boxed(arguments: list[Any]) -> Any:
        taken = list(arguments)
        arguments.clear()
        return function(*taken)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


class AotProgram:
    """This is a program whose every argument, weights too, comes with the call."""

    def __init__(
        self,
        program: Program,
        library: KernelLoader,
        device: torch.device,
        roots: Sequence[Any],
        constants: Sequence[Tensor],
        checked: Compiled | None = None,
        later: BackgroundBuild | None = None,
        views: ArgumentViews | None = None,
        *,
        is_backward: bool = False,
    ) -> None:
        self.program, self.library, self.device = program, library, device
        self._is_tensor = [isinstance(r, tuple) for r in roots]
        self._constants, self._checked = list(constants), checked
        self._later, self._views = later or BackgroundBuild(()), views
        self._written = program.written_arguments
        self._repeated = () if is_backward else _repeated(program)
        self._shared = _shared(program) if is_backward else []
        self._bounds: dict[Hashable, Bound] = {}
        self._lock = threading.Lock()
        self.num_calls = 0
        self.latest: Bound | None = None  # what ran last

    def __call__(self, *arguments: Any) -> list[Any]:
        return self.run(arguments)

    def run(
        self,
        arguments: Sequence[Any],
        env: Mapping[str, int] | None = None,
        told: Told | None = None,
        *,
        is_call: bool = True,
    ) -> list[Any]:
        """Run the program. ``env`` holds the sizes, where they are known; ``told`` gets results
        that are complete before the run ends. Unless it ``is_call`` nobody has called it: a graph
        is captured, which counts the calls that it serves. Raises UnsupportedError for tensors
        of a transform of ``torch.func``, which have no memory."""
        try:
            if self.device.type != "cuda":
                return self._run(arguments, env, told, is_call=is_call)
            with torch.cuda.device(self.device):  # kernels are launched in the current context
                return self._run(arguments, env, told, is_call=is_call)
        except RuntimeError:
            if any(isinstance(a, Tensor) and _is_wrapped(a) for a in arguments):
                raise UnsupportedError(_WRAPPED) from None
            raise

    def _run(
        self,
        arguments: Sequence[Any],
        env: Mapping[str, int] | None,
        told: Told | None,
        *,
        is_call: bool,
    ) -> list[Any]:
        device = self.device
        tensors = [
            None if not is_tensor else a if a.device == device else a.to(device)
            for a, is_tensor in zip(arguments, self._is_tensor, strict=True)
        ]
        with self._lock, torch.no_grad():
            key: Hashable = (
                tuple(a.shape if isinstance(a, Tensor) else a for a in arguments)
                if env is None
                else tuple(env.values())
            )
            stream = self._stream()
            bound = self._bounds.get((key, stream))
            is_new = bound is None
            if bound is None:
                env = self._env(arguments) if env is None else env
                if looks_too_far(self.program, env):
                    raise UnsupportedError("an index looks into a dim of 2^31 elements or more")
                workspace = workspace_of(self.device, stream)
                state: list[Tensor | None] = [*(None for _ in arguments), *self._constants]
                bound = self._bounds[key, stream] = Bound(
                    self.program,
                    env,
                    state,
                    self.library,
                    workspace,
                    stream,
                    in_place=self._checked is None,
                )
            inputs = bound.in_layout(tensors)
            self._later.start()
            if is_new and self._checked is not None:
                from strop.debug.check import run_checked

                results = run_checked(bound, self._checked, inputs, "dynamo")[0]
            else:
                results = bound.run(inputs, told=told)
            self._set_apart(results)
            if self._views is not None:
                self._views.put(results, arguments)
            self.num_calls, self.latest = self.num_calls + is_call, bound
            for index in self._written:  # those that had to be laid out as the plan says
                own = tensors[index]
                if own is not None and own is not inputs[index]:
                    own.copy_(inputs[index])
            return results

    def bound_at(self, env: Mapping[str, int]) -> Bound | None:
        """Return what has run at these sizes on the current stream, or None."""
        return self._bounds.get((tuple(env.values()), self._stream()))

    def _stream(self) -> int:
        is_on_gpu = self.device.type == "cuda"
        return torch.cuda.current_stream(self.device).cuda_stream if is_on_gpu else 0

    def _set_apart(self, results: list[Any]) -> None:
        for place in self._repeated:  # autograd marks tensors, and these have gradients apart
            results[place] = results[place].detach()
        for place in self._shared:
            if results[place] is not None:  # nobody has been told of it
                results[place] = results[place].clone()

    def _env(self, arguments: Sequence[Any]) -> dict[str, int]:
        env: dict[str, int] = {}
        for spec, argument in zip(self.program.inputs, arguments, strict=False):
            sizes = argument.shape if isinstance(argument, Tensor) else (argument,)
            for size, value in zip(spec.shape, sizes, strict=False):
                _learn(size, int(value), env)
        return env


_WRAPPED = (
    "a compiled graph got tensors of torch.vmap, such as is_grads_batched=True and vectorize=True"
    " give a backward: leave those out, or run the module in eager"
)


def _is_wrapped(tensor: Tensor) -> bool:
    """Say whether a tensor is a transform's own, and has no memory."""
    is_old: bool = functorch.is_legacy_batchedtensor(tensor)
    return is_old or functorch.is_functorch_wrapped_tensor(tensor)


def _repeated(program: Program) -> tuple[int, ...]:
    """Return the places of results that lie where an earlier result lies, as those of ``y`` and
    ``y.detach()`` do."""
    tensors = [item.tensor for item in program.returned]
    return tuple(n for n, ref in enumerate(tensors) if ref is not None and ref in tensors[:n])


def _shared(program: Program) -> list[int]:
    """Return the places of gradients that lie in memory of an argument or of an earlier gradient.
    Autograd takes what a node hands out for its own, and adds to it later."""
    env, found, spans = dict(program.hints), list[int](), list[tuple[int, int, int]]()
    for place, item in enumerate(program.returned):
        if (ref := item.tensor) is None:
            continue
        steps = zip(ref.shape, ref.strides, strict=True)
        start = ref.offset.eval(env)
        end = start + sum((n.eval(env) - 1) * step.eval(env) for n, step in steps)
        is_given = program.buffers[ref.buffer].kind == "input"
        if is_given or any(b == ref.buffer and x <= end and start <= y for b, x, y in spans):
            found.append(place)
        spans.append((ref.buffer, start, end))
    return found


def _learn(size: Expr, value: int, env: dict[str, int]) -> None:
    """Learn that ``size`` has ``value``, which fixes its root when it is a multiple of one."""
    if len(size.roots) == 1:
        (name,) = size.roots
        if size == size.divisor * symbol(name):
            env.setdefault(name, value // size.divisor)

"""The hot path of an optimised module: shapes -> bound program -> results.

Our own dispatcher instead of Dynamo's guards. One call costs a dictionary lookup on shapes and
static arguments, a check that the weights are where they were, and the run itself. Where that is
nothing but kernels on a CPU, the second call of a shape goes the short way (``short``).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import threading
import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from strop.dispatch import cpu_fast_path, hooks
from strop.dispatch.adapter import Adapter
from strop.dispatch.aliases import returned_arguments
from strop.dispatch.arguments import as_specified, returned, structured
from strop.dispatch.counters import Counters
from strop.dispatch.entry import Entry
from strop.dispatch.features import OFFLOADED, is_offloaded, replacement_before, take_out
from strop.dispatch.finite import not_finite
from strop.dispatch.module_state import ModuleState, place
from strop.dispatch.signature import (
    NUM_ARGUMENTS,
    Beside,
    Shapes,
    Skeleton,
    count_numbers,
    is_looked_into,
    memory_order,
    solve_roots,
)
from strop.dispatch.unsupported_calls import unfit_call, unfit_module
from strop.dispatch.variants import REFUSALS, Variant, VariantStore, device_of, library_for
from strop.dispatch.varying_numbers import Call, Turned, all_shapes
from strop.errors import StropError, UnsupportedError
from strop.frontend.capture import NumbersNeeded
from strop.frontend.objects import WithObjects, given_back
from strop.options import Options
from strop.patterns import registry
from strop.runtime.loop.denoise_loop import Loop, moment_of
from strop.runtime.loop.hoisting import Hoist, Kept, Moment, Stamp, stamp_of
from strop.runtime.run import cuda_graphs, graph_keep_alive
from strop.runtime.run.executor import Bound
from strop.runtime.run.library_calls import drawing_by
from strop.runtime.run.limits import looks_too_far
from strop.runtime.run.workspace import Workspace, workspace_of

if TYPE_CHECKING:
    from strop.backend import Compiled

log = logging.getLogger("strop")
MOST_READY = 1024  # calls kept prepared, of one module


def _plain_forward(module: nn.Module) -> Any:
    """The forward of its class."""
    return types.MethodType(type(module).forward, module)


_NUMBERS = itertools.count()
_ON_HOST, _AS_IT_IS, _NO_RESULT = torch.empty(0), contextlib.nullcontext(), object()
_ALL: WeakSet[Dispatcher] = WeakSet()


def dispatcher_of(module: nn.Module) -> Dispatcher | None:
    """That which serves a module, though somebody may have put other functions around it since."""
    return next((d for d in list(_ALL) if d.module is module and not d.has_left), None)


class Dispatcher:
    """Stands in for ``module.forward``."""

    is_strop = True  # tells capture that this forward may be left out of a copy

    def __init__(
        self,
        module: nn.Module,
        options: Options,
        *,
        name: str = "",
        adapter: Adapter | None = None,
        loop: Loop | None = None,
        component: nn.Module | None = None,
    ) -> None:
        """``component``: what the module is a part of, which hooks move as a whole."""
        self.module, self.options = module, options
        self.component = component or module
        self.name = name or type(module).__name__
        self._eager: Callable[..., Any] | None = module.forward
        self._before = module.__dict__.get("forward")  # in whose place this one will be
        self.adapter, self.loop = adapter or Adapter(), loop or Loop()
        self._may_hoist = options.hoist and loop is not None  # else no loop would ever begin
        is_own = getattr(self._eager, "__func__", None) is type(module).forward
        if is_own:  # whatever function that is at a call
            self._eager = None
        self._replaced = "" if is_own else replacement_before(module)
        self.has_left = False  # then whoever still calls it gets what the module does without us
        self.on_leave: Callable[[], object] | None = None  # is called then
        self.counters = Counters()
        cpu_fast_path.reserve_entrance(module)
        self.state = ModuleState(module)
        self.turned = Turned()
        self.variants = VariantStore(module, options, self.name)
        self.latest: Entry | None = None  # the shape that ran last
        self._entries: dict[Hashable, Entry] = {}
        self.short: cpu_fast_path.Short = (
            cpu_fast_path.untaken
        )  # that of the prepared call that came last
        self.entrance: Callable[..., Any] | None = None
        self._ready: dict[Hashable, cpu_fast_path.Short] = {}
        self._refused: dict[Hashable, StropError] = {}  # calls that change what they read
        self._checked_loop = 0
        self._lock = threading.RLock()
        registry.watch(self._forget_programs)
        _ALL.add(self)

    def run_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As without us. Dynamo traces this, and does not know how to make a method."""
        if self._eager is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self._eager(*args, **kwargs)

    @property
    def eager(self) -> Callable[..., Any]:
        """The forward that the module has without us."""
        return self._eager or _plain_forward(self.module)

    @eager.setter
    def eager(self, forward: Callable[..., Any]) -> None:
        self._eager = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.has_left or is_looked_into():
            return self.run_plain(args, kwargs)
        if not kwargs and not hooks.has_global_hooks():
            result = self.short(args)
            if result is None and self._ready:
                result = self._other_short(args)
            if result is not None:
                return result
        self.counters.calls += 1
        return self._serve_any(args, kwargs)

    def _other_short(self, args: tuple[Any, ...]) -> Any:
        """What comes of the short way of another prepared call, if there is one like this."""
        short = self._ready.get(cpu_fast_path.plain_key(args), cpu_fast_path.untaken)
        if short is cpu_fast_path.untaken or short is self.short:
            return None
        self.short = short
        return short(args)

    def _serve_any(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of whatever kind."""
        reason = self._unfit()
        if reason:
            return self._run_eager(reason, args, kwargs)
        args, kwargs = self.adapter.normalise(args, kwargs)
        tensors: list[Tensor] = []
        beside = Beside()
        try:
            skeleton = self.turned.flattened((args, kwargs), tensors, beside)
        except UnsupportedError as error:
            return self._run_eager(str(error), args, kwargs)
        skeleton = self._with_settings(skeleton, beside)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return self._run_eager("an argument requires a gradient", args, kwargs)
        call = Call(skeleton, tensors, skeleton, beside)
        if beside.floats or beside.generators:
            call = self._resolved(skeleton, tensors, beside)
        plain = None if kwargs else args
        # normal tensors, whatever the caller's mode: memory and weights outlive this call
        with self._lock, drawing_by(beside.generators) if beside.generators else _AS_IT_IS:
            if torch.is_inference_mode_enabled() or torch.is_grad_enabled():
                with torch.inference_mode(False), torch.no_grad():
                    refusal, result = self._serve(call, plain, is_no_grad=False)
            else:
                refusal, result = self._serve(call, plain)
        if refusal is None and type(result) is not WithObjects:
            return result
        if refusal is None:
            try:
                return given_back(result, (args, kwargs))
            except UnsupportedError as error:
                refusal = error
        return self._run_refused(refusal, call, args, kwargs)

    def _with_settings(self, skeleton: Skeleton, beside: Beside) -> Skeleton:
        """The skeleton of a call's arguments with that of settings which a user turns."""
        if not self.state.turned.names:
            return skeleton
        with self._lock:
            part = self.state.turned.read(beside)
            while part is None:  # one is no longer what it was
                self._reset()
                part = self.state.turned.read(beside)
        return (*skeleton, part)

    def _read_again(self, call: Call) -> Call:
        """The call with the settings as they are now."""
        arguments = call.bare[:NUM_ARGUMENTS]
        if arguments == call.bare and not self.state.turned.names:
            return call
        floats = call.beside.floats[: count_numbers(arguments)]
        beside = Beside(floats, call.beside.generators, num_sizes=call.beside.num_sizes)
        return self._resolved(self._with_settings(arguments, beside), call.plain, beside)

    def _resolved(self, bare: Skeleton, tensors: list[Tensor], beside: Beside) -> Call:
        """A call that has floats or generators: which of the floats are inputs."""
        device = (tensors or self.state.tensors or [_ON_HOST])[0].device
        return self.turned.call(bare, beside, tensors, self.state.structure, device)

    def _key(self, call: Call) -> Hashable:
        looks = tuple((t.shape, t.dtype, t.device, memory_order(t)) for t in call.tensors)
        if call.numbers:
            return (call.skeleton, looks, self.turned.outcomes(call))
        return (call.skeleton, looks)

    def _serve(
        self, call: Call, plain: tuple[Any, ...] | None, *, is_no_grad: bool = True
    ) -> tuple[StropError | None, Any]:
        """Why there is no program for the call, or its result. ``plain``: its arguments where none
        has a name; ``is_no_grad``: whether that is the caller's mode."""
        key = self._key(call)
        if refused := self._still_refused(key):
            return refused, None
        has_changed, result = self._look(self._entries.get(key), call.tensors)
        if result is not _NO_RESULT:
            return None, result
        if has_changed:
            self._reset()
            if reason := self._unfit():  # of what has been put there
                return UnsupportedError(reason), None
            call = self._read_again(call)
            key = self._key(call)
        entry = self._entries.get(key)
        if entry is None or not (entry.variant.wants is None or entry.variant.suits(self.state)):
            try:
                entry, call = self._enter(call)
            except REFUSALS as refusal:
                return refusal, None
            key = self._key(call)
        tensors = call.tensors
        if reason := entry.variant.misfit(tensors, is_no_grad=is_no_grad):
            return UnsupportedError(reason), None
        result = self._run(entry, tensors)
        if plain is not None:
            self._prepare(self._entries.get(key), plain, tensors)
        return None, result

    def _look(self, entry: Entry | None, tensors: list[Tensor]) -> tuple[bool, Any]:
        """Whether the module is another than at the last look. The result, if the call has run
        ahead of this look and nothing is."""
        if entry is not None and self._is_undisturbed():
            return False, _NO_RESULT
        if entry is None or not self._may_run_ahead(entry):
            return self._has_changed(), _NO_RESULT
        before = self.counters.replays, replace(self.counters.hoisted)
        result = self._run_ahead(entry, tensors)
        if not self._has_changed():
            return False, result
        self.counters.replays, self.counters.hoisted = before  # nobody sees that result
        return True, _NO_RESULT

    def _still_refused(self, key: Hashable) -> StropError | None:
        refusal = self._refused.get(key)
        return None if refusal is None or self.state.has_new_cause() else refusal

    def _run_ahead(self, entry: Entry, tensors: list[Tensor]) -> Any:
        """The result of a call whose module is yet to be looked at."""
        self._checked_loop = self.loop.number  # what it keeps is of this loop
        try:
            return self._run(entry, tensors)
        except BaseException:
            self._checked_loop = 0  # nobody has looked at the module
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # a copy is a plain module
        return copy.deepcopy(self.eager, memo)

    def __reduce__(self) -> Any:  # so is one that was pickled
        if self._replaced:
            raise TypeError(f"{self.name}: {self._replaced}, and cannot be pickled")
        return _plain_forward, (self.module,)

    @property
    def __code__(self) -> Any:  # torch.export asks for it
        return self.eager.__code__

    def _unfit(self) -> str:
        """Why this call cannot be served by an inference program, or nothing."""
        if (reason := unfit_call(self.module)) or self._is_undisturbed():
            return reason
        if self._replaced:
            return self._replaced
        if is_offloaded(self.component):
            self.forget_shapes()  # which would keep weights in the memory that is to be free
            self.state.merged.clear()
            return OFFLOADED
        return unfit_module(self.state)

    def _run_eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.options.strict and reason != hooks.REASON:
            raise UnsupportedError(f"{self.name}: {reason} (strict=True forbids eager)")
        self._note_eager(reason)
        return self.eager(*args, **kwargs)

    def _run_refused(
        self, refusal: StropError, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """In eager, whose own exception comes first: it says more than that tracing failed."""
        if self.options.strict and refusal.__cause__ is None:
            raise refusal
        try:
            result = self.eager(*args, **kwargs)
        except Exception:
            with contextlib.suppress(*REFUSALS):
                self.variants.forget_failure(self.state, call, self._shapes(call))
            raise
        if self.options.strict:
            raise refusal
        self._note_eager(str(refusal))
        self.state.note_effects()
        if self.state.effects:
            self._refused[self._key(call)] = refusal
        return result

    def _note_eager(self, reason: str) -> None:
        self._note_fallback(reason, " runs in eager")
        self.counters.eager_calls += 1

    def _note_fallback(self, reason: str, what: str = "") -> None:
        """One log line for each reason, and a count of how often."""
        if reason not in self.counters.fallbacks:
            log.warning("%s%s: %s", self.name, what, reason)
        self.counters.fallbacks[reason] = self.counters.fallbacks.get(reason, 0) + 1

    # weights

    def _is_settled(self) -> bool:
        """Inside a denoise loop of which a call has looked at everything."""
        return self.loop.is_running and self._checked_loop == self.loop.number

    def _is_undisturbed(self) -> bool:
        """And nobody can have changed anything since."""
        own = self.module
        return (
            not self.loop.has_user_code
            and self._is_settled()
            and not (own._forward_hooks or own._forward_pre_hooks or hooks.has_global_hooks())
        )

    def _check_state(self) -> None:
        if self._has_changed():
            self._reset()

    def _has_changed(self) -> bool:
        self._checked_loop = self.loop.number
        return self.state.has_new_structure() or self.state.has_new_tensors()

    def _may_run_ahead(self, entry: Entry) -> bool:
        """Whether the module may be looked at while the GPU is at work: a UNet takes a host half a
        millisecond, at each step of a loop, since a user's code may run between two. Where
        something is another, the call is done again.

        What the graph reads must still be there: a Parameter's memory can be given back while it is
        being kept. And a graph must have nothing but results to show for itself; what it keeps is
        its own, and goes with it.
        """
        return (
            entry.is_pure
            and entry.device.type in cuda_graphs.DEVICES
            and not entry.variant.layout_reads
            and entry.variant.wants is None
            and self._wants_graph(entry)
            and cuda_graphs.pool_of(entry.device).has((id(self), entry.number))
            and not self.state.has_moved()
        )

    def _reset(self) -> None:
        """Weights, modules or adapters are not where they were: bind everything again."""
        self.state.scan()
        self.counters.rebinds += 1
        self.forget_shapes()

    def _forget_programs(self) -> None:
        """The patterns in force are others: the next call looks for its program anew."""
        with self._lock:
            self.forget_shapes()

    def forget_shapes(self) -> None:
        for device in {entry.device for entry in self._entries.values()}:
            if device.type in cuda_graphs.DEVICES:
                cuda_graphs.pool_of(device).forget(id(self))
        self._entries.clear()
        self._ready.clear()
        self._refused.clear()
        self.short = cpu_fast_path.untaken

    def leave(self) -> None:
        """Keep no place in the module, nor in what others have put around its forward since."""
        self.has_left = True
        self.forget_shapes()
        cpu_fast_path.remove_entrance(self)
        before = self._before
        take_out(self, self.module, before or self.eager, is_own=before is None)
        if self.on_leave is not None:
            self.on_leave()

    def _shapes(self, call: Call) -> Shapes:
        shapes = self.adapter.shapes(call.given, call.skeleton)
        return all_shapes(shapes, call, device_of(self.state, shapes))

    def _enter(self, call: Call) -> tuple[Entry, Call]:
        """Find or build the variant for a call seen for the first time; may raise REFUSALS. Also
        the call, in which other floats may have become inputs."""
        if self.state.replaced:
            raise UnsupportedError(self.state.replaced)
        if call.beside.floats and self.turned.note(call):
            call = self._resolved(call.bare, call.plain, call.beside)
        variant, call = self._variant(call)
        shapes = [t.shape for t in call.tensors]
        env = solve_roots(variant.specs, shapes)
        if looks_too_far(variant.program, env):
            raise UnsupportedError("an index looks into a dim of 2^31 elements or more")
        for cause in variant.program.foreign_causes:
            self._note_fallback(f"{cause}: torch runs it")
        aliases = returned_arguments(variant.program, env)
        steady = self.adapter.steady(call.skeleton) if self._may_hoist else ()
        timestep = self.adapter.timestep(call.skeleton) if steady else None
        if steady:  # numbers are, too, or nothing that they scale would be kept
            steady += tuple(range(len(call.given), len(call.tensors)))
        device = device_of(self.state, self._shapes(call))
        entry = Entry(
            next(_NUMBERS),
            variant,
            device,
            env,
            aliases=aliases,
            steady=steady,
            timestep=timestep,
            is_pure=variant.program.is_pure,
            has_graph=not call.beside.generators,
        )
        self._entries[self._key(call)] = entry
        return entry, call

    def _variant(self, call: Call) -> tuple[Variant, Call]:
        """The variant for a call; of floats that it can have as constants only, they are some."""
        while True:
            try:
                variant = self.variants.get(self.state, call, self._shapes(call))
            except NumbersNeeded as error:
                needed: Sequence[int] = sorted(error.numbers)
            except REFUSALS:
                if not call.numbers and not call.beside.num_sizes:
                    raise
                needed = range(len(call.numbers))
            else:
                self.turned.learn(call, variant.number_guards)
                return variant, call
            call = self._resolved(*self.turned.fix(call, self.state.structure, needed))

    def _bound(self, entry: Entry, workspace: Workspace, stream: int) -> Bound:
        if entry.placed is None:
            before = self.state.pointers
            entry.placed = place(entry.variant.program, self.state.tensors)
            self.state.remember(entry.placed)
            if self.state.pointers != before:  # other shapes were bound to the old places
                placed = entry.placed
                self.forget_shapes_but(entry)
                entry.placed = placed
        library = library_for(entry.device, self.options)
        hoist = self._hoist(entry, workspace) if entry.steady else None
        return Bound(
            entry.variant.program,
            entry.env,
            entry.placed,
            library,
            workspace,
            stream,
            hoist,
            in_place=not self.options.check,
        )

    def _hoist(self, entry: Entry, workspace: Workspace) -> Hoist:
        """Memory as for all else: of a stream, or of the graphs, whose runs are in order."""
        kept = self.loop.kept.setdefault((id(self), id(workspace)), Kept(entry.device))
        inputs = enumerate(entry.variant.program.inputs)
        arguments = [index for index, spec in inputs if not spec.is_state]
        steady = tuple(arguments[number] for number in entry.steady)
        timestep = None if entry.timestep is None else arguments[entry.timestep]
        return Hoist(steady, kept, self.state.tensors, self.counters.hoisted, timestep)

    def _where(self, entry: Entry, tensors: Sequence[Tensor]) -> tuple[Stamp | None, Moment | None]:
        """What arguments are that stay the same through a loop, and at which timestep it is, if
        this is a loop. What the caller captures must not depend on it."""
        if not entry.steady or not self._is_settled():
            return None, None
        if entry.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None, None
        stamp = stamp_of(self._checked_loop, [tensors[number] for number in entry.steady])
        if entry.timestep is None:
            return stamp, None
        return stamp, moment_of(self.loop.timesteps, tensors[entry.timestep], stamp)

    def forget_shapes_but(self, entry: Entry) -> None:
        keys = [k for k, e in self._entries.items() if e is entry]
        self.forget_shapes()
        self._entries.update(dict.fromkeys(keys, entry))

    # calls that are prepared

    def _prepare(
        self, entry: Entry | None, args: tuple[Any, ...], tensors: Sequence[Tensor]
    ) -> None:
        """Have the short way ready for the next call that looks like this one."""
        if entry is None or entry.device.type != "cpu" or self.state.turned.names:
            return
        key = cpu_fast_path.plain_key(args)
        if not key or key in self._ready or torch._C._len_torch_dispatch_stack():
            return
        if len(self._ready) >= MOST_READY:
            self._ready.clear()
        self._ready[key] = cpu_fast_path.untaken
        variant = entry.variant
        if entry.aliases or variant.same or variant.layout_reads or variant.wants is not None:
            return
        if len(args) != len(tensors) or not all(map(is_, args, tensors)):
            return
        if not all(map(is_, as_specified(tensors, entry.variant.specs), tensors)):
            return
        is_unchanged, bound = self.state.comparison(), entry.bounds[0]
        run = bound.straight(structured(entry.variant.out_spec, len(bound.program.returned)))
        if run is not None and is_unchanged is not None:
            drop = partial(self._ready.pop, key, None)
            self.short = cpu_fast_path.prepared(self, entry, tensors, run, is_unchanged, drop)
            self._ready[key] = self.short
            cpu_fast_path.open_entrance(self)

    # running

    def _run(self, entry: Entry, tensors: list[Tensor]) -> Any:
        entry.uses += 1
        self.latest = entry
        if entry.device.type != "cuda":
            return self._run_bound(entry, tensors, 0)
        if torch.cuda.current_device() == entry.device.index:
            return self._run_on_gpu(entry, tensors)
        with torch.cuda.device(entry.device):  # kernels are launched in the current context
            return self._run_on_gpu(entry, tensors)

    def _run_on_gpu(self, entry: Entry, tensors: list[Tensor]) -> Any:
        """From a graph if there is one, else step by step; out of memory costs the graphs first."""
        if self._wants_graph(entry):
            try:
                return self._replay(entry, tensors)
            except cuda_graphs.NoGraphError as error:
                entry.has_graph = False
                self._note_fallback(f"runs without a CUDA graph: {error}")
        stream = torch.cuda.current_stream(entry.device).cuda_stream
        try:
            return self._run_bound(entry, tensors, stream)
        except torch.OutOfMemoryError:
            entry.bounds.clear()  # it holds what library calls have allocated
            if not cuda_graphs.pool_of(entry.device).drop():
                raise
        self._note_fallback("ran out of memory: all CUDA graphs were dropped, and it ran again")
        return self._run_bound(entry, tensors, stream)

    def _run_bound(self, entry: Entry, tensors: list[Tensor], stream: int) -> Any:
        inputs = as_specified(tensors, entry.variant.specs)
        if entry.uses == 1:  # whose host has the libraries' first calls to make: compilers are free
            entry.variant.later.start()
        bound = entry.bounds.get(stream)
        if bound is None:
            workspace = workspace_of(entry.device, stream)
            bound = entry.bounds[stream] = self._bound(entry, workspace, stream)
        if entry.uses == 1 and self.options.check and entry.variant.compiled is not None:
            results = self._run_checked(bound, entry.variant.compiled, inputs)
        else:
            results = bound.run(inputs, *self._where(entry, tensors))
        self.counters.launches = bound.num_launches
        is_judged = entry.uses == 1 and self.options.check_finite
        if is_judged and (text := not_finite(self.name, results, tensors)):
            self.counters.nonfinite.append(text)
            log.warning("%s", text)
        return self._returned(entry, results, tensors)

    def _returned(self, entry: Entry, results: list[Any], tensors: Sequence[Tensor]) -> Any:
        variant = entry.variant
        return returned(
            variant.out_spec, entry.aliases, variant.same, results, tensors, self.state.tensors
        )

    def _run_checked(self, bound: Bound, compiled: Compiled, inputs: Sequence[Tensor]) -> list[Any]:
        from strop.debug.check import run_checked

        results, findings = run_checked(bound, compiled, inputs, self.name)
        self.counters.checked_steps += len(compiled.program.steps)
        self.counters.findings += map(str, findings)
        return results

    def _wants_graph(self, entry: Entry) -> bool:
        """From the second use of a shape on, unless the caller captures one, or is about to."""
        if entry.uses < 2 or not entry.has_graph or not self.options.cuda_graphs:
            return False
        return not (torch.cuda.is_current_stream_capturing() or graph_keep_alive.are_wanted())

    def _replay(self, entry: Entry, inputs: list[Tensor]) -> Any:
        results, launches = cuda_graphs.pool_of(entry.device).run(
            (id(self), entry.number),
            inputs,
            entry.variant.specs,
            lambda workspace, stream: self._bound(entry, workspace, stream),
            self.options.graph_budget_bytes,
            *self._where(entry, inputs),
        )
        self.counters.replays += 1
        self.counters.launches = launches
        return self._returned(entry, results, inputs)

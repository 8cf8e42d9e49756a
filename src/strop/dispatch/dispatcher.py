"""A call of an optimised module takes this hot path: shapes -> bound program -> results.

Strop's own dispatcher stands here instead of Dynamo's guards. One call costs a dictionary lookup on
shapes and static arguments, a check that the weights are where they were, and the run itself. Where
is on a CPU, the second call of a shape goes the short way (``short``, and ``by_name``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strop.dispatch import cpu_fast_path, hooks, model_offload
from strop.dispatch.adapter import Adapter
from strop.dispatch.bound_shapes import BoundShapes
from strop.dispatch.cached_parts import CachedParts
from strop.dispatch.call_reader import CallReader
from strop.dispatch.counters import Counters
from strop.dispatch.cut_forward import CutForward
from strop.dispatch.decided_call import DecidedCall, in_normal_modes
from strop.dispatch.entry import Entry
from strop.dispatch.entry_maker import EntryMaker
from strop.dispatch.entry_runner import EntryRunner
from strop.dispatch.fallbacks import Fallbacks
from strop.dispatch.features import take_out
from strop.dispatch.flights import Flight, RunsInFlight
from strop.dispatch.gc_pause import collection_paused
from strop.dispatch.hosted_weights import HostedWeights
from strop.dispatch.kept_views import KeptViews
from strop.dispatch.known_dispatchers import depart, enter, have_others_rest
from strop.dispatch.last_look import LastLook
from strop.dispatch.low_rank_weights import RowAdapters
from strop.dispatch.module_state import ModuleState
from strop.dispatch.placed_weights import give_back_order
from strop.dispatch.plain_forward import ForwardStandIn
from strop.dispatch.prepared_calls import PlainCall, PreparedCalls
from strop.dispatch.refused_calls import RefusedCalls
from strop.dispatch.replayed_calls import NO_RESULT, ReplayedCalls, may_have
from strop.dispatch.signature import (
    is_looked_into,
)
from strop.dispatch.unsupported_calls import unfit_call, unfit_module
from strop.dispatch.variants import REFUSALS, VariantStore
from strop.dispatch.varying_numbers import GivenCall, Turned
from strop.dispatch.weights_budget import WeightsBudget
from strop.errors import StropError, UnsupportedError
from strop.frontend.adapted_layers import without_scale
from strop.frontend.moving_hooks import entered
from strop.frontend.objects import WithObjects, given_back
from strop.options import Options
from strop.patterns import registry
from strop.runtime.build.processors import check_system
from strop.runtime.loop.denoise_loop import DenoiseLoop
from strop.runtime.run.fair_turns import FairLock
from strop.runtime.run.host_draws import draw_on_host
from strop.runtime.run.operator_calls import drawing_by

_AS_IT_IS = contextlib.nullcontext()


class Dispatcher(ForwardStandIn):
    """This stands in for ``module.forward``, and runs programs in its place."""

    folds_adapters = True  # layers with adapters run as plain ones do
    streams = True  # weights that have a budget
    is_strop = True  # tells capture that this forward may be left out of a copy
    has_left = False  # then it runs the plain forward
    latest: Entry | None = None  # the shape that ran last
    entrance: Callable[..., Any] | None = None  # once a call is prepared

    def __init__(
        self,
        module: nn.Module,
        options: Options,
        *,
        name: str = "",
        adapter: Adapter | None = None,
        loop: DenoiseLoop | None = None,
        component: nn.Module | None = None,
        variants: VariantStore | None = None,
    ) -> None:
        """``component`` is what the module is a part of, which hooks move as a whole. ``variants``
        are those of other modules of the same structure."""
        check_system()
        super().__init__(module, name or type(module).__name__)
        self.options, self.component = options, component or module
        model_offload.refuse_budget(self.component, options.weights_budget_bytes)
        self.adapter, self.loop = adapter or Adapter(), loop or DenoiseLoop()
        self.counters, self.turned = Counters(), Turned()
        self._fallbacks, self._refused = Fallbacks(self.name, self.counters), RefusedCalls()
        self.cut, self._views = CutForward(module, options, self._fallbacks), KeptViews()
        self.cached = CachedParts(module, self.name, options, Dispatcher)
        self.on_leave: Callable[[], object] | None = None  # is called then
        cpu_fast_path.reserve_entrance(module)
        self._lock, self._in_flight = FairLock(), RunsInFlight()
        self.state = ModuleState(
            module, options, folds_adapters=self.folds_adapters, streams=self.streams
        )
        self.hosted = HostedWeights(
            self.name, self.state, options, self._release, streams=self.streams
        )
        self.state.have_called(self._in_flight.wait)
        self.variants = variants or VariantStore(module, options, self.name)
        self._look = LastLook(module, self.state, self.loop)
        self._may_hoist = options.may_hoist and loop is not None  # else no loop would ever begin
        self._maker = EntryMaker(
            self.state,
            self.turned,
            self.variants,
            self.adapter,
            self._fallbacks,
            may_hoist=self._may_hoist,
        )
        self._reader = CallReader(self.state, self.turned, self.adapter, self._maker)
        self._runner = EntryRunner(
            self.name,
            options,
            self.state,
            self.loop,
            self.counters,
            self._fallbacks,
            self.forget_shapes_but,
            self.hosted,
        )
        self.shapes = BoundShapes(self.state, self._runner.forget)
        self.short: cpu_fast_path.Short = cpu_fast_path.untaken  # of the call that came last
        self._prepared = PreparedCalls(self.options.cache_dir, self._in_flight)
        self.by_name: cpu_fast_path.ByName = self._prepared.by_name
        self._replayed = self._replayed_calls()
        self._make_known()

    def _make_known(self) -> None:
        registry.watch(self._forget_programs)
        enter(self)
        model_offload.follow(self.component, self)

    def _replayed_calls(self) -> ReplayedCalls:
        return ReplayedCalls(
            self.state,
            self.hosted,
            self._runner,
            self.counters,
            self.loop,
            self._lock,
            self.options.cache_dir,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.has_left or is_looked_into():
            return self.run_plain(args, kwargs)
        if (self._prepared or not kwargs) and not hooks.has_global_hooks():
            result = self.by_name(args, kwargs) if kwargs else self.short(args)
            if result is None and self._prepared and not kwargs:
                result = self._other_short(args)
            if result is not None:
                return result
        if (result := self._replayed.result(self, args, kwargs)) is not NO_RESULT:
            return result
        self.counters.calls += 1
        return self._serve_any(args, kwargs)

    def _other_short(self, args: tuple[Any, ...]) -> Any:
        """Take the short way of another prepared call if there is one like this, or return None."""
        short = self._prepared.of(args)
        if short is cpu_fast_path.untaken or short is self.short:
            return None
        self.short = short
        return short(args)

    def _serve_any(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call of whatever kind. All that it is decided by is read at one moment, under the
        lock; on a CPU it then runs without (``flights.py``)."""
        reason = self._unfit()
        if reason:
            return self._run_eager(reason, args, kwargs)
        have_others_rest(self)
        if self.cut.is_usual and not torch.is_grad_enabled() and self._may_be_cut():
            why, result = self.cut.run(self.eager, args, kwargs, self.cut.usual)
            if not why:
                return result
        flight = Flight(self._in_flight, self._lock)
        try:
            with self._lock:
                outcome = self._decide(args, kwargs, flight)
            if flight.run is not None:
                outcome.result = flight.result(in_normal_modes)
        finally:
            flight.end()
        if outcome.reason:
            return self._run_eager(outcome.reason, args, kwargs)
        refusal, result = outcome.refusal, outcome.result
        if refusal is None:
            self.cut.in_a_row = 0
        if refusal is None and type(result) is not WithObjects:
            return result
        if refusal is None:
            try:
                return given_back(result, outcome.arguments)
            except UnsupportedError as error:
                refusal = error
        assert outcome.call is not None
        return self._run_refused(refusal, outcome.call, args, kwargs)

    def _decide(self, args: tuple[Any, ...], kwargs: dict[str, Any], flight: Flight) -> DecidedCall:
        """Say what becomes of a call: a result, ``flight``, or a reason why it runs in eager."""
        kwargs, scale = without_scale(self.module, kwargs)
        if scale != 1.0 and (reason := self._unfit_scale(scale)):
            return DecidedCall(reason=reason)
        if self.state.exchanges_with:
            args, kwargs = self._views.of(args, kwargs)
        args, kwargs = self._reader.normalised(args, kwargs)
        try:
            call = self._reader.flattened(args, kwargs, scale)
        except UnsupportedError as error:
            return DecidedCall(reason=str(error))
        if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors):
            return DecidedCall(reason="an argument requires a gradient")
        if reason := self.state.told_apart.misfit(call.tensors):
            return DecidedCall(reason=reason)
        call = self._seen(self._reader.resolved, call)
        plain = PlainCall((*args, *kwargs.values()), tuple(kwargs))
        is_no_grad = not (torch.is_inference_mode_enabled() or torch.is_grad_enabled())
        generators = call.beside.generators
        with drawing_by(generators) if generators else _AS_IT_IS:
            refusal, result = in_normal_modes(
                partial(self._serve, call, plain, flight, is_no_grad=is_no_grad)
            )
        if refusal is None and self.latest is not None:
            draw_on_host(self.latest.variant.program.host_draws)
        if self._replayed.due is not None:
            self._replayed.prepare(args, kwargs, call)
        return DecidedCall((args, kwargs), call=call, refusal=refusal, result=result)

    def make_ready(self, *args: Any) -> None:
        """Have a program for such a call before there is one. Raises one of REFUSALS where there
        can be none."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._check_state()
            if reason := self._unfit():
                raise UnsupportedError(reason)
            call = self._reader.flattened(args, {})
            entry = self.shapes.get(key := self._maker.key(call))
            if entry is None:
                entry, _ = self._maker.make(call)
                self.shapes.put(key, entry)
            if reason := entry.variant.misfit(call.tensors, is_no_grad=True):
                raise UnsupportedError(reason)

    def _seen(self, read: Callable[[GivenCall], GivenCall | None], call: GivenCall) -> GivenCall:
        """Return what ``read`` makes of a call, with the module looked at anew as often as a
        setting in it is no longer what it was."""
        while (found := read(call)) is None:
            self._reset()
        return found

    def _unfit_scale(self, scale: float) -> str:
        """Say why a call with a scale for all adapters cannot be served, or nothing."""
        if not self._look.is_undisturbed:
            self._check_state()
        return self.state.scale_refusal(scale)

    def _serve(
        self, call: GivenCall, plain: PlainCall, flight: Flight, *, is_no_grad: bool
    ) -> tuple[StropError | None, Any]:
        """Return why there is no program for the call, or its result, unless that is left to
        ``flight``. ``plain`` holds its arguments as they were given; ``is_no_grad`` says whether
        that is the caller's mode."""
        if self.hosted.is_elsewhere(call.given):
            self._reset(call.given)
        call = self.hosted.brought(call)
        key = self._maker.key(call)
        if refused := self._still_refused(key):
            return refused, None
        has_changed, result = self._looked(self.shapes.get(key), call)
        if result is not NO_RESULT:
            return None, result
        if has_changed:
            self._reset(call.given)
            call = self.hosted.brought(call)
            self._refresh_weights(call)
            reason = self._unfit() or self.state.effective.rows_refusal()
            if reason:  # of what has been put there
                return UnsupportedError(reason), None
            call = self._seen(self._reader.read_again, call)
            key = self._maker.key(call)
        entry = self.shapes.get(key)
        if entry is None or not (entry.variant.wants is None or entry.variant.suits(self.state)):
            with collection_paused():  # up to the first result: what has been traced lives on
                try:
                    entry, call = self._maker.make(call)
                except REFUSALS as refusal:
                    return refusal, None
                entry = self.shapes.alike(entry)
                key = self._maker.key(call)
                self.shapes.put(key, entry)
                return self._answer(key, entry, call, plain, flight, is_no_grad=is_no_grad)
        return self._answer(key, entry, call, plain, flight, is_no_grad=is_no_grad)

    def _answer(
        self,
        key: Hashable,
        entry: Entry,
        call: GivenCall,
        plain: PlainCall,
        flight: Flight,
        *,
        is_no_grad: bool,
    ) -> tuple[StropError | None, Any]:
        """Return why the entry cannot serve the call, or its result, unless that is left to
        ``flight``."""
        tensors = call.tensors
        reason = entry.variant.misfit(tensors, is_no_grad=is_no_grad)
        if reason or (reason := self.hosted.misfit(entry, call)):
            return UnsupportedError(reason), None
        is_ready = not self._prepared.is_due(self.state, entry, plain)
        if is_ready and self._runner.may_run_apart(entry, self._look.loop_of(entry)):
            self._note_use(entry)
            self._runner.set_out(flight, entry, tensors)
            return None, None
        result = self._run(entry, tensors)
        if (known := self.shapes.get(key)) is not None:
            self._prepare(known, plain, tensors)
        return None, result

    def _looked(self, entry: Entry | None, call: GivenCall) -> tuple[bool, Any]:
        """Say whether the module is another than at the last look. If it is not, and the call has
        run ahead of this look, its result comes too. Adapters that changed change weights alone."""
        if entry is not None and self._look.is_undisturbed:
            if self.state.effective.needs_refresh(call.beside.lora_scale):
                self._refresh_weights(call)
            return False, NO_RESULT
        self.state.effective.begin_look()  # also where an earlier look was never ended
        self.state.coded.begin_look()
        seem_others = self.state.effective.seem_others(call.beside.lora_scale)
        if entry is None or seem_others or not self._runner.may_run_ahead(entry):
            has_changed = self._look.has_changed()
            if not has_changed:
                self._refresh_weights(call)
            return has_changed, NO_RESULT
        hoisted = vars(self.counters.hoisted)  # programs count there
        replays, before = self.counters.replays, dict(hoisted)
        result = self._run_ahead(entry, call.tensors)
        has_changed = self._look.has_changed(is_memory_known=True)  # by ``may_run_ahead``
        if not has_changed and not self._refresh_weights(call):
            self._replayed.due = entry if may_have(self, Dispatcher) else None
            return False, result
        self._runner.take_back(entry)
        self.counters.replays = replays  # nobody sees that result
        hoisted.update(before)
        return has_changed, NO_RESULT

    def _refresh_weights(self, call: GivenCall) -> bool:
        """Write anew what has changed of what is read in the place of weights, and tell whether
        something has."""
        written = self.state.effective.refresh(call.beside.lora_scale)
        return self.state.coded.refresh(are_written=written) or written

    def _still_refused(self, key: Hashable) -> StropError | None:
        refusal = self._refused.reason(key)
        return None if refusal is None or self.state.has_new_cause() else refusal

    def _run_ahead(self, entry: Entry, tensors: list[Tensor]) -> Any:
        """Return the result of a call whose module is yet to be looked at."""
        self._look.note()  # what it keeps is of this loop
        try:
            return self._run(entry, tensors)
        except BaseException:
            self._look.forget()  # nobody has looked at the module
            raise

    def _unfit(self) -> str:
        """Say why this call cannot be served by an inference program, or nothing."""
        if reason := unfit_call(self.module) or self.state.told_apart.unfit_mode():
            return reason
        if self._look.is_undisturbed:
            return ""
        if self._replaced:
            return self._replaced
        budget_bytes = self.options.weights_budget_bytes
        return model_offload.refusal(self.component, self, budget_bytes) or unfit_module(self.state)

    def forget_weights(self) -> None:
        """Keep nothing that refers to the weights where they are: they are about to be moved."""
        with self._lock:
            self._look.forget()
            self.forget_shapes()
            self.state.release_pieces()
            if self.latest is not None:
                self.latest.let_go()

    def look_again(self) -> None:
        """Have the next call look at everything: the module has been written to."""
        with self._lock:
            self._look.forget()
            self.loop.forget()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile no other thread's call is looked at, nor under way."""
        with self._lock:
            self._in_flight.wait()
            yield

    @property
    def is_busy(self) -> bool:
        """Say whether a call of some thread is being served."""
        return self._lock.is_held

    def rest(self) -> None:
        """Have weights that are streamed lie on the host until the next call."""
        with self.held():
            self.hosted.rest(self.forget_weights)

    def take_rows(self, rows: RowAdapters | None) -> None:
        """Have rows of a batch take adapters of their own from the next call on, or no longer."""
        with self._lock:
            self.state.effective.take_rows(self.module, rows)

    @property
    def how(self) -> Mapping[str, Any]:
        """Return what another dispatcher like this is made with, beside options and name."""
        return {}

    def is_made_by(self, how: Mapping[str, Any]) -> bool:
        """Tell whether this is what would be made so."""
        return type(self) is how.get("kind", Dispatcher) and self.how == how

    @property
    def served_twins(self) -> Mapping[str, Dispatcher]:
        """Return what serves copies of the module on other devices, by their names."""
        return {}

    @property
    def alone(self) -> Mapping[str, int]:
        """Return how many calls were not spread over devices though they were to be, by reason."""
        return {}

    @property
    def texts(self) -> Sequence[str]:
        """Say what else there is to explain of the calls, in lines."""
        return ()

    @property
    def budget(self) -> WeightsBudget | None:
        """Return what keeps the weights within a budget, if there is one."""
        return self.hosted.budget

    def _release(self) -> None:
        """Have hooks of parts move weights again, until the next call that is compiled."""
        with self.held():
            self.forget_weights()
            self.hosted.release()

    def _run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what the module is without us."""
        if (offload := self.hosted.taken) is not None:
            self._release()
            args, kwargs = entered(offload.around, self.module, args, kwargs)
        return self.eager(*args, **kwargs)

    def _run_eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.hosted.refuse(reason)
        if self.state.effective.rows is not None:
            raise UnsupportedError(f"{self.name}: eager knows no strop.lora_rows: {reason}")
        if self.options.strict and reason != hooks.REASON:
            raise UnsupportedError(f"{self.name}: {reason} (strict=True forbids eager)")
        self._fallbacks.note_eager(reason)
        return self._run_plainly(args, kwargs)

    def _run_refused(
        self, refusal: StropError, call: GivenCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the call in eager, whose own exception comes first: it says more than that tracing
        failed."""
        self.hosted.refuse(str(refusal))  # where eager could not run it either
        is_by_row = self.state.effective.rows is not None  # of which it knows nothing
        if is_by_row or (self.options.strict and refusal.__cause__ is None):
            raise refusal
        if str(refusal) in self.variants.cuttable and self._may_be_cut():
            why, result = self.cut.run(self.eager, args, kwargs, refusal)
            if not why:
                return result
        may_serve_parts = not (self.options.strict or self.hosted.may_move)
        with self._lock:
            wants_blocks = str(refusal) in self.variants.of_code and self._is_denoiser
            may_serve_parts &= bool(self.state.replaced) or wants_blocks
            is_cached = may_serve_parts and self.cached.take(wants_blocks=wants_blocks)
        try:
            result = self._run_plainly(args, kwargs)
        except Exception:
            with contextlib.suppress(*REFUSALS):
                self._maker.forget_failure(call)
            raise
        if self.options.strict:
            raise refusal
        if is_cached:
            what = "its blocks are" if wants_blocks else "what stands inside of its hooks is"
            self._fallbacks.note(f"{what} compiled: {refusal}")
        else:
            self._fallbacks.note_eager(str(refusal))
        left = self.state.note_effects()
        if self.state.effects:
            self._refused.note(self._maker.key(call), refusal, left)
        return result

    @property
    def _is_denoiser(self) -> bool:
        return type(self.adapter) is not Adapter

    def _may_be_cut(self) -> bool:
        """Say whether a forward may run in pieces: nobody moves its weights, or calls it in a
        loop of which something is kept."""
        is_plain = not self._is_denoiser and not self.options.strict
        is_plain &= not self.state.exchanges_with  # whose order is that of one program
        is_plain &= self.state.effective.rows is None
        return is_plain and not self.hosted.may_move and self.cut.may_run()

    # weights

    def _check_state(self) -> None:
        if self._look.has_changed():
            self._reset()

    def _reset(self, given: Sequence[Tensor] | None = None) -> None:
        """Look at the module anew, and bind everything again where weights, modules or adapters are
        not what programs are bound to, nor what they were bound to before. ``given`` are the
        arguments of the call that asks for it."""
        self._in_flight.wait()
        self.forget_copies()
        self.cached.look_again()
        before = self.shapes.binding()
        self.state.scan()
        if self.hosted.follow(given):
            self.forget_weights()  # somebody else moves them, though they may lie where they did
            self._maker.may_hoist = self._may_hoist and self.budget is None
            self.state.scan()
        # under a budget no memory is kept for earlier weights
        self.counters.rebinds += self.shapes.follow(before, is_kept=self.budget is None)
        self._forget_prepared()
        self.loop.forget()  # nobody counts what may have been written meanwhile

    def _forget_programs(self) -> None:
        """Have the next call look for its program anew: the patterns in force are others."""
        with self._lock:
            self.forget_shapes()

    def forget_shapes(self) -> None:
        self.shapes.clear()
        self._forget_prepared()

    def _forget_prepared(self) -> None:
        """Forget what holds until the next look alone: short ways, refusals, and views."""
        self._views.forget()
        self._replayed.forget()
        self._prepared.clear()
        self._refused.forget()
        self.short = cpu_fast_path.untaken

    def leave(self) -> None:
        """Keep no place in the module, nor in what others have put around its forward since."""
        self.has_left = True
        self.cached.leave()
        self.forget_weights()
        with torch.inference_mode(False), torch.no_grad():
            give_back_order(self.state.tensors)
        self.hosted.leave()
        model_offload.leave(self.component, self)
        depart(self)
        cpu_fast_path.remove_entrance(self)
        before = self._before
        take_out(self, self.module, before or self.eager, is_own=before is None)
        if self.on_leave is not None:
            self.on_leave()

    def forget_shapes_but(self, entry: Entry) -> None:
        """Forget what is bound to weights that have been moved for this entry."""
        self.shapes.keep_only(entry)
        self._forget_prepared()

    # running

    def _prepare(self, entry: Entry, call: PlainCall, tensors: Sequence[Tensor]) -> None:
        self._prepared.prepare(self, self.state, entry, call, tensors)

    def _run(self, entry: Entry, tensors: list[Tensor]) -> Any:
        self._note_use(entry)
        try:
            return self._runner.run(entry, tensors, self._look.loop_of(entry))
        except BaseException:
            entry.uses -= 1  # what a first run does is yet to be done
            raise

    def _note_use(self, entry: Entry) -> None:
        entry.uses += 1
        self.latest = entry

"""A call that is replayed from a CUDA graph takes a short way: it looks as one did before.

The host of a small network has more to do in a call than the GPU. So torch's own guards compare
tensors, nothing is flattened or made a key of a call's whole structure, and the module is looked at
behind the replay, once, or before it while an earlier call may still find an index out of range.
Where it is not as it was, nobody gets that result, and the call goes the long way
(``dispatcher.py``), which finds out what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from strop.dispatch import hooks, model_offload
from strop.dispatch.adapter import Adapter
from strop.dispatch.arguments import structured
from strop.dispatch.decided_call import in_normal_modes
from strop.dispatch.entry import Entry
from strop.dispatch.known_dispatchers import have_others_rest
from strop.dispatch.native_look import look_if_ready
from strop.dispatch.varying_numbers import GivenCall
from strop.frontend.layerwise_casting import is_cast_as_one
from strop.frontend.objects import WithObjects
from strop.runtime.run.graph_capture import NoGraphError
from strop.runtime.run.host_draws import draw_on_host
from strop.runtime.run.library_settings import library_settings

if TYPE_CHECKING:
    from strop.dispatch.counters import Counters
    from strop.dispatch.dispatcher import Dispatcher
    from strop.dispatch.entry_runner import EntryRunner
    from strop.dispatch.hosted_weights import HostedWeights
    from strop.dispatch.module_state import ModuleState
    from strop.runtime.loop.denoise_loop import DenoiseLoop
    from strop.runtime.run.fair_turns import FairLock

MOST_KNOWN = 256  # kinds of calls of one module
NO_RESULT = object()  # the long way must be taken
MOST_NESTED = 8  # containers in containers
_OF_ARGUMENTS = ("normalise", "steady", "timestep")  # what an adapter says of them
_CONSTANTS = frozenset({type(None), bool, int, str})
_CONTAINERS = frozenset({list, tuple, dict})
_is_inference, _is_grad = torch.is_inference_mode_enabled, torch.is_grad_enabled
_num_modes = torch._C._len_torch_dispatch_stack


def look_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Hashable, list[Tensor]] | None:
    """Return what tells calls apart but for what torch's guards compare of tensors, and the tensors
    in their order: the mode, settings of libraries, names, shapes, constants with their types, and
    lists, tuples and dictionaries of these. None for a call with anything else, such as floats,
    which may be inputs."""
    look: list[Any] = [_is_inference(), library_settings(), *kwargs]
    tensors: list[Tensor] = []
    if not _see((*args, *kwargs.values()), look, tensors, MOST_NESTED):
        return None
    return tuple(look), tensors


def _see(values: Iterable[Any], look: list[Any], tensors: list[Tensor], levels: int) -> bool:
    """Add what tells ``values`` from others, and tell whether all of them can be told."""
    for value in values:
        kind = type(value)
        if kind is Tensor:
            look += (value.shape, value.dtype)
            tensors.append(value)
        elif kind in _CONSTANTS:
            look += (kind, value)  # 1, 1.0 and True are equal
        elif kind in _CONTAINERS and levels:
            look += (kind, len(value))
            inner = value
            if kind is dict:
                if not all(type(key) is str for key in value):
                    return False
                look += value
                inner = value.values()
            if not _see(inner, look, tensors, levels - 1):
                return False
        else:
            return False
    return True


@dataclass(frozen=True, slots=True)
class ShortWay:
    """This serves calls that look like one that ``entry`` has served from its graph."""

    entry: Entry
    fits: Callable[..., bool]  # tensors that look like those of that call, in its modes
    is_unchanged: Callable[[], bool]  # the module, but for where its memory lies
    structure: Callable[[list[Any]], Any]  # of results
    num_scans: int


class ReplayedCalls:
    """These are the short ways of one module, by the looks of calls."""

    def __init__(
        self,
        state: ModuleState,
        hosted: HostedWeights,
        runner: EntryRunner,
        counters: Counters,
        loop: DenoiseLoop,
        lock: FairLock,
        cache_dir: str,
    ) -> None:
        """``lock`` is the dispatcher's. ``cache_dir``: where native code is kept."""
        self._state, self._hosted, self._runner = state, hosted, runner
        self._counters, self._loop, self._lock = counters, loop, lock
        self._cache_dir = cache_dir
        self._ways: dict[Hashable, ShortWay | None] = {}  # None where there is none
        self._look: tuple[int, Callable[[], bool] | None] | None = None  # behind so many scans
        self.due: Entry | None = None  # the call under the lock was replayed, and may have one

    def forget(self) -> None:
        self._ways.clear()
        self.due = self._look = None

    def result(self, served: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call if it has a short way, else NO_RESULT."""
        if not self._ways:
            return NO_RESULT
        look = look_of(args, kwargs)
        if look is None:
            return NO_RESULT
        key, tensors = look
        way = self._ways.get(key)
        if way is None or not _is_in_plain_modes():
            return NO_RESULT
        if not way.fits(*tensors) or self._loop.is_running:
            return NO_RESULT
        if not self._state.told_apart.has_usual_answers(tensors):
            return NO_RESULT
        if model_offload.refusal(served.component, served, served.options.weights_budget_bytes):
            return NO_RESULT
        have_others_rest(served)
        with self._lock:
            # what has been done to the module by whoever had the lock is known here
            if self._ways.get(key) is not way or not self._may_replay(way):
                return NO_RESULT
            run = partial(self._replayed, served, way, tensors)
            self._counters.calls += 1  # however it ends, as by an index that is out of range
            result = in_normal_modes(run) if _is_inference() else run()
            if result is NO_RESULT:
                self._counters.calls -= 1  # the long way counts it
                self._ways.pop(key, None)  # and may make another
            return result

    def _may_replay(self, way: ShortWay) -> bool:
        """Say whether the graph may run before the module is looked at."""
        state, hosted, device = self._state, self._hosted, way.entry.device
        return (
            way.num_scans == state.num_scans
            and state.place is None
            and hosted.taken is None
            and hosted.budget is None
            and state.effective.rows is None
            and (device.type != "cuda" or torch.cuda.current_device() == device.index)
            and self._runner.may_replay(way.entry)
        )

    def _replayed(self, served: Dispatcher, way: ShortWay, tensors: list[Tensor]) -> Any:
        is_ahead = self._runner.may_be_taken_back(way.entry)
        if not is_ahead and not _is_as_it_was(served, way):
            return NO_RESULT
        try:
            results, launches = self._runner.replayed(way.entry, tensors)
        except NoGraphError:  # memory ran out: all graphs are gone
            return NO_RESULT
        if is_ahead and not _is_as_it_was(served, way):
            self._runner.take_back(way.entry)
            return NO_RESULT
        draw_on_host(way.entry.variant.program.host_draws)
        counters = self._counters
        counters.replays += 1
        counters.short_replays += 1
        counters.launches, served.latest = launches, way.entry
        way.entry.uses += 1
        return way.structure(results)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: GivenCall) -> None:
        """Have a short way for calls that look like this one, which the entry that is ``due`` has
        just served. It is asked in the caller's modes."""
        entry, self.due = self.due, None
        look = look_of(args, kwargs)
        if entry is None or look is None or not _is_in_plain_modes():
            return
        key, tensors = look
        if key in self._ways:
            return
        found = look_if_ready(self._cache_dir)
        if found is None:  # a later call has the short way
            return
        native, self._counters.slow_look = found
        if len(self._ways) >= MOST_KNOWN:
            self._ways.clear()
        self._ways[key] = self._way(entry, tensors, call, native)

    def _way(
        self, entry: Entry, tensors: list[Tensor], call: GivenCall, native: Any
    ) -> ShortWay | None:
        if not _is_plain(call, tensors) or not self._is_plain_entry(entry):
            return None
        is_unchanged = self._comparison(native)
        if is_unchanged is None or not is_unchanged():  # as it is by the longer look
            return None
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        variant = entry.variant
        structure = structured(variant.out_spec, len(variant.program.returned))
        return ShortWay(entry, guards.check, is_unchanged, structure, self._state.num_scans)

    def _comparison(self, native: Any) -> Callable[[], bool] | None:
        """Return the look at the module, which all short ways share until its next scan."""
        number = self._state.num_scans
        if self._look is None or self._look[0] != number:
            self._look = number, self._state.comparison(is_memory_known=True, native=native)
        return self._look[1]

    def _is_plain_entry(self, entry: Entry) -> bool:
        """Say whether results are new tensors that come from the arguments and weights alone. What
        else ``may_replay`` asks of an entry is asked at each call."""
        variant, state = entry.variant, self._state
        return not (
            variant.out_spec.type is WithObjects  # which says what is left in arguments
            or entry.aliases
            or variant.same
            or entry.steady
            or entry.piece
            or entry.coded
            or entry.has_exchanges
            or state.exchanges_with
            or state.turned.names
            or state.make_ups
            or state.effects
        )


def may_have(served: Dispatcher, kind: type[Dispatcher]) -> bool:
    """Say whether calls of a module go to one program as they are: ``kind`` is a dispatcher that
    does not divide them among steps, devices or processes. The adapter may name sizes, but has to
    leave arguments as they are."""
    adapter = type(served.adapter)
    is_plain = all(getattr(adapter, name) is getattr(Adapter, name) for name in _OF_ARGUMENTS)
    return type(served) is kind and is_plain


def _is_as_it_was(served: Dispatcher, way: ShortWay) -> bool:
    """Look at the module. No memory of a weight has moved, or its graph would not run."""
    return way.is_unchanged() and not hooks.has_global_hooks() and not is_cast_as_one(served.module)


def _is_in_plain_modes() -> bool:
    """Say whether torch is in none of the modes in which a call runs in eager, or is watched. Those
    of ``is_looked_into`` have been asked for."""
    return not (
        _is_grad()
        or _num_modes()
        or torch.is_autocast_enabled("cuda")
        or torch.is_autocast_enabled("cpu")
    )


def _is_plain(call: GivenCall, tensors: Sequence[Tensor]) -> bool:
    """Say whether the program is given the tensors of a call, in their order, and nothing else."""
    if not tensors or len(call.tensors) != len(tensors):  # others stand for whole numbers
        return False
    return all(map(is_, call.tensors, tensors))

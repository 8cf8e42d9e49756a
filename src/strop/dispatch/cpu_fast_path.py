"""A small call takes a short way: plain tensors on a CPU look as they did at a call before.

A kernel may take one microsecond, so nothing is asked twice and little in Python. torch's own
guards compare all of a tensor and every mode that lives in the dispatcher's state at once. And
where ``nn.Module.__call__`` would only look for hooks, an entrance does so in half of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from operator import is_
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from strop.dispatch.arguments import as_specified
from strop.dispatch.hooks import has_usual_calls
from strop.runtime.run.cpu_runs import NOT_NOW
from strop.runtime.run.limits import INDEX_LIMIT

if TYPE_CHECKING:
    from strop.dispatch.counters import Counters
    from strop.dispatch.entry import Entry
    from strop.dispatch.flights import RunsInFlight
    from strop.dispatch.module_state import ModuleState
    from strop.runtime.loop.denoise_loop import DenoiseLoop
    from strop.runtime.run.cpu_runs import Run

# It takes the arguments and gives the result, or None where the long way must be taken.
Short = Callable[[tuple[Any, ...]], Any]
ByName = Callable[[tuple[Any, ...], dict[str, Any]], Any]  # so do those with names


class Served(Protocol):
    """A dispatcher has these attributes, which the fast path reads and sets."""

    module: nn.Module
    state: ModuleState
    counters: Counters
    loop: DenoiseLoop
    latest: Entry | None
    short: Short
    by_name: ByName
    entrance: Callable[..., Any] | None


_OFFSET = Tensor.storage_offset
_TENSORS = {Tensor}


def untaken(args: tuple[Any, ...]) -> Any:
    """Give no result, which means that the long way must be taken: no call is prepared."""
    return None


def takes(entry: Entry, args: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    """Say whether the arguments of a call are the tensors that the program reads, as they are, and
    its results are new ones, whatever the arguments' memory or gradients."""
    variant = entry.variant
    if entry.aliases or variant.same or variant.wants is not None:
        return False
    if len(args) != len(tensors) or not all(map(is_, args, tensors)):
        return False
    return all(map(is_, as_specified(tensors, variant.specs), tensors))


def prepared(
    served: Served,
    entry: Entry,
    tensors: Sequence[Tensor],
    run: Run,
    is_unchanged: Callable[[], bool],
    drop: Callable[[], Any],
) -> Short:
    """Prepare the fast path for calls that look like this one. ``drop`` is called when ``run`` is
    of no use any more."""
    fits = _looks_like(tensors, entry.free, at_begin=entry.variant.asks_begin)
    counters, loop, num_launches = served.counters, served.loop, entry.bounds[0].num_launches
    told = served.state.told_apart  # a scan of the module ends this way
    is_usual = None if told.asks_nothing else told.has_usual_answers
    is_grad_enabled, num_modes = torch.is_grad_enabled, torch._C._len_torch_dispatch_stack

    def short(args: tuple[Any, ...]) -> Any:
        try:
            looks_so = fits(*args)
        except TypeError:  # another number of arguments
            return None
        if (
            not looks_so
            or is_grad_enabled()
            or forward_ad._current_level >= 0
            or num_modes()
            or loop.is_running
            or (is_usual is not None and not is_usual(args))
            or not is_unchanged()
        ):
            return None
        result = run(args)
        if result is None:
            drop()
            return None
        if result is NOT_NOW:
            return None
        counters.calls += 1
        if served.latest is not entry:
            served.latest, counters.launches = entry, num_launches
        return result

    return short


def counted(short: Short, runs: RunsInFlight) -> Short:
    """Have whoever is about to write what such calls read wait for those under way. A call is
    counted before it looks at the module: who has been told of none finds that it has changed."""

    def short_and_counted(args: tuple[Any, ...]) -> Any:
        runs.begin()
        try:
            return short(args)
        finally:
            runs.end()

    return short_and_counted


def _looks_like(
    tensors: Sequence[Tensor], free: Collection[int], *, at_begin: bool
) -> Callable[..., bool]:
    """Tell whether so many tensors have the class, shape, strides, dtype and device of these, and
    need gradients as they do; and whether inference mode, autocast for their device,
    torch.jit.trace and the transforms of torch.func are on or off as now. Dispatch modes are
    another question. Those at the places of ``free`` have one dim, of any length that a program
    for all lengths serves. ``at_begin``: whether each lies at the beginning of its memory, too."""
    check: Callable[..., bool] = _guards(tensors, free).check
    longest, places = INDEX_LIMIT - 1, sorted(free)

    def are_served(*args: Tensor) -> bool:
        return check(*args) and all(0 < args[place].numel() < longest for place in places)

    fits = are_served if free else check
    if not at_begin:
        return fits
    return lambda *args: fits(*args) and not any(map(_OFFSET, args))


def _guards(tensors: Sequence[Tensor], free: Collection[int]) -> TensorGuards:
    if not free:
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    # lists of lists, whatever torch's stub says
    sizes: Any = [[None] if n in free else [*tensor.shape] for n, tensor in enumerate(tensors)]
    strides: Any = [[*tensor.stride()] for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def plain_key(args: tuple[Any, ...], free: Collection[int] = ()) -> Hashable:
    """Return how a call of plain dense tensors looks, with their strides, but for the lengths of
    those at the places of ``free``; None for any other call."""
    if {*map(type, args)} != _TENSORS:  # at once, as calls with other arguments ask each time
        return None
    key: tuple[Any, ...] = ()
    try:
        for place, arg in enumerate(args):
            shape = arg.dim() if place in free else arg.shape
            key += (shape, arg.stride(), arg.dtype, arg.device)
    except RuntimeError:  # a sparse tensor has no strides
        return None
    return key


def _entrance(served: Served) -> Callable[..., Any]:
    """Return what a module's ``__call__`` takes for compiled code, and calls instead of
    ``_call_impl``.

    It looks for hooks as that does, and calls it wherever the short way is not to be taken.
    """
    own, ours = served.module.__dict__, served.module

    # The method has this name so that a copy of the module has its own way even if its class copies
    # all attributes: a deep copy binds the method to the copy, and pickle goes by the name.
    def _call_impl(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not (
            is_dynamo_compiling()
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or _global_forward_hooks
            or _global_forward_pre_hooks
            or _global_backward_hooks
            or _global_backward_pre_hooks
            or own.get("forward") is not served
            or module is not ours
            or not has_usual_calls()
        ):
            result = served.by_name(args, kwargs) if kwargs else served.short(args)
            if result is not None:
                return result
        return module._call_impl(*args, **kwargs)

    return (MethodType if _is_told_briefly(ours) else _Entrance)(_call_impl, ours)


def _is_told_briefly(module: nn.Module) -> bool:
    """Tell whether the text of a module shows none of its attributes but parts."""
    kind = type(module)
    return kind.extra_repr is nn.Module.extra_repr and kind.__repr__ is nn.Module.__repr__


class _Entrance(partial[Any]):
    """This is an entrance whose text does not show its module, for one whose own text may show all
    attributes, as ``EmbeddingBag``'s does. A method takes 30 ns less."""

    def __repr__(self) -> str:
        return "<the entrance of compiled code>"

    def __reduce__(self) -> Any:  # as a method is copied and pickled
        return getattr, (self.args[0], self.func.__name__)


_PLACE = "_compiled_call_impl"


def reserve_entrance(module: nn.Module) -> None:
    """Give the module as many attributes with an entrance as without: they are counted, and a new
    one would be a change."""
    module.__dict__.setdefault(_PLACE, None)


def open_entrance(served: Served) -> None:
    module = served.module
    if module.__dict__.get(_PLACE) is None and type(module)._call_impl is nn.Module._call_impl:
        module.__dict__[_PLACE] = served.entrance = _entrance(served)


def remove_entrance(served: Served) -> None:
    """Remove the entrance, but leave alone what the user's own ``module.compile()`` has put
    there."""
    if served.module.__dict__.get(_PLACE) is served.entrance:
        served.module.__dict__.pop(_PLACE, None)

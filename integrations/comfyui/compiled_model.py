"""Run a diffusion model's forward compiled, for those clones of its patcher that ask for it.

Clones of a ``ModelPatcher`` share one module, so nothing may be put into that: other branches of a
workflow would get it too. What a clone has of its own are its wrappers. ``CompiledModel`` is one of
them: where the chain of wrappers ends in the model's own forward, it puts the compiled one, in that
very call and nowhere else. Wrappers of other nodes run as ever, before it or behind it.
"""

from __future__ import annotations

import contextvars
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from comfy.patcher_extension import CallbacksMP, WrappersMP
from torch import nn

import strop
from strop.extensions import KnowsCopies, defaults_of, dense, empty

from .calls import Call, TracedOptions
from .gguf_weights import plain_codes
from .interrupts import keep_interrupt, stop_if_interrupted
from .weights import Weights

log = logging.getLogger("strop.comfyui")
KEY = "strop"  # of what this pack registers at a patcher
OFF = "strop off"  # is attached to a clone that is to run without, whatever the switch says
# What a call is without Strop. It is no argument, as no function is one that can be compiled.
_PLAIN: contextvars.ContextVar[Callable[[], Any]] = contextvars.ContextVar("plain call")


class ComfyModel(KnowsCopies):
    """This is what Strop compiles: the forward of a model, which writes into two of its arguments.
    They are made anew inside, so that a trace of it has no effect on them."""

    def __init__(self, model: nn.Module, name: str) -> None:
        """``name`` is that of the method behind all wrappers."""
        super().__init__()
        self.model, self.name = model, name

    def forward(
        self, given: Mapping[str, Any], options: Mapping[str, Any], lengths: Sequence[str] = ()
    ) -> Any:
        """Return what the model returns for these arguments, by their names, and for ``lengths``,
        which are that of ``context``. A call that Strop leaves to eager runs as it came, with all
        its options."""
        if not self.is_copy():
            return _PLAIN.get()()
        given = {**given, "transformer_options": self._options(options)}
        if lengths:
            given |= dict.fromkeys(lengths, given["context"].shape[1])
        if given.get("control") is not None:  # the forward takes what it has used out of its lists
            given["control"] = {name: [*parts] for name, parts in given["control"].items()}
        with keep_interrupt(), plain_codes(self.model):
            return getattr(self.model, self.name)(**given)

    def _options(self, options: Mapping[str, Any]) -> TracedOptions:
        return TracedOptions.of(options, shows_places=self.shows_places)


class CompiledModel:
    """This wrapper has the forward of one model run compiled, or as before where it cannot be."""

    def __init__(self) -> None:
        self.module: ComfyModel | None = None
        self.plain_calls: dict[str, int] = {}  # reason -> calls
        self._weights = Weights()
        self._defaults: list[dict[Any, Any]] = []
        self._said: set[str] = set()  # reasons, in the sampling that runs
        self._sampling: Any = None  # what all its calls share

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Go on with the chain of wrappers, which ends in the compiled forward."""
        executor.original = functools.partial(self._run, executor.class_obj, executor.original)
        return executor(*args, **kwargs)

    def _run(
        self, model: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        stop_if_interrupted()
        call = Call.of(original, args, kwargs)
        if reason := call.reason or self._weights.reason(model):
            self._say(reason, call)
            return original(*args, **kwargs)
        self._take(model, original)
        assert self.module is not None
        empty(self._defaults)
        token = _PLAIN.set(functools.partial(original, *args, **kwargs))
        try:
            return self.module(dense(call.given), call.options, call.lengths)
        finally:
            _PLAIN.reset(token)
            self.module.heed(self.module.forward.counters.fallbacks)

    def _take(self, model: nn.Module, original: Callable[..., Any]) -> None:
        """Compile this model, unless it is the one that was compiled in the last call."""
        name = original.__name__
        if self.module is None or self.module.model is not model or self.module.name != name:
            self.leave()
            self.module = strop.optimize(ComfyModel(model, name).eval())
            self._defaults = defaults_of(model)

    def _say(self, reason: str, call: Call) -> None:
        """Log each reason once in a sampling, and count how often it comes."""
        if call.sampling is not self._sampling:
            self._sampling = call.sampling
            self._said.clear()
        if reason not in self._said:
            self._said.add(reason)
            log.warning("Strop leaves the model as it is: %s", reason)
        self.plain_calls[reason] = self.plain_calls.get(reason, 0) + 1

    def forget_weights(self) -> None:
        """Keep no memory of weights that are about to leave their device."""
        self._weights.forget()
        if self.module is not None:
            self.module.forward.forget_weights()

    def leave(self) -> None:
        """Compile nothing any more."""
        if self.module is not None:
            strop.restore(self.module)
            self.module = None

    def report(self) -> str:
        """Say what has run compiled, and what has not, and why."""
        return "\n\n".join(self._parts_of_report())

    def _parts_of_report(self) -> Iterator[str]:
        for reason, calls in self.plain_calls.items():
            yield f"{calls} calls ran without Strop: {reason}"
        if self.module is None or not self.module.forward.counters.calls:
            yield "Nothing has run compiled yet: connect this node behind the sampler."
        else:
            yield str(strop.explain(self.module))


_OF_MODELS: WeakKeyDictionary[Any, CompiledModel] = WeakKeyDictionary()


def compiled_for(model: Any) -> CompiledModel:
    """Return the one wrapper of what a patcher loads, which all its clones share."""
    return _OF_MODELS.setdefault(model, CompiledModel())


def optimized(patcher: Any) -> Any:
    """Return a clone of a patcher whose model runs compiled. The given one is as it was."""
    clone = loaded_whole(patcher)
    unwrap(clone)
    clone.attachments.pop(OFF, None)
    compiled = compiled_for(clone.model)
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, compiled)
    clone.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, _ForgetWeights(compiled))
    return clone


class _ForgetWeights:
    def __init__(self, compiled: CompiledModel) -> None:
        self._compiled = compiled

    def __call__(self, patcher: Any, leaves: bool = True) -> None:
        """``leaves``: weights go back to where they came from, and the model off its device. Before
        each sampling ComfyUI also has one clone take a model over from another: all stays."""
        if leaves:
            self._compiled.forget_weights()


def plain(patcher: Any) -> Any:
    """Return a clone of a patcher whose model runs as it does without Strop."""
    clone = patcher.clone()
    unwrap(clone)
    clone.attachments[OFF] = True
    return clone


def is_off(patcher: Any) -> bool:
    """Say whether a node has turned Strop off for this clone."""
    return OFF in patcher.attachments


def unwrap(clone: Any) -> None:
    clone.remove_wrappers_with_key(WrappersMP.DIFFUSION_MODEL, KEY)
    clone.remove_callbacks_with_key(CallbacksMP.ON_DETACH, KEY)


def loaded_whole(patcher: Any) -> Any:
    """Return a clone that loads its weights as a whole: those under dynamic VRAM are nowhere until
    a layer asks for them. ComfyUI's own node for compiling does the same."""
    if not getattr(patcher, "is_dynamic", bool)():
        return patcher.clone()
    if getattr(patcher, "cached_patcher_init", None) is None:
        log.warning("Strop leaves the model as it is: it cannot be loaded without dynamic VRAM")
        return patcher.clone()
    return patcher.get_non_dynamic_delegate()

"""Run the forward of a UNet compiled, or as before where that cannot be, and say which it was."""

from __future__ import annotations

import contextvars
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

import strop
from strop.extensions import KnowsCopies, defaults_of, dense, empty

from .calls import OF_CALL, Call, TracedOptions, Unread

log = logging.getLogger("strop.webui")
# What a call is without Strop. It is no argument, as no function is one that can be compiled.
_PLAIN: contextvars.ContextVar[Callable[[], Any]] = contextvars.ContextVar("plain call")


class UnetCalls(KnowsCopies):
    """This is what Strop compiles: a UNet, which may write into two of its arguments. They are
    made anew inside, so that a trace of it has no effect on them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """Return what the UNet returns for these arguments, by their names. A call that Strop
        leaves to eager runs as it came, with all its options."""
        if not self.is_copy():
            return _PLAIN.get()()
        given = {name: Unread(name) if name in OF_CALL else part for name, part in given.items()}
        if "control" in given:  # it is Forge's: only such a UNet takes options
            made = TracedOptions.of(options, shows_places=self.shows_places)
            given["transformer_options"] = made
            if given["control"] is not None:  # the forward takes what it has used out of its lists
                control = given["control"].items()
                given["control"] = {name: [*parts] for name, parts in control}
        return self.model.forward(**given)  # hooks of the UNet have run already


class Status:
    """This counts what the calls of one picture were, and says it in one line."""

    def __init__(self) -> None:
        self.compiled = 0
        self.plain: dict[str, int] = {}  # reason -> calls
        self.refusal = ""  # why no call may come at all

    def add_plain(self, reason: str) -> None:
        """Count a call that ran as before. Its reason is logged the first time."""
        if reason not in self.plain:
            log.warning("Strop leaves the UNet as it is: %s", reason)
        self.plain[reason] = self.plain.get(reason, 0) + 1

    def line(self) -> str:
        calls = self.compiled + sum(self.plain.values())
        if not calls and self.refusal:
            return f"Strop leaves the UNet as it is: {self.refusal}"
        parts = [f"{number} ran as before: {why}" for why, number in self.plain.items()]
        return "; ".join([f"Strop ran {self.compiled} of {calls} calls compiled", *parts])


def _let_einops_know_tensors() -> None:
    """Have einops notice torch, if the UNet's code uses it. It does so in its first call with a
    tensor and keeps that in a table, which Strop would take for something that has changed."""
    einops = sys.modules.get("einops")
    if einops is not None:
        einops.rearrange(torch.empty(1), "a -> a")


class CompiledUnet:
    """This is one UNet with its compiled forward."""

    def __init__(self, model: nn.Module, *, under_autocast: bool = False) -> None:
        """``under_autocast``: it is called so, as by A1111 with its usual ``--precision autocast``.
        Of Strop's two ways to compile, only the one that can train follows autocast's casts."""
        _let_einops_know_tensors()
        self.model, self.under_autocast = model, under_autocast
        self.module = strop.optimize(UnetCalls(model).eval(), train=under_autocast)
        self._defaults = defaults_of(model)

    def run(self, call: Call, plain: Callable[[], Any], status: Status) -> Any:
        """Return the result of a call that can be compiled. ``plain`` does it without Strop."""
        empty(self._defaults)
        counters = self.module.forward.counters
        before, known = counters.eager_calls, dict(counters.fallbacks)
        token = _PLAIN.set(plain)
        try:
            found = self.module(dense(call.given), call.options)
        finally:
            _PLAIN.reset(token)
            self.module.heed(counters.fallbacks)
        if counters.eager_calls == before:
            status.compiled += 1
        else:
            new = [why for why, calls in counters.fallbacks.items() if calls != known.get(why)]
            status.add_plain("; ".join(map(str, new)) or "Strop has left the call to PyTorch")
        return found

    def forget_weights(self) -> None:
        """Keep no memory of weights that are about to leave their device."""
        self.module.forward.forget_weights()


_OF_OWNERS: WeakKeyDictionary[Any, CompiledUnet] = WeakKeyDictionary()


def compiled_for(owner: Any, model: nn.Module) -> CompiledUnet:
    """Return the compiled form of the UNet ``model``. It lives as long as ``owner``, the object
    that the web UI loads and lets go as a whole."""
    found = _OF_OWNERS.get(owner)
    place = next(model.parameters()).device.type
    casts = torch.is_autocast_enabled(place)
    if found is None or found.model is not model or found.under_autocast != casts:
        found = _OF_OWNERS[owner] = CompiledUnet(model, under_autocast=casts)
    return found


def keep_weights_of(owner: Any) -> None:
    """Let go of what refers to the weights of all other models."""
    for other, compiled in [*_OF_OWNERS.items()]:
        if other is not owner:
            compiled.forget_weights()

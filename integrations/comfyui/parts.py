"""Run methods of a module compiled, for whoever holds a stand-in of it, and for nobody else.

A VAE and a text encoder have no wrappers, but the objects that a workflow hands on (``VAE``,
``CLIP``) hold the module that they call. A copy of such an object holds a stand-in, which is the
module in all but the methods that are compiled. The module itself stays as it is.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

import strop
from strop.extensions import KnowsCopies, dense

from .gguf_weights import plain_codes
from .interrupts import keep_interrupt, stop_if_interrupted
from .weights import Weights

log = logging.getLogger("strop.comfyui")
KEY = "strop"  # of what this pack attaches to a patcher
TEXT_ENCODERS = ("CLIPEncoder",)  # classes of layers in a row; what is around them takes lengths


class ComfyMethod(KnowsCopies):
    """This is what Strop compiles: one method of a module."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        codes = plain_codes(self.model) if self.is_copy() else contextlib.nullcontext()
        with keep_interrupt(), codes:
            return getattr(self.model, self.name)(*args, **kwargs)


class ComfyLayers(ComfyMethod):
    """These are layers in a row that add to their argument in place. Whoever calls them has no use
    for it afterwards, so they get one of their own."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x.clone(), *args, **kwargs)


class CompiledPart:
    """This calls one method of a module compiled, or as it is where weights are not ready."""

    def __init__(self, model: nn.Module, name: str, kind: type[ComfyMethod] = ComfyMethod) -> None:
        self._weights, self._said = Weights(), ""
        self._weights.look_at(model)
        self.module = strop.optimize(kind(model, name).eval())

    def is_ready(self) -> bool:
        """Say whether compiled code can have the weights now. A reason against is logged."""
        stop_if_interrupted()
        reason = self._weights.reason(self.module.model)
        if reason and reason != self._said:
            kind = type(self.module.model).__name__
            log.warning("Strop leaves %s as it is: %s", kind, reason)
        self._said = reason
        return not reason

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_ready():
            return self.module(*dense(args), **dense(kwargs))
        return getattr(self.module.model, self.module.name)(*args, **kwargs)

    def report(self) -> str:
        if not self.module.forward.counters.calls:
            return f"{self.module.name}: nothing has run compiled yet"
        return f"{self.module.name}:\n{strop.explain(self.module)}"


class StandIn:
    """This is a module for all who ask, but for what a subclass has in its place."""

    def __init__(self, model: nn.Module, parts: dict[str, CompiledPart]) -> None:
        vars(self).update(strop_model=model, strop_parts=parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["strop_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.strop_model, name, value)


class CompiledVae(StandIn):
    """This is the module of a VAE with its encoder and decoder compiled."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, {name: CompiledPart(model, name) for name in ("decode", "encode")})

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        return self.strop_parts["decode"](*args, **kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        return self.strop_parts["encode"](*args, **kwargs)


class CompiledText(StandIn):
    """This is the module of a text encoder, whose layers are compiled while it encodes."""

    def __init__(self, model: nn.Module) -> None:
        found = {
            (path, name): CompiledPart(layers, "forward", ComfyLayers)
            for path, owner in model.named_modules()
            for name, layers in owner.named_children()
            if type(layers).__name__ in TEXT_ENCODERS
        }
        super().__init__(model, {f"{path}.{name}": part for (path, name), part in found.items()})
        vars(self).update(strop_places=found)

    def encode_token_weights(self, *args: Any, **kwargs: Any) -> Any:
        with self._compiled():
            return self.strop_model.encode_token_weights(*args, **kwargs)

    @contextlib.contextmanager
    def _compiled(self) -> Iterator[None]:
        """Put the compiled layers into their places meanwhile."""
        with contextlib.ExitStack() as after:
            for (path, name), part in self.strop_places.items():
                if part.is_ready():
                    owner = self.strop_model.get_submodule(path)
                    after.callback(owner._modules.__setitem__, name, part.module.model)
                    owner._modules[name] = part.module
            yield


def stand_in_for(patcher: Any, kind: type[StandIn], model: Any) -> Any:
    """Return the stand-in of a patcher's module. All clones of the patcher share it."""
    if model is None or isinstance(model, StandIn):
        return model
    if getattr(model, "comfy_has_chunked_io", False):
        log.warning("Strop leaves the VAE as it is: it writes pictures where it is told, in parts")
        return model
    if KEY not in patcher.attachments:
        patcher.attachments[KEY] = kind(model)
    return patcher.attachments[KEY]


def without_stand_in(model: Any) -> Any:
    return model.strop_model if isinstance(model, StandIn) else model


def optimized_vae(vae: Any) -> Any:
    """Return a copy of a VAE that runs compiled. The given one is as it was."""
    found = copy.copy(vae)
    found.first_stage_model = stand_in_for(vae.patcher, CompiledVae, vae.first_stage_model)
    return found


def plain_vae(vae: Any) -> Any:
    found = copy.copy(vae)
    found.first_stage_model = without_stand_in(vae.first_stage_model)
    return found


def optimized_clip(clip: Any) -> Any:
    """Return a clone of a text encoder whose layers run compiled. The given one is as it was."""
    stand_in = stand_in_for(clip.patcher, CompiledText, clip.cond_stage_model)
    found = clip.clone()
    found.cond_stage_model = stand_in
    if isinstance(stand_in, StandIn) and not stand_in.strop_parts:
        log.warning("Strop leaves the text encoder as it is: it compiles CLIP alone")
    return found


def plain_clip(clip: Any) -> Any:
    found = clip.clone()
    found.cond_stage_model = without_stand_in(clip.cond_stage_model)
    return found


def report_of(model: Any) -> str:
    """Say what of a VAE or a text encoder has run compiled."""
    if not isinstance(model, StandIn):
        return "This part has not passed through a node of Strop's."
    return "\n\n".join(part.report() for part in model.strop_parts.values())

"""Run the forward of a diffusers UNet compiled, or as before where that cannot be."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from torch import nn

import strop
from strop.extensions import PLAIN_DATA, dense

log = logging.getLogger("strop.invokeai")
_NAMES = ("sample", "timestep", "encoder_hidden_states")
_KEPT = "_strop_compiled"  # of the UNet, so that both live equally long


class UnetCalls(nn.Module):
    """This is what Strop compiles: the forward of a UNet's class."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: dict[str, Any]) -> Any:
        """Return what the UNet returns as a tuple. Its hooks have run already."""
        return self.model.forward(**given, return_dict=False)


class Kept:
    """This holds the compiled form of a UNet, and is left out of copies of that."""

    def __init__(self, module: Any = None) -> None:
        self.module = module

    def __deepcopy__(self, memo: Any) -> Kept:
        return Kept()


class Status:
    """This counts what the calls of one picture were, and says it in one line."""

    def __init__(self, refusal: str = "") -> None:
        self.compiled, self.refusal = 0, refusal
        self.plain: dict[str, int] = {}  # reason -> calls

    def add_plain(self, reason: str) -> None:
        """Count a call that ran as before. Its reason is logged the first time."""
        if reason not in self.plain:
            log.warning("Strop leaves the UNet as it is: %s", reason)
        self.plain[reason] = self.plain.get(reason, 0) + 1

    def line(self) -> str:
        if self.refusal:
            return f"Strop leaves the UNet as it is: {self.refusal}"
        calls = self.compiled + sum(self.plain.values())
        parts = [f"{number} ran as before: {why}" for why, number in self.plain.items()]
        return "; ".join([f"Strop ran {self.compiled} of {calls} calls compiled", *parts])


def reason_of(model: nn.Module) -> str:
    """Say what of a UNet cannot be compiled as InvokeAI has set it up, or nothing."""
    for name, layer in model.named_modules():
        if getattr(layer, "is_device_autocasting_enabled", bool)():
            return "the UNet is loaded in part, and weights are brought while layers run"
        if getattr(layer, "get_num_patches", int)():
            return "LoRA is computed in each step, beside the layers"
        own = layer.__dict__.get("_conv_forward")
        if own is not None and getattr(own, "__func__", own) is not type(layer)._conv_forward:
            return f"{name} computes by another function (seamless tiling)"
    return ""


class Attached:
    """This is the forward of one UNet while a picture is made. It steps aside in each call."""

    def __init__(self, model: nn.Module, status: Status, reason: str = "") -> None:
        self.model, self.status = model, status
        if "forward" in model.__dict__:
            reason = reason or "the UNet has another forward already"
        self.reason = reason or reason_of(model)
        self._before = model.__dict__.get("forward")
        model.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the UNet returns."""
        given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
        with self._aside():
            reason = self.reason or _reason_in(given) or _too_many(args)
            if reason:
                self.status.add_plain(reason)
                return self.model.forward(*args, **kwargs)
            return self._compiled(given)

    def detach(self) -> None:
        """Give the UNet its own forward back, and keep no memory of weights, which InvokeAI may
        move off the device."""
        self._put_back()
        kept = self.model.__dict__.get(_KEPT)
        if kept is not None:
            kept.module.forward.forget_weights()

    def _compiled(self, given: dict[str, Any]) -> Any:
        with_dict = given.pop("return_dict", True)
        given = {name: dense(value) for name, value in given.items() if not _is_left_out(value)}
        module = self._module()
        counters = module.forward.counters
        before, known = counters.eager_calls, dict(counters.fallbacks)
        found = module(given)
        if counters.eager_calls == before:
            self.status.compiled += 1
        else:
            new = [why for why, calls in counters.fallbacks.items() if calls != known.get(why)]
            self.status.add_plain("; ".join(map(str, new)) or "Strop left the call to PyTorch")
        return UNet2DConditionOutput(sample=found[0]) if with_dict else found

    def _module(self) -> Any:
        kept = self.model.__dict__.get(_KEPT)
        if kept is None:
            kept = self.model.__dict__[_KEPT] = Kept()
            kept.module = strop.optimize(UnetCalls(self.model).eval())
        return kept.module

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        self._put_back()
        try:
            yield
        finally:
            self.model.__dict__["forward"] = self

    def _put_back(self) -> None:
        if self._before is None:
            self.model.__dict__.pop("forward", None)
        else:
            self.model.__dict__["forward"] = self._before


def _is_left_out(value: Any) -> bool:
    """Say whether an argument asks for nothing, as InvokeAI gives many."""
    return value is None or value == {} if not hasattr(value, "shape") else False


def _too_many(args: tuple[Any, ...]) -> str:
    return "the call has arguments without names" if len(args) > len(_NAMES) else ""


def _reason_in(given: dict[str, Any]) -> str:
    """Say which argument holds more than tensors and numbers, or nothing."""
    if given.get("cross_attention_kwargs"):
        return "an IP-Adapter or prompts of regions change attention"
    for name, value in given.items():
        parts = value.values() if isinstance(value, dict) else value
        for part in parts if isinstance(value, dict | list | tuple) else [value]:
            if not isinstance(part, PLAIN_DATA):
                return f"{name} holds an object of {type(part).__qualname__}"
    return ""

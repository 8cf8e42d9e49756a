"""Trace layers whose weights diffusers keeps in another type than it computes in.

``enable_layerwise_casting`` puts a hook around the forward of a layer: before it, all weights and
buffers of the layer are cast to the compute type, and behind it back to the storage type
(diffusers.hooks.layerwise_casting). A program reads the weights as they are stored and casts them
where the layer uses them, so that the hook has nothing to do, and the stored weights never change.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from strop.errors import CaptureError
from strop.frontend import hook_chains
from strop.frontend.composed_tensors import is_composed
from strop.frontend.hook_chains import is_own, links
from strop.frontend.stable_text import qualified

_HOOKS = "diffusers.hooks.layerwise_casting"
_CASTS, _OF_PEFT = f"{_HOOKS}.LayerwiseCastingHook", f"{_HOOKS}.PeftInputAutocastDisableHook"
_IS_PEFT_CASTING = "cast_input_dtype_enabled"  # of a wrapped layer, which the second hook turns off


@dataclass(frozen=True)
class Cast:
    """Say what hooks around a forward do: cast weights to ``compute_dtype``, if any, and afterwards
    to ``storage_dtype``; keep the layers of peft inside from casting their inputs."""

    compute_dtype: torch.dtype | None = None
    storage_dtype: torch.dtype | None = None
    keeps_inputs: bool = False

    def __str__(self) -> str:
        return f"{self.storage_dtype} cast to {self.compute_dtype}"


class Hooks:
    """Stand in a copy for diffusers' registry of a module's hooks: ``dtype`` of a model asks it for
    the type that layers compute in."""

    def __init__(self, cast: Cast) -> None:
        self.hooks = {} if cast.compute_dtype is None else {"layerwise_casting": cast}

    def get_hook(self, name: str) -> Cast | None:
        """Return what stands for a hook, or None."""
        return self.hooks.get(name)


class CastForward:
    """This is the forward of a copy: it casts the weights within, as the hook around the original
    casts the original's."""

    is_of_copy = True

    def __init__(self, part: nn.Module, dtype: torch.dtype) -> None:
        self._part, self._dtype = part, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tables: list[dict[str, Any]] = []
        for part in self._part.modules():
            tables += [part._parameters, part._buffers]
        stored = [{k: t for k, t in table.items() if self._is_cast(t)} for table in tables]
        made: list[Tensor] = []
        try:
            for table, own in zip(tables, stored, strict=True):
                casts = {key: tensor.to(self._dtype) for key, tensor in own.items()}
                made += casts.values()
                table.update(casts)
            versions = [tensor._version for tensor in made]
            result = type(self._part).forward(self._part, *args, **kwargs)
            if versions != [tensor._version for tensor in made]:
                name = type(self._part).__name__
                raise CaptureError(f"a {name} under layerwise casting writes to its weights")
            return result
        finally:
            for table, own in zip(tables, stored, strict=True):
                table.update(own)

    def _is_cast(self, tensor: Any) -> bool:
        return tensor is not None and tensor.is_floating_point() and tensor.dtype != self._dtype


def cast_of(module: nn.Module) -> Cast | None:
    """Return what the hooks around a module's forward do if they are layerwise casting's and no
    others stand in front of its class's forward, else None."""
    cast, forward = Cast(), vars(module).get("forward")
    if not isinstance(forward, functools.partial):
        return None
    for hook, inner in links(module):
        if qualified(type(hook)) == _CASTS and cast.compute_dtype is None:
            cast = replace(cast, compute_dtype=hook.compute_dtype, storage_dtype=hook.storage_dtype)
        elif qualified(type(hook)) == _OF_PEFT:
            cast = replace(cast, keeps_inputs=True)
        else:
            return None
        forward = inner
    return cast if is_own(forward, module) else None


def is_cast_as_one(module: nn.Module) -> bool:
    """Tell whether a hook around the forward of a module, or around a dispatcher in its place,
    casts all that is in it."""
    return any(qualified(type(hook)) == _CASTS for hook, _ in links(module))


def watched_hooks(module: nn.Module) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield where the hooks around a module's forward hold what ``cast_of`` tells."""
    for hook, _ in links(module):
        own = vars(hook)
        yield from ((own, name) for name in ("compute_dtype", "storage_dtype") if name in own)
        yield from hook_chains.watched(hook)


def refusal(module: nn.Module, cast: Cast) -> str:
    """Say why layers within a module cannot be traced as this casts them, or nothing."""
    if cast.compute_dtype is None:
        return ""
    inside = [part for part in module.modules() if part is not module]
    if any(within is not None and within.compute_dtype for within in map(cast_of, inside)):
        return "layerwise casting of a layer within one that is cast"
    for part in (module, *inside):
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and (reason := _tensor_refusal(tensor, cast)):
                return f"layerwise casting: {name} {reason}"
    return ""


def _tensor_refusal(tensor: Tensor, cast: Cast) -> str:
    if is_composed(tensor):
        return "is quantised"
    if tensor.is_complex():
        return "is complex"
    if tensor.is_floating_point() and tensor.dtype != cast.storage_dtype:
        return (
            f"is {tensor.dtype}, and {cast.storage_dtype} after the next call in eager, which"
            " rounds it"
        )
    return ""


def casts_in(parts: Iterable[tuple[str, nn.Module]]) -> dict[str, Cast]:
    """Return what layerwise casting does to modules, by their paths."""
    found = {path: cast_of(part) for path, part in parts if "_diffusers_hook" in vars(part)}
    return {path: cast for path, cast in found.items() if cast is not None}


def left_out(module: nn.Module) -> Iterator[tuple[nn.Module, Cast, tuple[Any, Any]]]:
    """Yield the modules within that are cast, and what a copy of each is to be made without: the
    function around its forward, and its registry."""
    for part in module.modules():
        if part is not module and (cast := cast_of(part)) is not None:
            yield part, cast, (vars(part)["forward"], vars(part)["_diffusers_hook"])


def cast_as(copied: nn.Module, cast: Cast) -> None:
    """Have a copy, made without the hooks, compute as the original does with them."""
    vars(copied).pop("forward", None)
    vars(copied)["_diffusers_hook"] = Hooks(cast)
    if cast.compute_dtype is not None:
        vars(copied)["forward"] = CastForward(copied, cast.compute_dtype)
    for part in copied.modules() if cast.keeps_inputs else ():
        if hasattr(part, _IS_PEFT_CASTING):
            vars(part)[_IS_PEFT_CASTING] = False

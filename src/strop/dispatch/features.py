"""Find which feature has put a function of its own in the place of a module's forward, and what a
user can do about it. Compiled code would leave that function out, so such a module runs in
eager."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from strop.frontend.cache_hooks import CACHES, place_inside
from strop.frontend.layerwise_casting import cast_of, refusal
from strop.frontend.module_parts import has_other_forward
from strop.frontend.moving_hooks import moving_hooks
from strop.frontend.sharded_context import sharding_hooks

# Beginnings of the names that diffusers gives its hooks -> feature, and what ends it.
COMPILED = ("layerwise_casting", "peft_autocast_disable")
_ALONE = "of a layer with another hook beside it: leave one of the two out"
HOOKS: tuple[tuple[str, str, str], ...] = (
    ("layerwise_casting", "layerwise casting", "load the model in the type that it computes in"),
    ("peft_autocast_disable", "layerwise casting", "load the model in one type"),
    ("group_offloading", "group offloading", _ALONE),
    ("lazy_prefetch", "group offloading", _ALONE),
    ("layer_execution", "group offloading", _ALONE),
    *((start, cache, "disable_cache() of the model ends it") for start, cache in CACHES.items()),
    ("layer_skip", "skipping of layers", "leave out the guidance that skips layers"),
    ("smoothed_energy", "smoothed energy guidance", "leave out that guidance"),
    ("cp_", "context parallelism", "leave out the other hooks of this part"),
    ("tp_", "tensor parallelism", "run the model on one device"),
)
OFFLOADED = (
    "offloading by accelerate takes weights to another device and back, of a layer with another"
    " hook beside it: leave one of the two out"
)
PACKAGES = {
    "accelerate": ("a hook of accelerate", "accelerate.hooks.remove_hook_from_module removes it"),
    "cache_dit": ("cache-dit", "cache_dit.disable_cache(pipe) ends it"),
    "diffusers": ("a hook of diffusers", "remove it"),
    "peft": ("peft", "unload the adapter"),
    "torchao": ("torchao", "optimize the model before it is quantised"),
    "bitsandbytes": ("bitsandbytes", "load the model without quantisation"),
}


def feature_of(module: nn.Module) -> str:
    """The feature whose function stands in front of a module's own forward, with what ends it."""
    if is_offloaded(module):
        return OFFLOADED
    names = getattr(module.__dict__.get("_diffusers_hook"), "hooks", ())
    for name in sorted(names, key=lambda name: name in COMPILED):  # what is by itself comes last
        for start, feature, advice in HOOKS:
            if name.startswith(start):
                return f"{feature} is on: {advice}"
    for function in _functions(module.__dict__.get("forward")):
        root = (function.__module__ or "").partition(".")[0]  # generated code is of no module
        if root in PACKAGES:
            feature, advice = PACKAGES[root]
            return f"{feature} is in front of its forward: {advice}"
    return ""


def replacement_in(part: nn.Module, path: str) -> str:
    """Say why a module cannot be compiled in which the forward of a part is not its class's."""
    where = f"{path} ({type(part).__name__})" if path else f"the {type(part).__name__}"
    if feature := feature_of(part):
        return f"{feature} (it is in front of {where})"
    named = next(
        (f"{f.__module__}.{f.__qualname__}" for f in _functions(part.__dict__.get("forward"))),
        "another object",
    )
    return (
        f"the forward of {where} is {named} instead of its class's: give the part a class of its"
        " own, or del its forward"
    )


def replacement_before(module: nn.Module) -> str:
    """The same of a module that is being optimised."""
    if feature := feature_of(module):
        return feature
    names = [f"{f.__module__}.{f.__qualname__}" for f in _functions(module.__dict__.get("forward"))]
    by = f" by {names[0]}" if names else ""
    return f"its forward had been replaced{by} before optimize: optimize first"


def take_out(forward: Any, module: nn.Module, plain: Any, *, is_own: bool) -> None:
    """Put ``plain`` in the place of ``forward`` in a module, and where hooks of accelerate and
    diffusers keep it. ``is_own``: ``plain`` is its class's, which needs no place in it."""
    references = getattr(module.__dict__.get("_diffusers_hook"), "_fn_refs", ())
    if is_own and module.__dict__.get("forward") is forward:
        del module.__dict__["forward"]
    for table in (module.__dict__, *(reference.__dict__ for reference in references)):
        for name in [name for name, value in table.items() if value is forward]:
            table[name] = plain


def replaced_part(parts: Sequence[tuple[str, nn.Module]]) -> str:
    """Return the reason for the first such part of a module, or nothing. ``parts``: all of it, the
    module itself first."""
    for path, part in parts[1:]:
        if not has_other_forward(part):
            continue
        if sharding_hooks(part):
            continue
        if (cast := cast_of(part)) is None:
            return replacement_in(part, path)
        if reason := refusal(part, cast):
            return f"{reason} (in {path}, {type(part).__name__})"
    return ""


def is_offloaded(module: nn.Module) -> bool:
    """Tell whether hooks of accelerate take the weights of each layer to another device, and
    back."""
    return any(getattr(hook, "offload", False) for hook in _accelerate_hooks(module))


def whole_offload(module: nn.Module) -> Any:
    """Return the hook of accelerate that takes all of a module to the host between calls, or
    None."""
    hooks = _accelerate_hooks(module)
    return next((hook for hook in hooks if type(hook).__name__ == "CpuOffload"), None)


def place_for(module: nn.Module) -> tuple[Any, str]:
    """Return the object and its attribute in which a dispatcher stands: inside of hooks that take
    weights to the GPU or of caches, or else in the place of the module's forward."""
    hooks = moving_hooks(module)
    if hooks and "_hf_hook" not in vars(module):
        return hooks[0].fn_ref, "forward"
    if sharding := sharding_hooks(module):
        return sharding[-1].fn_ref, "forward"
    if (inside := place_inside(module)) is not None:
        return inside
    is_inside = bool(hooks) or whole_offload(module) is not None
    return module, "_old_forward" if is_inside and "_old_forward" in vars(module) else "forward"


def forward_of(module: nn.Module) -> Any:
    """Return what has been put in the place of a module's forward, inside of hooks that divide its
    tokens among processes, or None."""
    if sharding := sharding_hooks(module):
        return sharding[-1].fn_ref.forward
    return module.__dict__.get("forward")


def _accelerate_hooks(module: nn.Module) -> list[Any]:
    if (hook := module.__dict__.get("_hf_hook")) is None:
        return []
    return [hook, *getattr(hook, "hooks", ())]


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yield the functions that a callable consists of, from the outside."""
    if isinstance(value, functools.partial):
        yield from _functions(value.func)
    elif isinstance(value, MethodType):
        yield from _functions(value.__func__)
    elif isinstance(value, FunctionType):
        yield value
        for cell in value.__closure__ or ():
            if isinstance(inner := _content(cell), FunctionType | functools.partial | MethodType):
                yield from _functions(inner)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None

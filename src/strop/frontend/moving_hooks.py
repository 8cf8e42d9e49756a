"""Know hooks around a forward that do nothing but take weights to a device and back: compiled code,
which reads weights where they lie, may leave them out."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from strop.frontend.hook_chains import is_own, links
from strop.frontend.stable_text import qualified

_GROUPS = "diffusers.hooks.group_offloading"
GROUP = f"{_GROUPS}.GroupOffloadingHook"
LAZY = f"{_GROUPS}.LazyPrefetchGroupOffloadingHook"  # which learns from a call in which order
_OF_DIFFUSERS = frozenset((GROUP, LAZY, f"{_GROUPS}.LayerExecutionTrackerHook"))
ALIGN = "accelerate.hooks.AlignDevicesHook"
_SEQUENCE = "accelerate.hooks.SequentialHook"
# what they set in a module
ATTRIBUTES = ("forward", "_diffusers_hook", "_hf_hook", "_old_forward")


def moving_hooks(module: nn.Module) -> tuple[Any, ...]:
    """Return the hooks around a module's forward, from the inside, if they move weights and nothing
    else, and nobody else's function is around the forward; else none."""
    if "_hf_hook" in vars(module):
        return _of_accelerate(module)
    if "_diffusers_hook" in vars(module):
        return _of_diffusers(module)
    return ()


def entered(
    hooks: Sequence[Any], module: nn.Module, args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run what ``hooks`` of a forward, from the inside, do in front of it; return the arguments as
    they give them. What stands behind it is run by whoever calls the hooks."""
    for hook in reversed(hooks):
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
    return args, kwargs


def set_by_hooks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that such hooks have set in a module, for a copy without them."""
    if moving_hooks(module):
        yield from ((name, vars(module)[name]) for name in ATTRIBUTES if name in vars(module))


def watched_hooks(module: nn.Module) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield where it is held which hooks these are."""
    own = vars(module)
    if "_hf_hook" in own:
        yield from ((own, name) for name in ("_hf_hook", "_old_forward") if name in own)
    if (registry := own.get("_diffusers_hook")) is not None:
        yield from ((registry.hooks, name) for name in registry.hooks)


def registered(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Return what diffusers' hooks around modules are held in, by their names."""
    registries = (vars(module).get("_diffusers_hook") for module in modules)
    return [registry.hooks for registry in registries if registry is not None]


def _of_diffusers(module: nn.Module) -> tuple[Any, ...]:
    hooks, forward = list[Any](), vars(module).get("forward")
    for hook, inner in links(module):
        if qualified(type(hook)) not in _OF_DIFFUSERS:
            return ()
        hooks.insert(0, hook)
        forward = inner
    return tuple(hooks) if _is_inmost(forward, module) else ()


def _of_accelerate(module: nn.Module) -> tuple[Any, ...]:
    own = vars(module)
    forward, hook = own.get("forward"), own["_hf_hook"]
    if not isinstance(forward, functools.partial) or forward.args != (module,):
        return ()
    if getattr(forward.func, "__module__", "") != "accelerate.hooks":
        return ()
    hooks = tuple(hook.hooks) if qualified(type(hook)) == _SEQUENCE else (hook,)
    is_known = all(qualified(type(one)) == ALIGN and not one.no_grad for one in hooks)
    is_known &= not hook.no_grad
    return hooks[::-1] if is_known and _is_inmost(own.get("_old_forward"), module) else ()


def _is_inmost(forward: Any, module: nn.Module) -> bool:
    return getattr(forward, "is_strop", False) or is_own(forward, module)

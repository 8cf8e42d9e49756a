"""``enable_model_cpu_offload`` takes all models of a pipeline to the host, also at the end of each
picture. Compiled ones are let go of there instead of being copied (``dispatch.model_offload``), and
the hooks that diffusers would put back where they are stay: programs need not be looked at anew."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from strop.diffusion.changes import Changes, in_force, mend
from strop.diffusion.denoise_loops import kinds
from strop.diffusion.offloading import parts
from strop.diffusion.parts import compiled_modules, modules_of
from strop.dispatch.known_dispatchers import dispatcher_of
from strop.dispatch.model_offload import (
    follow,
    free_working_memory,
    known_offload,
    may_be_loaded,
)

NAME = "enable_model_cpu_offload"


def offload_pinned(changes: Changes) -> None:
    """Have all pipelines do so."""
    for kind in kinds()[0]:
        if hasattr(kind, NAME):
            mend(kind, NAME)
            own = getattr(kind, NAME)
            changes.put([kind], NAME, functools.wraps(own)(_enabling(own)))


def _enabling(own: Callable[..., Any]) -> Callable[..., Any]:
    known_hooks = WeakKeyDictionary[Any, _Hooks]()

    def enable_model_cpu_offload(pipe: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = compiled_modules(pipe).values() if in_force(enable_model_cpu_offload) else ()
        served = [d for d in map(dispatcher_of, compiled) if d is not None]
        hooks = known_hooks.pop(pipe, None)
        if served and hooks is not None and not args and hooks.are_wanted_by(pipe, **kwargs):
            known_hooks[pipe] = hooks
            return hooks.offload(pipe)
        for dispatcher in served:
            if (known := known_offload(dispatcher.component)) is not None:
                known.offload()
            else:  # graphs would keep weights on the GPU, beside those of the next picture
                dispatcher.forget_weights()
        result = own(pipe, *args, **kwargs)  # it removes all hooks, and sets new ones
        for dispatcher in served:
            follow(dispatcher.component, dispatcher)
        if served:
            known_hooks[pipe] = _Hooks(pipe)
            free_working_memory(pipe._offload_device)
        return result

    return enable_model_cpu_offload


class _Hooks:
    """These are the hooks that diffusers has set in the models of a pipeline, in their order."""

    def __init__(self, pipe: Any) -> None:
        self._device = pipe._offload_device
        self._components = {name: ref(module) for name, module in modules_of(pipe).items()}
        self._set = [
            (ref(each), ref(each.hook), ref(vars(each.model)["forward"]))
            for each in _hooks_of(pipe)
        ]

    def are_wanted_by(self, pipe: Any, device: Any = None, **others: Any) -> bool:
        """Tell whether diffusers would take these hooks away and set equal ones: for the same
        device, in the same models, of which no part has a hook of its own."""
        if others or device != self._device:
            return False
        now, hooks = modules_of(pipe), _hooks_of(pipe)
        return (
            {*now} == {*self._components}
            and all(self._components[name]() is module for name, module in now.items())
            and len(hooks) == len(self._set)
            and all(map(_stands, hooks, self._set))
            and not any(_has_inner_hook(module) for module in now.values())
        )

    def offload(self, pipe: Any) -> None:
        """Take to the host what is not there, and leave no memory of the GPU that nobody uses:
        torch none, as diffusers does, and working memory neither."""
        for hook in _hooks_of(pipe):
            if may_be_loaded(hook.model):
                hook.offload()
        free_working_memory(self._device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _stands(hook: Any, known: tuple[ref[Any], ...]) -> bool:
    own = vars(hook.model)
    return [each() for each in known] == [hook, hook.hook, own.get("forward")] and (
        own.get("_hf_hook") is hook.hook
    )


def _hooks_of(pipe: Any) -> list[Any]:
    return getattr(pipe, "_all_hooks", [])


def _has_inner_hook(module: nn.Module) -> bool:
    return any("_hf_hook" in vars(part) for part in parts(module) if part is not module)

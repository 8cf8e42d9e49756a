"""diffusers looks for hooks that offload or cast weights in each module of a pipeline, several
times before a picture begins; Stable Diffusion 1.5 has 1,100 modules, SDXL 3,500. From the call to
the first text encoder took 17 and 25 ms on one host, for which a GPU waits. With the same search by
a shorter walk it takes 3 and 4. Hooks live in registries, of which most processes never make one:
until then there is nothing to look for, which saves five walks a picture, and SDXL three more for
the devices of text encoders and the type of its UNet.
"""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

from strop.diffusion.changes import Changes, mend
from strop.diffusion.optimised import belongs
from strop.diffusion.stand_ins import StandIn, put_in_place

HOOKS = "diffusers.hooks.group_offloading"  # where registries, of one module's hooks, are known
REGISTRY = "HookRegistry"


class Registries:
    """Tell whether there may be any. ``kind``: of the hook that a ``Search`` finds."""

    def __init__(self, kind: str) -> None:
        self.kind, self.may_exist = kind, True

    def watch(self, registry: Any, changes: Changes) -> None:
        """Note when the first object of this class is made, if there is none yet; until then there
        are no hooks."""
        if not isinstance(registry, type):
            return
        mend(registry, "__init__")
        original = registry.__init__  # type: ignore[misc]

        @functools.wraps(original)
        def made(each: Any, *args: Any, **kwargs: Any) -> None:
            self.may_exist = True
            original(each, *args, **kwargs)

        self.may_exist = False
        changes.put([registry], "__init__", made)
        kinds = set(map(type, gc.get_objects()))
        if any(issubclass(kind, registry) for kind in kinds):
            self.may_exist = True


class Quick(StandIn):
    """It answers for one component of an optimised pipeline, by a shorter walk or by none."""

    def __init__(self, own: Callable[..., Any], registries: Registries) -> None:
        super().__init__(own)
        self.registries = registries

    def is_for(self, *given: Any, **named: Any) -> bool:
        return belongs(next(iter((*given, *named.values())), None))


class Search(Quick):
    """Find the hook of one kind of the first module inside that has one, in the order of
    ``module.modules()``; or None."""

    def answer(self, module: nn.Module) -> Any:
        for part in parts(module) if self.registries.may_exist else ():
            registry = part.__dict__.get("_diffusers_hook")
            hook = None if registry is None else registry.get_hook(self.registries.kind)
            if hook is not None:
                return hook
        return None


class DeviceOfInputs(Quick):
    """Find where a module wants its inputs: where hooks of diffusers or accelerate take its
    weights, or where these are."""

    def answer(self, module: nn.Module) -> Any:
        if self.registries.may_exist or any("_hf_hook" in p.__dict__ for p in parts(module)):
            return self.own(module)
        device = getattr(module, "device", None)
        return self.own(module) if device is None else torch.device(device)


class FloatingType(Quick):
    """Find what a hook casts a module's inputs to, or the type of its first Parameter that has one
    of numbers with fractions."""

    def answer(self, parameter: nn.Module) -> Any:
        is_kept = getattr(parameter, "_keep_in_fp32_modules", None)
        if not self.registries.may_exist and not is_kept:
            first = next(parameter.parameters(), None)
            if first is not None and first.is_floating_point():
                return first.dtype
        return self.own(parameter)


def parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module.modules()``, without their names."""
    seen, stack = set[nn.Module](), [module]
    while stack:
        part = stack.pop()
        if part not in seen:
            seen.add(part)
            yield part
            children = [child for child in part._modules.values() if child is not None]
            stack.extend(reversed(children))


# Functions by place and name; what they ask in the editions of diffusers whose answers are known.
SEARCH, DEVICE, DTYPE = (
    (HOOKS, "_get_top_level_group_offload_hook"),
    ("diffusers.utils.torch_utils", "get_module_execution_device"),
    ("diffusers.models.modeling_utils", "get_parameter_dtype"),
)
QUICK: Mapping[tuple[str, str], tuple[type[Quick], frozenset[str]]] = {
    SEARCH: (
        Search,
        frozenset(
            (
                "modules",
                "hasattr",
                "_diffusers_hook",
                "get_hook",
                "_GROUP_OFFLOADING",
            )
        ),
    ),
    DEVICE: (
        DeviceOfInputs,
        frozenset(
            (
                "hooks.group_offloading",
                "_get_group_onload_device",
                "ValueError",
                "modules",
                "getattr",
                "torch",
                "device",
                "next",
                "itertools",
                "chain",
                "parameters",
                "buffers",
            )
        ),
    ),
    DTYPE: (
        FloatingType,
        frozenset(
            (
                "isinstance",
                "nn",
                "Module",
                "named_modules",
                "hasattr",
                "_diffusers_hook",
                "get_hook",
                "compute_dtype",
                "named_parameters",
                "dtype",
                "_keep_in_fp32_modules",
                "any",
                "buffers",
                "is_floating_point",
                "str",
                "list",
                "Tensor",
                "_named_members",
            )
        ),
    ),
}


def search_quickly(changes: Changes) -> list[str]:
    """Put a ``Quick`` in the place of each of these functions, and return the names of those that
    are there: another function than the known one stays."""
    try:
        hooks = importlib.import_module(HOOKS)
    except ImportError:  # no diffusers, or one without such hooks
        return []

    @functools.cache
    def registries() -> Registries:
        known = Registries(hooks._GROUP_OFFLOADING)
        known.watch(getattr(hooks, REGISTRY, None), changes)
        return known

    def made(kind: type[Quick], own: FunctionType) -> Quick:
        return kind(own, registries())

    return [
        name
        for (where, name), (kind, asked) in QUICK.items()
        if put_in_place(changes, where, name, asked, functools.partial(made, kind))
    ]

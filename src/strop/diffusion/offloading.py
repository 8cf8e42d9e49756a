"""diffusers looks for hooks that offload weights in each module of a pipeline, twice or more before
a picture begins; Stable Diffusion 1.5 has 1,100 modules, SDXL 3,500. From the call to the first
text encoder took 17 and 25 ms on one host, for which a GPU waits. With the same search by a shorter
walk it takes 3 and 4. Hooks live in registries, of which most processes never make one: until then
there is nothing to look for, which saves five walks a picture.
"""

from __future__ import annotations

import functools
import gc
import importlib
from types import FunctionType
from typing import Any

from torch import nn

PLACE, SEARCH = "diffusers.hooks.group_offloading", "_get_top_level_group_offload_hook"
REGISTRY = "HookRegistry"  # there, of one module's hooks
# what that function asks, in the editions of diffusers whose answer ``Search`` gives
KNOWN = frozenset(("modules", "hasattr", "_diffusers_hook", "get_hook", "_GROUP_OFFLOADING"))


def search_quickly() -> bool:
    """Put a ``Search`` in the place of diffusers' function, for all pipelines of this process.
    Whether there is one: another function than the known one stays."""
    try:
        place = importlib.import_module(PLACE)
    except ImportError:  # no diffusers, or one without such hooks
        return False
    own = getattr(place, SEARCH, None)
    if isinstance(own, FunctionType) and frozenset(own.__code__.co_names) == KNOWN:
        search = Search(place._GROUP_OFFLOADING)
        search.sleep_until_made(getattr(place, REGISTRY, None))
        setattr(place, SEARCH, search)
    return isinstance(getattr(place, SEARCH, None), Search)


class Search:
    """The hook of one kind of the first module inside that has one, in the order of
    ``module.modules()``; or None."""

    def __init__(self, kind: str) -> None:
        self.kind, self.is_awake = kind, True

    def sleep_until_made(self, registry: Any) -> None:
        """Find nothing until the first object of this class is made, if there is none yet."""
        if not isinstance(registry, type):
            return
        original = registry.__init__  # type: ignore[misc]

        @functools.wraps(original)
        def made(each: Any, *args: Any, **kwargs: Any) -> None:
            self.is_awake = True
            original(each, *args, **kwargs)

        self.is_awake = False
        registry.__init__ = made  # type: ignore[misc]
        if any(issubclass(type(each), registry) for each in gc.get_objects()):
            self.is_awake = True

    def __call__(self, module: nn.Module) -> Any:
        if not self.is_awake:
            return None
        seen, stack = set[nn.Module](), [module]
        while stack:
            part = stack.pop()
            if part in seen:
                continue
            seen.add(part)
            registry = part.__dict__.get("_diffusers_hook")
            hook = None if registry is None else registry.get_hook(self.kind)
            if hook is not None:
                return hook
            children = [child for child in part._modules.values() if child is not None]
            stack.extend(reversed(children))
        return None

"""Compile the parts of a model around which a cache of diffusers stands.

First Block Cache and its like decide in Python, in each step, which blocks it leaves out, and keep
results of earlier steps. Their hooks stand around single blocks or attention layers. The model
itself stays in eager with its hooks, and what stands inside of them is compiled, each part by
itself. Parts of one structure share their graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from torch import nn

from strop.dispatch.variants import VariantStore
from strop.frontend.cache_hooks import cached_parts


class Leaving(Protocol):
    variants: VariantStore

    def leave(self) -> None: ...


Part = TypeVar("Part", bound=Leaving)


class CachedParts(Generic[Part]):
    """Hold what serves the parts inside of a cache's hooks, by their paths."""

    def __init__(
        self, module: nn.Module, make: Callable[[nn.Module, str, VariantStore | None], Part]
    ) -> None:
        """``make`` puts what serves a part into the place of its forward, given its path and the
        variants of another part of its class."""
        self._module, self._make = module, make
        self._parts: dict[str, nn.Module] = {}
        self.serving: dict[str, Part] = {}

    def take(self) -> bool:
        """Serve the parts that have such hooks now, and tell whether there are any."""
        self.give_back()
        shared = {type(self._parts[path]): part.variants for path, part in self.serving.items()}
        for path, part in cached_parts(self._module).items():
            if path not in self.serving:
                served = self._make(part, path, shared.get(type(part)))
                self._parts[path], self.serving[path] = part, served
                shared.setdefault(type(part), served.variants)
        return bool(self.serving)

    def give_back(self) -> None:
        """Serve no part any longer whose hooks are gone, or which is no longer there."""
        if self.serving:
            found = cached_parts(self._module)
            for path in [p for p in self.serving if found.get(p) is not self._parts[p]]:
                self.serving.pop(path).leave()
                del self._parts[path]

    def leave(self) -> None:
        """Serve no part any longer."""
        while self.serving:
            self.serving.popitem()[1].leave()
        self._parts.clear()

"""Compile parts of a model that itself stays in eager, each by itself.

First Block Cache and its like decide in Python, in each step, which blocks it leaves out, and keep
results of earlier steps. Their hooks stand around single blocks or attention layers. The model
itself stays in eager with its hooks, and what stands inside of them is compiled. So are the blocks
of a denoiser whose own forward reads sizes from the values of a tensor, as Lumina 2's does. Parts
of one structure share their graphs.
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from torch import nn

from strop.dispatch.features import place_for
from strop.dispatch.variants import VariantStore
from strop.frontend.cache_hooks import cached_parts
from strop.frontend.module_parts import is_inside_a_hook
from strop.options import Options


class Serving(Protocol):
    """This serves one module, and is made as a ``Dispatcher`` is."""

    module: nn.Module
    variants: VariantStore
    has_left: bool

    def __init__(self, module: nn.Module, options: Options, **how: Any) -> None: ...

    def leave(self) -> None: ...


Part = TypeVar("Part", bound=Serving)


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the members of a module's own lists, by their paths."""
    lists = [(name, part) for name, part in module.named_children() if type(part) is nn.ModuleList]
    return {
        f"{name}.{path}": block for name, part in lists for path, block in part.named_children()
    }


def _is_served(part: nn.Module) -> bool:
    return getattr(vars(part).get("forward"), "is_strop", False)


class CachedParts(Generic[Part]):
    """Hold what serves the parts inside of a cache's hooks, or the blocks, by their paths."""

    def __init__(self, module: nn.Module, name: str, options: Options, kind: type[Part]) -> None:
        self._module, self._name, self._options, self._kind = module, name, options, kind
        self.serving: dict[str, Part] = {}
        self._is_known = False  # nobody has put hooks around a part since we looked
        self._wants_blocks = False

    def take(self, *, wants_blocks: bool = False) -> bool:
        """Serve the parts that have such hooks now, or the blocks where there are none and they are
        wanted; tell whether there are any."""
        if wants_blocks and not self._wants_blocks:
            self._wants_blocks, self._is_known = True, False
        if not self._is_known:
            shared = {type(part.module): part.variants for part in self.serving.values()}
            for path, part in self._found().items():
                if not (
                    is_inside_a_hook(part) or _is_served(part)
                ):  # else it is served: by us, or the user wants so
                    self.serving[path] = served = self._served(path, part, shared.get(type(part)))
                    shared.setdefault(type(part), served.variants)
            self._is_known = True
        return bool(self.serving)

    def _found(self) -> dict[str, nn.Module]:
        found = cached_parts(self._module)
        return found or (blocks_of(self._module) if self._wants_blocks else {})

    def _served(self, path: str, part: nn.Module, variants: VariantStore | None) -> Part:
        served = self._kind(part, self._options, name=f"{self._name}.{path}", variants=variants)
        holder, place = place_for(part)
        setattr(holder, place, served)
        return served

    def look_again(self) -> None:
        """Serve no part any longer whose hooks are gone, which is no longer there, or which the
        user has optimised: the module has changed."""
        self._is_known = False
        if self.serving:
            found = self._found()
            for path, served in [*self.serving.items()]:
                if found.get(path) is not served.module or served.has_left:
                    self.serving.pop(path).leave()

    def leave(self) -> None:
        """Serve no part any longer."""
        while self.serving:
            self.serving.popitem()[1].leave()
        self._is_known = self._wants_blocks = False

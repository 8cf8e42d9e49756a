"""Trace layers whose weights torch computes anew before each call, by a hook in front of it.

``torch.nn.utils.weight_norm``, ``spectral_norm`` and ``prune`` keep what a weight is made of as
Parameters and buffers, and leave the weight itself as a plain attribute. It is no data of a
program: in the trace the hooks make it of the Parameters where the layer uses it, and what eager
has left there is not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from strop.frontend.stable_text import qualified, text_of

_HOOKS = "_forward_pre_hooks"
_NAMES = {WeightNorm: "name", SpectralNorm: "name"}
_OF_PRUNING = "_tensor_name"
COMPUTED = "_strop_computed"  # an attribute of a copy: what its weights are made by


def name_computed(hook: Any) -> str:
    """Return the attribute of a module that a hook in front of its forward makes of Parameters, or
    nothing if the hook is of no known kind."""
    kind = type(hook)
    if kind in _NAMES:
        return str(getattr(hook, _NAMES[kind]))
    own = prune.BasePruningMethod
    if not isinstance(hook, own) or kind.apply_mask is not own.apply_mask:
        return ""
    return str(getattr(hook, _OF_PRUNING)) if kind.__call__ is own.__call__ else ""


def names_computed(module: nn.Module) -> list[str]:
    """Return the attributes of a module that hooks of known kinds make."""
    hooks = vars(module)[_HOOKS]
    return list(filter(None, map(name_computed, hooks.values()))) if hooks else []


def computed_weights(module: nn.Module) -> Iterator[Any]:
    """Yield what eager has left in such attributes of a module and those in it."""
    for part in module.modules():
        yield from (vars(part)[name] for name in names_computed(part) if name in vars(part))


def computed_in(parts: Iterable[tuple[str, nn.Module]]) -> dict[str, str]:
    """Write out which hooks make weights of modules, by their paths: part of a program's key."""
    return {
        path: text_of([(qualified(type(hook)), vars(hook)) for hook in vars(part)[_HOOKS].values()])
        for path, part in parts
        if names_computed(part)
    }


def watched_hooks(module: nn.Module) -> Iterator[tuple[Mapping[Any, Any], Any]]:
    """Yield where a module holds hooks that make its weights, and what they hold."""
    for key, hook in vars(module)[_HOOKS].items():
        if name_computed(hook):
            yield vars(module)[_HOOKS], key
            yield from ((vars(hook), name) for name in vars(hook))


class ComputedForward:
    """This is the forward of a copy without hooks: it makes the weights as these do, and leaves
    none behind."""

    is_of_copy = True

    def __init__(self, part: nn.Module, hooks: tuple[Any, ...], forward: Any) -> None:
        self._part, self._hooks, self._forward = part, hooks, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            for hook in self._hooks:
                hook(self._part, args)
            if self._forward is None:
                return type(self._part).forward(self._part, *args, **kwargs)
            return self._forward(*args, **kwargs)
        finally:
            for hook in self._hooks:
                vars(self._part).pop(name_computed(hook), None)


def compute(copied: nn.Module) -> None:
    """Have a copy make its weights by a forward in the place of known hooks, if it has any."""
    hooks = vars(copied)[_HOOKS]
    if not names_computed(copied) or not all(map(name_computed, hooks.values())):
        return
    own = vars(copied)
    for name in names_computed(copied):
        own.pop(name, None)
    own[COMPUTED] = made = tuple(hooks.values())
    own["forward"] = ComputedForward(copied, made, own.get("forward"))
    hooks.clear()

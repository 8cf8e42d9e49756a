"""Walk over the parts of a module. A model with adapters has ten thousand of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.fx import GraphModule

from strop.frontend.cache_hooks import place_inside
from strop.frontend.hook_chains import is_own
from strop.frontend.moving_hooks import moving_hooks
from strop.frontend.stable_text import text_of


def named_parts(
    module: nn.Module, stand_ins: Mapping[int, nn.Module] = MappingProxyType({})
) -> list[tuple[str, nn.Module]]:
    """Return what ``module.named_modules()`` yields, in the same order and a fraction of its time:
    each of its generators hands on what those inside yield. ``stand_ins`` come in the place of
    other modules, by the ids of those."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    ahead = [("", module)]
    while ahead:
        path, part = ahead.pop()
        part = stand_ins.get(id(part), part)
        if id(part) in seen:
            continue
        seen.add(id(part))
        found.append((path, part))
        if part._modules:
            start = f"{path}." if path else ""
            children = reversed(part._modules.items())
            ahead += [(start + name, child) for name, child in children if child is not None]
    return found


def has_other_forward(module: nn.Module) -> bool:
    """Tell whether somebody has put a function of their own in the place of the class's forward."""
    own = module.__dict__.get("forward")
    if own is None or getattr(own, "is_strop", False) or is_exported(module):
        return False
    if getattr(own, "is_of_copy", False):  # computes what hooks around the original's do
        return False
    # hooks leave it bound when they are removed
    return not (is_own(own, module) or moving_hooks(module))


def is_inside_a_hook(module: nn.Module) -> bool:
    """Tell whether a hook of accelerate, or one of a cache, calls compiled code in the place of the
    module's forward."""
    inside = place_inside(module)
    called = vars(module).get("_old_forward") if inside is None else getattr(*inside)
    return getattr(called, "is_strop", False)


def is_exported(module: nn.Module) -> bool:
    """Tell whether torch.export has made this: a program, or the part of it that checks sizes,
    which has a function for a forward. What mode it was in is part of its graph, and its flag
    ``training``, which nobody can set, says nothing."""
    return any(kind.__module__ == "torch.export._unlift" for kind in type(module).__mro__)


# Hooks, weights, parts: what is no setting of a module, two thirds of its attributes.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes of a module but for those that every module has."""
    return [item for item in vars(module).items() if item[0] not in OF_EVERY_MODULE]


def graph_module_like(module: GraphModule) -> GraphModule:
    """Return a module of the same class, whose code and graph it shares, with tables of its own. A
    deep copy would copy the graph, and print its code anew."""
    made: GraphModule = object.__new__(type(module))
    for name, value in vars(module).items():
        vars(made)[name] = value.copy() if isinstance(value, dict) else value
    return made


def graph_text(module: nn.Module) -> str:
    """Write out what a module of torch.fx computes, which its class does not tell: its code, the
    functions that the code names, and how arguments and results are nested."""
    if not isinstance(module, GraphModule):
        return ""
    forward = type(module).forward
    named = {n: v for n, v in forward.__globals__.items() if n in forward.__code__.co_names}
    functions = [f"{name}={text_of(value)}" for name, value in sorted(named.items())]
    nesting = [str(vars(module).get(name)) for name in ("_in_spec", "_out_spec")]
    return "\n".join([module.code, *functions, *nesting])

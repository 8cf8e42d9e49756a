"""Know the hooks of diffusers' caches, which run a forward or give what an earlier step gave."""

from __future__ import annotations

from typing import Any

from torch import nn

from strop.frontend.hook_chains import is_own, links

# Beginnings of the names that diffusers gives them -> the cache
CACHES = {
    "pyramid_attention_broadcast": "Pyramid Attention Broadcast",
    "faster_cache": "FasterCache",
    "fbc": "First Block Cache",
    "mag_cache": "MagCache",
    "sea_cache": "SeaCache",
    "taylorseer": "TaylorSeer",
    "text_kv_cache": "the cache of text keys and values",
}


def place_inside(module: nn.Module) -> tuple[Any, str] | None:
    """Return the object and its attribute in which the innermost hook of caches keeps a module's
    own forward, or what serves in its place; None where there is none, or another hook or function
    is around the forward."""
    names = getattr(vars(module).get("_diffusers_hook"), "hooks", ())
    if not names or not all(name.startswith(tuple(CACHES)) for name in names):
        return None
    for hook, forward in links(module):
        if is_own(forward, module) or getattr(forward, "is_strop", False):
            calls = hook.fn_ref
            return calls, "forward" if calls.original_forward is None else "original_forward"
    return None


def cached_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a module around whose forward caches stand and nothing else, and which
    have no such parts in them, by their paths."""
    parts = {path: part for path, part in module.named_modules() if part is not module}
    found = {path: part for path, part in parts.items() if place_inside(part) is not None}
    around = {path[:n] for path in found for n, letter in enumerate(path) if letter == "."}
    return {path: part for path, part in found.items() if path not in around}

"""Say which node of a workflow has put a function into a model."""

from __future__ import annotations

import functools
import sys
from typing import Any


def origin_of(value: Any) -> str:
    """Describe a function or object, and name the node that its code belongs to, if one does."""
    while isinstance(value, functools.partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    module, name = named.__module__, named.__qualname__
    kind = "the function" if callable(value) else "an object,"
    described = f"{kind} {name} of {module}"
    node = _node_of(module, name.partition(".")[0])
    return f"{described}, which the node {node!r} has put there" if node else described


def _node_of(module: str, class_name: str) -> str:
    """Return the name that ComfyUI shows for the node of a class, or of the only node in its
    file."""
    known = sys.modules.get("nodes")
    classes = getattr(known, "NODE_CLASS_MAPPINGS", {})
    shown = getattr(known, "NODE_DISPLAY_NAME_MAPPINGS", {})
    found = {key: made for key, made in classes.items() if made.__module__ == module}
    own = [key for key, made in found.items() if made.__name__ == class_name]
    keys = own or list(found)
    return shown.get(keys[0]) or keys[0] if len(keys) == 1 else ""

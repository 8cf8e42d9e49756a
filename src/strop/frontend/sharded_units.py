"""Parts that ``torch.distributed.fsdp.fully_shard`` (FSDP2) has sharded: its units.

Around the forward of a unit stand hooks that gather its weights and shard them again. Inside of it
weights are plain tensors, so that a unit without further units in it can be traced like any module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

_OWN_STATE = "__composable_api_state_key"  # begins the names under which FSDP2 keeps its own
_MODULE = "torch.distributed.fsdp"  # whoever has sharded anything has imported it


def is_sharded(module: nn.Module) -> bool:
    """Tell whether a module is a unit."""
    library = sys.modules.get(_MODULE)
    kind = getattr(library, "FSDPModule", None)  # FSDP2 came with torch 2.6
    return kind is not None and isinstance(module, kind)


def innermost_units(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the units in a module, itself among them, that have no further units in them, with
    their paths."""
    for path, part in module.named_modules():
        if is_sharded(part) and not any(map(is_sharded, [*part.modules()][1:])):
            yield path, part


def unsharded(unit: nn.Module) -> nn.Module:
    """Return a module of the class that a unit had before, with the same parts and weights, and
    without the hooks around it. A unit itself cannot be copied."""
    plain: Any = object.__new__(_class_before(unit))
    for name, value in vars(unit).items():
        if name.startswith(_OWN_STATE):
            continue
        is_hooks = "_hooks" in name and isinstance(value, dict)
        plain.__dict__[name] = type(value)() if is_hooks else value
    return plain  # type: ignore[no-any-return]


def _class_before(unit: nn.Module) -> type:
    """Return the class that ``fully_shard`` has made a subclass of."""
    _, _, before, *_ = type(unit).__mro__
    return before

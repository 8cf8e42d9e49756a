"""Find the parts of a module that are compiled one by one."""

from __future__ import annotations

from torch import nn

from strop.frontend.sharded_units import innermost_units


def units_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the innermost units of a module that ``fully_shard`` has sharded, by their paths;
    nothing of any other."""
    return dict(innermost_units(module))

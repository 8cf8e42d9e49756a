"""Find torch's operators by the names that programs have."""

from __future__ import annotations

from typing import Any

import torch


def overload_of(target: str) -> Any:
    """Return the OpOverload of a name such as "aten.embedding.default", or None where this torch
    has none."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found

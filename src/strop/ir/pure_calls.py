"""Tell which operators of torch leave nothing behind but their results, and draw no numbers.

Torch's own functional operators do so, by their schemas and tags. Schemas do not say everything: a
batch norm that trains writes its statistics, and an LSTM that trains draws what it drops.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

_KNOWN = frozenset(("aten._scaled_mm.default",))
# arguments by which an operator draws numbers, or writes statistics
_TRAINING = ("train", "training", "use_input_stats", "dropout_p")
# By schemas these write nothing. Quantisers in training move their observers' ranges.
_WRITING = ("fused_moving_avg", "fake_quant", "rrelu_with_noise", "dropout")


def is_pure_call(attrs: Mapping[str, Any]) -> bool:
    """Say so of a call by its target and its arguments."""
    target = attrs.get("target")
    if target in _KNOWN:
        return True
    if not isinstance(target, str) or not _is_functional(target):
        return False
    names = _names(target)
    given = {**dict(zip(names, attrs["args"], strict=False)), **dict(attrs["kwargs"])}
    return not any(given.get(name, name in names) for name in _TRAINING)


@lru_cache(maxsize=1024)
def _is_functional(target: str) -> bool:
    found = _overload(target)
    if found is None or any(word in target for word in _WRITING):
        return False
    may_draw = torch.Tag.nondeterministic_seeded in found.tags
    decides = any(argument.name in _TRAINING for argument in found._schema.arguments)
    return not found._schema.is_mutable and (decides or not may_draw)


@lru_cache(maxsize=1024)
def _names(target: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in _overload(target)._schema.arguments)


def _overload(target: str) -> Any:
    """Return one of torch's own operators, or None for any other."""
    space, _, rest = target.partition(".")
    name, _, which = rest.partition(".")
    packet = getattr(torch.ops.aten, name, None) if space == "aten" else None
    return getattr(packet, which, None)

"""Count the repeated blocks that a trace has copied, and say why others were traced again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from strop.frontend.block_look import LOOK_PARTS, module_look

INCOMPARABLE = "what it holds or is given cannot be compared"
CHANGES_ITSELF = "its forward changes its settings, its arguments or what lies outside"
# What tells blocks of one kind apart, in the order of the key of a call.
_KEY_PARTS = ("how its arguments came to lie in memory", "what code outside has changed")


@dataclass(frozen=True, slots=True)
class Uncopied:
    """Say why the nodes of a block that has run cannot be copied."""

    reason: str


@dataclass
class BlockReuse:
    """Count blocks. ``again``: how many of a class were traced though one of their kind had been,
    by class and reason."""

    num_copied: int = 0
    again: Counter[tuple[str, str]] = field(default_factory=Counter)
    _keys: dict[Hashable, list[Any]] = field(default_factory=dict)  # of traced blocks, by kind
    _begun: set[Hashable] = field(default_factory=set)

    def note_first(self, block: nn.Module, kind: Hashable, key: Any) -> None:
        """Note a block that is traced, as none has looked like it."""
        earlier = self._keys.setdefault(kind, [])
        if earlier:
            self.note(block, min((differences(one, key) for one in earlier), key=len))
        earlier.append(key)

    def note_unlike(self, block: nn.Module, kind: Hashable) -> None:
        """Note a block that cannot be compared. The first of its kind has to be traced anyway."""
        if kind in self._begun:
            self.note(block, (INCOMPARABLE,))
        self._begun.add(kind)

    def note_built_otherwise(self, block: nn.Module, repeated: nn.Module) -> None:
        """Note a block that is of the kind of a repeated one and has other settings."""
        looks = [look.parts for look in map(module_look, (block, repeated)) if look is not None]
        how = _settings(*looks) if len(looks) == 2 else ""
        self.note(block, [f"{LOOK_PARTS[0]}{how}" if how else INCOMPARABLE])

    def note(self, block: nn.Module, reasons: Sequence[str]) -> None:
        self.again[type(block).__name__, ", ".join(reasons)] += 1

    def texts(self) -> tuple[str, ...]:
        """Return a phrase for each class and reason."""
        return tuple(f"{count} {name}: {why}" for (name, why), count in self.again.items())


def differences(one: Any, other: Any) -> list[str]:
    """Name what differs between the keys of two calls: a look, and what else was asked."""
    (look, *rest), (other_look, *other_rest) = one, other
    names = (*LOOK_PARTS, *_KEY_PARTS)
    pairs = zip((*look, *rest), (*other_look, *other_rest), strict=True)
    found = [name for name, (a, b) in zip(names, pairs, strict=True) if a != b]
    if found and found[0] == LOOK_PARTS[0]:
        found[0] += _settings(look[0], other_look[0])
    return found


def _settings(modules: Any, others: Any) -> str:
    """Name the attributes of modules that differ."""
    found = dict[str, None]()
    for (path, _, attributes, *_), (_, _, other_attributes, *_) in zip(
        modules, others, strict=False
    ):
        now, before = dict(attributes), dict(other_attributes)
        for name in now.keys() | before.keys():
            if now.get(name) != before.get(name):
                found[f"{path}.{name}".removeprefix(".")] = None
    return f" ({', '.join(sorted(found))})" if found else ""

"""Remember what peft keeps in plain Python: which adapters count, and with which scales."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from strop.dispatch.identities import identities, is_equal
from strop.runtime.derived.sources import SourceWatch


class KnownSettings(SourceWatch):
    """Remember the objects at some places, lists of names among them."""

    def __init__(self, places: Iterable[tuple[Any, str]]) -> None:
        self._names = identities(places)
        self._lists = [value for value in self._names.values if isinstance(value, list)]
        self._known = [list(names) for names in self._lists]

    def differs(self) -> bool:
        """Tell whether one is another object with another value, or a list holds other names."""
        names = self._names
        try:
            same = names.hold() or all(map(_is_alike, names.now(), names.values))
        except KeyError:  # gone
            return True
        return not same or self._lists != self._known


def _is_alike(a: Any, b: Any) -> bool:
    if type(a) is list and type(b) is list:
        return a == b
    return is_equal(a, b)

"""Remember what peft keeps in plain Python: which adapters count, and with which scales."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from strop.dispatch.identities import identities


class KnownSettings:
    """Remember the objects at some places, lists of names and numbers among them."""

    def __init__(self, places: Iterable[tuple[Any, str]]) -> None:
        self._names = identities(places)
        self._lists = [value for value in self._names.values if isinstance(value, list)]
        self._known = [list(names) for names in self._lists]

    def differ(self) -> bool:
        """Tell whether one is another object with another value, or a list holds other names."""
        names = self._names
        same = names.hold() or all(map(_is_equal, names.now(), names.values))
        return not same or self._lists != self._known


def _is_equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, float | bool | str | list) and a == b)

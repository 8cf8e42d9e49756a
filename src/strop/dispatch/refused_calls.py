"""Keep the calls that stay in eager, as they change what they read."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from strop.errors import StropError


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """Hold why calls of one key stay in eager, and what the last of them has left: names with their
    values."""

    reason: StropError
    left: tuple[tuple[str, Any], ...]


class RefusedCalls:
    """Knows calls by their keys.

    A call that leaves things as the one before it has left them changes nothing any more: Swin sets
    its shift to 0 at the first picture of 7 x 7 windows. Such a call is traced once more.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, RefusedCall] = {}
        self._settled = set[Hashable]()  # to be traced once more
        self._traced_again = set[Hashable]()

    def reason(self, key: Hashable) -> StropError | None:
        """Return why calls of this key stay in eager, or nothing."""
        if key in self._settled:
            self._settled.remove(key)
            self._traced_again.add(key)
            del self._calls[key]
        call = self._calls.get(key)
        return None if call is None else call.reason

    def note(self, key: Hashable, reason: StropError, left: tuple[tuple[str, Any], ...]) -> None:
        """Note a call that eager has just served, and what it has left."""
        before = self._calls.get(key)
        self._calls[key] = RefusedCall(reason, left)
        if before is not None and key not in self._traced_again and _are_same(before.left, left):
            self._settled.add(key)

    def forget(self) -> None:
        """Forget all, but which have been traced again: they are not a second time."""
        self._calls.clear()
        self._settled.clear()


def _are_same(first: tuple[tuple[str, Any], ...], second: tuple[tuple[str, Any], ...]) -> bool:
    if len(first) != len(second):
        return False
    return all(a == b and _is_same(x, y) for (a, x), (b, y) in zip(first, second, strict=True))


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_is_same, first, second))
    is_number = type(first) is type(second) and isinstance(first, bool | int | float | str)
    return first is second or (is_number and first == second)

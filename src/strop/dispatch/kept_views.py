"""Keep the parts of tensors that hooks cut out anew for each call.

Under context parallelism a call is given its process's part of the prompt, a new view in each step
of a denoise loop, of one tensor. What comes of arguments that stay the same through a loop is kept
by which tensors they are (``runtime.loop.hoisting``): a view is handed on as the one that an
earlier call was given, if it is the same part of the same tensor. Both have the same memory, and
count the same writes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor


class KeptViews:
    """This holds the latest view that each argument was."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    def of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, views as they were given before."""
        found = tuple(self._known(place, value) for place, value in enumerate(args))
        return found, {name: self._known(name, value) for name, value in kwargs.items()}

    def forget(self) -> None:
        self._kept.clear()

    def _known(self, place: Hashable, value: Any) -> Any:
        if not isinstance(value, Tensor) or value._base is None:
            return value
        kept = self._kept.get(place)
        if kept is not None and _is_same(kept, value):
            return kept
        self._kept[place] = value
        return value


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one._base is other._base and _look(one) == _look(other)


def _look(view: Tensor) -> Hashable:
    memory = view.untyped_storage()._cdata  # a view keeps that of before ``whole.data = other``
    look = view.dtype, view.shape, view.stride(), view.storage_offset(), view.requires_grad
    return memory, *look

"""Answer what the dispatcher asks about the arguments of one kind of module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from strop.dispatch.signature import Shapes, Skeleton, default_shapes


class Adapter:
    """Say what a kind of module needs at its door. The default serves any module."""

    def normalise(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments in the form that is captured."""
        return args, kwargs

    def shapes(self, tensors: Sequence[Tensor], skeleton: Skeleton = ()) -> Shapes:
        return default_shapes(tensors)

    def steady(self, skeleton: Skeleton) -> tuple[int, ...]:
        """Tensors of a call, by number, that stay the same through a denoise loop as a rule."""
        return ()

    def timestep(self, skeleton: Skeleton) -> int | None:
        """The tensor (b,) that goes through the timesteps of the loop."""
        return None

"""Say what a learner asks of an optimizer; two kinds do it: Strop's own and those of libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from strop.train.updating import Updating

States = Mapping[str, Tensor]  # of a weight, by their own names


class WeightSteps(Protocol):
    """Step weights, and hand out their states by weight."""

    @property
    def draws_otherwise(self) -> bool:
        """Tell whether pictures are drawn with other weights than those that are trained."""
        ...

    @property
    def skips_steps(self) -> bool:
        """Tell whether a step whose gradients are not finite is left out."""
        ...

    @property
    def norm(self) -> Tensor:
        """Return the norm of the gradients of the last step; the next step overwrites it."""
        ...

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss whose gradients ``step`` expects."""
        ...

    @property
    def updating(self) -> Updating | None:
        """Return what ``step`` does between ``before`` and ``after``, for a graph; None where it
        reads numbers on the host."""
        ...

    def before(self, rate: float) -> None:
        """Make ready for a step with this learning rate."""
        ...

    def after(self) -> None:
        """Take over what a step has changed."""
        ...

    def step(self, rate: float) -> None:
        """Step with this learning rate, and clear the gradients."""
        ...

    def tensors_of(self, parameter: Tensor) -> States:
        """Return the states of a weight that are tensors, its average among them."""
        ...

    def numbers(self) -> dict[str, Any]:
        """Return the rest of the state, for JSON."""
        ...

    def load(self, states: Mapping[Tensor, States], numbers: Mapping[str, Any]) -> None:
        """Take over what ``tensors_of`` each weight and ``numbers`` gave. ``states`` has all
        weights, of which other ranks may step some."""
        ...

    def put_weights_to_draw(self) -> None:
        """Write the weights that pictures are drawn with over those that are trained."""
        ...

    def put_weights_to_train(self) -> None:
        """Go back to training; the caller then writes the weights that were there before."""
        ...

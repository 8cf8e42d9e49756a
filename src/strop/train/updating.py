"""Update the parameters at the end of a step, in a plain run and under capture.

What changes from step to step must be read from device memory. Fused optimizers keep all of it
there; of torch's those do that were made with ``capturable=True`` and a learning rate that is a
tensor on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strop.errors import OptionError
from strop.train.optimizer import FusedOptimizer
from strop.train.scaler import update

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Updating:
    """Hold an optimizer, with a scaler or without."""

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        if not isinstance(optimizer, Optimizer):
            raise OptionError(
                f"optimizer is a {type(optimizer).__name__}: compile_step takes one of strop.train "
                "or torch.optim"
            )
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise OptionError(f"scaler is a {type(scaler).__name__}: use strop.train.GradScaler")
        self.optimizer = optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None

    @property
    def leaves(self) -> list[Tensor]:
        """Return what a backward pass is to give gradients: parameters, and twins of theirs."""
        found = [p for group in self.optimizer.param_groups for p in group["params"]]
        if isinstance(self.optimizer, FusedOptimizer):
            found += self.optimizer.shadows
        return [leaf for leaf in found if leaf.requires_grad]

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def update(self) -> None:
        """Step and clear the gradients."""
        update(self.optimizer, self.scaler)

    # ---- under capture -------------------------------------------------------------------------

    def check_capturable(self) -> None:
        """Raise OptionError for what a replay would not do again."""
        optimizer, kind = self.optimizer, type(self.optimizer).__name__
        if any(getattr(optimizer, name, None) for name in _STEP_HOOKS):
            raise OptionError(
                f"{kind} has hooks on its step, which a graph does not call; remove them, or use "
                "compile_step(graph=False)"
            )
        if isinstance(optimizer, FusedOptimizer):
            return
        if not all(group.get("capturable") for group in optimizer.param_groups):
            raise OptionError(
                f"{kind} reads numbers on the host in every step, which a graph would freeze; use "
                "strop.train's optimizer, torch's with capturable=True, or graph=False"
            )
        if any(not _is_on_device(group["lr"]) for group in optimizer.param_groups):
            raise OptionError(
                f"lr of {kind} is a number of the host, which a graph would freeze; give it as "
                "lr=torch.tensor(..., device='cuda'), use strop.train's optimizer, or graph=False"
            )
        if self.scaler is not None and not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise OptionError(
                f"with a scaler {kind} asks the device whether to step; make it with fused=True, "
                "use strop.train's optimizer, or graph=False"
            )
        # torch warns of steps without a graph; the first ones are no mistake here
        optimizer._warned_capturable_if_run_uncaptured = True

    def load(self) -> None:
        """Hand the device the numbers of this step, before a replay."""
        if isinstance(self.optimizer, FusedOptimizer):
            self.optimizer.load_numbers()

    @contextmanager
    def loaded(self) -> Iterator[tuple[object, ...]]:
        """Give, for a capture, what else the graph will point to."""
        stepper = getattr(self.optimizer, "stepper", None)
        if stepper is None:
            yield ()
        else:
            with stepper.loaded() as held:
                yield held

    @property
    def states(self) -> list[object]:
        """Return the states of all parameters, which are to be kept where their ids are."""
        return list(chain.from_iterable(map(dict.values, self.optimizer.state.values())))

    def standing(self) -> list[object]:
        """Return what a graph was captured with: the states, and numbers that it has frozen."""
        optimizer = self.optimizer
        is_fused = isinstance(optimizer, FusedOptimizer)
        found: list[object] = [id(getattr(optimizer, "stepper", None)), *map(id, self.states)]
        for group in optimizer.param_groups:
            found.append(len(group["params"]))
            if is_fused:  # the others are loaded
                found.append(bool(group.get("momentum")))
                continue
            for name, value in group.items():
                if name != "params":
                    found.append(value.data_ptr() if isinstance(value, Tensor) else value)
        scaler = self.scaler
        if scaler is not None:
            found += [scaler.get_growth_factor(), scaler.get_backoff_factor()]
            found += [scaler.get_growth_interval(), *map(_place, (scaler._scale,))]
        return found

    def note_writes(self) -> None:
        """Tell autograd of parameters that a replay has written, as if a step had."""
        written: Any = self.leaves
        if isinstance(self.optimizer, FusedOptimizer):
            written = self.optimizer.written
        torch.autograd.graph.increment_version(written)


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _place(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()

"""Hold the weights that are trained, their optimizer and averages, as tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strop.errors import OptionError
from strop.train import library_optimizers
from strop.train.averaged_gradients import bit_sums
from strop.train.fused_steps import FusedSteps
from strop.train.ranks import ALONE, Ranks
from strop.train.settings import Settings
from strop.train.sharded_parameters import ShardedParameters
from strop.train.updating import Updating
from strop.train.weight_steps import States, WeightSteps
from strop.wording import counted


class Learner:
    """Step all weights that require a gradient; their state goes to and from checkpoints."""

    def __init__(
        self, settings: Settings, modules: dict[str, nn.Module], ranks: Ranks = ALONE
    ) -> None:
        self.modules, self._ranks = modules, ranks
        self.before_changes: Callable[[], None] = lambda: None  # of weights or states
        self.named = {
            f"{part}.{name}": parameter
            for part, module in modules.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self.parameters = list(self.named.values())
        narrow = torch.bfloat16 if settings.gradient_sync == "bf16" else None
        self.averages = partial(ranks.averaged, narrow=narrow)
        self._shards, self._summed, self._averaged = None, None, None
        if settings.shards_states and ranks.count > 1:
            keeps_rooms = not settings.shard_gradients
            self._shards = _sharded(self.parameters, ranks, keeps_rooms=keeps_rooms)
            if settings.shard_gradients:
                self._summed = ranks.summed(self._shards)
            else:
                self._averaged = ranks.averaged_sharded(self._shards)
        else:
            self._averaged = self.averages(self.parameters)
        self._is_whole = settings.gradient_accumulation_steps == 1  # a backward pass is a step's
        self._has_graphs = settings.compile_unet
        self.steps = self._made_steps(settings)

    def _made_steps(self, settings: Settings) -> WeightSteps:
        if settings.optimizer != "adamw":
            return library_optimizers.make(settings, self.parameters)
        if self._shards is None:
            return FusedSteps(settings, self.parameters, None)
        return FusedSteps(settings, self._shards.own, torch.distributed.group.WORLD)

    def train(self, mode: bool = True) -> None:
        for module in self.modules.values():
            module.train(mode)

    def backward(self, loss: Tensor) -> None:
        scaled = self.steps.scaled(loss)
        with self._travelling(scaled):
            scaled.backward()
        if self._summed is not None:
            self._summed.end_pass()

    def _travelling(self, loss: Tensor) -> AbstractContextManager[None]:
        """Have gradients travel while the backward pass of ``loss``, which is in here, goes on."""
        if self._summed is not None and self._has_graphs:
            return self._summed.backward(loss)
        if self._averaged is not None and self._is_whole:
            return self._averaged.backward()
        return nullcontext()

    def average_gradients(self) -> None:
        """Put the mean over ranks in the place of each gradient that this rank needs."""
        if self._averaged is not None:
            self._averaged.finish()
        if self._summed is not None:
            self._ranks.finish(self._summed)

    def step(self, rate: float) -> None:
        self.before_changes()
        self.steps.step(rate)
        if self._shards is not None:
            self._ranks.gather(self._shards)

    @property
    def updating(self) -> Updating | None:
        """Return what a graph of a whole step does at its end, between ``before_step`` and
        ``after_step``; None where no graph can hold the step of all weights."""
        return None if self.is_sharded else self.steps.updating

    def before_step(self, rate: float) -> None:
        self.before_changes()
        self.steps.before(rate)

    def after_step(self) -> None:
        self.steps.after()

    def fingerprint(self) -> list[int]:
        """Return sums over the bits of all weights: equal on ranks whose weights are."""
        return bit_sums(self.parameters)

    def forget_gradients(self) -> None:
        if self._summed is not None:
            self._summed.forget()
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def norm(self) -> Tensor:
        """Return the norm of the gradients of the last step; the next step overwrites it."""
        return self.steps.norm

    @property
    def skips_steps(self) -> bool:
        """Tell whether a step whose gradients are not finite is left out."""
        return self.steps.skips_steps

    @property
    def is_sharded(self) -> bool:
        """Tell whether each rank has states of its own."""
        return self._shards is not None

    def states(self) -> dict[str, Tensor]:
        """Return the states of the optimizer that this rank has, the averages among them."""
        return {
            f"{name}/{key}": value
            for name, parameter in self.named.items()
            for key, value in self.steps.tensors_of(parameter).items()
        }

    @contextmanager
    @torch.no_grad()
    def averaged(self) -> Iterator[None]:
        """Put the averages in the place of the weights, if averages are kept, or the weights that
        the optimizer has for drawing. All ranks have to, where each has its own."""
        if not self.steps.draws_otherwise:
            yield
            return
        self.before_changes()
        kept = [parameter.detach().cpu().clone() for parameter in self.parameters]
        self.steps.put_weights_to_draw()
        if self._shards is not None:
            self._ranks.gather(self._shards)
        try:
            yield
        finally:
            self.steps.put_weights_to_train()
            for parameter, before in zip(self.parameters, kept, strict=True):
                parameter.copy_(before)  # to the bit what they were

    # ---- checkpoints ---------------------------------------------------------------------------

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return what this rank gives to a checkpoint: its states, and on rank 0 the weights."""
        found = {"optimizer": self.states()}
        if self._ranks.is_first:
            found["weights"] = dict(self.named)
        return found

    def numbers(self) -> dict[str, Any]:
        """Return the rest of the state, for JSON."""
        return self.steps.numbers()

    @torch.no_grad()
    def load(self, tensors: dict[str, dict[str, Tensor]], numbers: dict[str, Any]) -> None:
        """Take over a checkpoint. Raises OptionError if its weights have other names or sizes."""
        weights, states = tensors["weights"], tensors["optimizer"]
        mine = {name: tuple(p.shape) for name, p in self.named.items()}
        theirs = {name: tuple(t.shape) for name, t in weights.items()}
        if mine != theirs:
            odd = sorted(dict(mine.items() ^ theirs.items()))[:3]
            raise OptionError(f"the checkpoint has other weights than the model: {', '.join(odd)}")
        for name, parameter in self.named.items():
            parameter.copy_(weights[name])
        found: dict[Tensor, States] = {p: _of(name, states) for name, p in self.named.items()}
        self.steps.load(found, numbers)


def _of(name: str, states: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the states of a weight by their own names."""
    start = f"{name}/"
    return {key.removeprefix(start): t for key, t in states.items() if key.startswith(start)}


def _sharded(
    parameters: Sequence[Tensor], ranks: Ranks, *, keeps_rooms: bool = True
) -> ShardedParameters:
    shards = ShardedParameters(parameters, ranks.rank, ranks.count, keeps_rooms=keeps_rooms)
    if len(parameters) < ranks.count:
        raise OptionError(
            f"--shard_optimizer: {counted(len(parameters), 'weight')} cannot be shared out among "
            f"{counted(ranks.count, 'process')}; leave it out"
        )
    return shards

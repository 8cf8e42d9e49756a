"""Hold the weights that are trained, their optimizer and averages, as tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strop.errors import OptionError
from strop.train import library_optimizers, quantized
from strop.train.library_optimizers import LibraryOptimizer
from strop.train.optimizers import FusedAdamW
from strop.train.ranks import ALONE, Ranks
from strop.train.scaler import GradScaler, update
from strop.train.settings import Settings
from strop.train.sharded_parameters import ShardedParameters
from strop.wording import counted

_AVERAGE = "ema"
_KINDS = ("step", "exp_avg", "exp_avg_sq", _AVERAGE, *quantized.KEYS)  # of states, by name


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
        self._shards = None
        if settings.shard_optimizer and ranks.count > 1:
            self._shards = _sharded(self.parameters, ranks)
        self.optimizer = self._optimizer(settings)
        device = self.parameters[0].device.type
        self.scaler = GradScaler(device) if settings.mixed_precision == "fp16" else None

    def _optimizer(self, settings: Settings) -> FusedAdamW | LibraryOptimizer:
        if settings.optimizer != "adamw":
            return library_optimizers.make(settings, self.parameters)
        return FusedAdamW(
            self.parameters if self._shards is None else self._shards.own,
            lr=settings.rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            weight_decay=settings.adam_weight_decay,
            max_grad_norm=settings.max_grad_norm,
            ema_decay=settings.ema_decay if settings.use_ema else None,
            states="8bit" if settings.use_8bit_adam else "fp32",
            process_group=None if self._shards is None else torch.distributed.group.WORLD,
        )

    def train(self, mode: bool = True) -> None:
        for module in self.modules.values():
            module.train(mode)

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def average_gradients(self) -> None:
        """Put the mean over ranks in the place of each gradient that this rank needs."""
        if self._shards is None:
            self._ranks.average(self.parameters)
        else:
            self._ranks.average_sharded(self._shards)

    def step(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.before_changes()
        if isinstance(self.optimizer, LibraryOptimizer):
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            update(self.optimizer, self.scaler)
        if self._shards is not None:
            self._ranks.gather(self._shards)

    @torch.no_grad()
    def fingerprint(self) -> list[int]:
        """Return sums over the bits of all weights: equal on ranks whose weights are."""
        kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        sums = [
            p.detach().contiguous().view(kinds[p.element_size()]).sum(dtype=torch.int64)
            for p in self.parameters
        ]
        found: list[int] = torch.stack(sums).tolist()
        return found

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad()
        for parameter in self.parameters:  # of which other ranks step some
            parameter.grad = None

    @property
    def norm(self) -> Tensor:
        """Return the norm of the gradients of the last step; the next step overwrites it."""
        found = self.optimizer.grad_norm
        assert found is not None
        return found

    @property
    def is_sharded(self) -> bool:
        """Tell whether each rank has states of its own."""
        return self._shards is not None

    def _tensors_of(self, parameter: Tensor) -> dict[str, Tensor]:
        if isinstance(self.optimizer, LibraryOptimizer):
            return self.optimizer.tensors_of(parameter)
        if parameter not in self.optimizer.state:
            return {}
        state = self.optimizer.state[parameter]
        return {key: value for key, value in state.items() if key in _KINDS}

    def states(self) -> dict[str, Tensor]:
        """Return the states of the optimizer that this rank has, the averages among them."""
        return {
            f"{name}/{key}": value
            for name, parameter in self.named.items()
            for key, value in self._tensors_of(parameter).items()
        }

    @contextmanager
    @torch.no_grad()
    def averaged(self) -> Iterator[None]:
        """Put the averages in the place of the weights, if averages are kept, or the weights that
        the optimizer has for drawing. All ranks have to, where each has its own."""
        library = self.optimizer if isinstance(self.optimizer, LibraryOptimizer) else None
        switches = library is not None and library.switches
        if self.optimizer.ema is None and not switches:
            yield
            return
        self.before_changes()
        kept = [parameter.detach().cpu().clone() for parameter in self.parameters]
        for parameter in self.parameters:
            average = self._tensors_of(parameter).get(_AVERAGE)
            if average is not None:  # there is none before the first step
                parameter.copy_(average)
        if library is not None and switches:
            library.switch("eval")
        if self._shards is not None:
            self._ranks.gather(self._shards)
        try:
            yield
        finally:
            if library is not None and switches:
                library.switch("train")  # and then to the bit what they were
            for parameter, before in zip(self.parameters, kept, strict=True):
                parameter.copy_(before)

    # ---- checkpoints ---------------------------------------------------------------------------

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return what this rank gives to a checkpoint: its states, and on rank 0 the weights."""
        found = {"optimizer": self.states()}
        if self._ranks.is_first:
            found["weights"] = dict(self.named)
        return found

    def numbers(self) -> dict[str, Any]:
        """Return the rest of the state, for JSON."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        if isinstance(self.optimizer, LibraryOptimizer):
            return {"optimizer": self.optimizer.numbers(), "scaler": scaler}
        return {"counts": list(self.optimizer.counts), "scaler": scaler}

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
        if isinstance(self.optimizer, LibraryOptimizer):
            rows = [_of(name, states) for name in self.named]
            self.optimizer.load(rows, numbers["optimizer"])
        else:
            self._load_fused(self.optimizer, states, numbers)
        if self.scaler is not None:
            self.scaler.load_state_dict(numbers["scaler"])

    def _load_fused(
        self, optimizer: FusedAdamW, states: dict[str, Tensor], numbers: dict[str, Any]
    ) -> None:
        skeleton = optimizer.state_dict()
        kept: dict[int, dict[str, Tensor]] = {}
        places = {id(p): place for place, p in enumerate(optimizer.parameters())}
        for name, parameter in self.named.items():
            if (place := places.get(id(parameter))) is None:
                continue  # another rank steps it
            if found := _of(name, states):
                kept[place] = found
        extra = dict(zip(("ema_steps", "draws"), numbers["counts"], strict=True))
        optimizer.load_state_dict({**skeleton, "state": kept, "strop": extra})


def _of(name: str, states: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the states of a weight by their own names."""
    start = f"{name}/"
    return {key.removeprefix(start): t for key, t in states.items() if key.startswith(start)}


def _sharded(parameters: Sequence[Tensor], ranks: Ranks) -> ShardedParameters:
    shards = ShardedParameters(parameters, ranks.rank, ranks.count)
    if len(parameters) < ranks.count:
        raise OptionError(
            f"--shard_optimizer: {counted(len(parameters), 'weight')} cannot be shared out among "
            f"{counted(ranks.count, 'process')}; leave it out"
        )
    return shards

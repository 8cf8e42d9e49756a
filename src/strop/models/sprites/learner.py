"""Optimises a module that computes in bf16 from fp32 master weights, and averages them."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.sprites import checkpoint
from strop.models.sprites.settings import VaeTraining


def learning_rate(training: VaeTraining, step: int) -> float:
    """Return the rate at `step`: linear warm-up, then a cosine down to zero at the last step."""
    warm = min(1.0, (step + 1) / max(1, training.warmup))
    past = max(0, step - training.warmup) / max(1, training.steps - training.warmup)
    return training.learning_rate * warm * 0.5 * (1.0 + math.cos(math.pi * min(1.0, past)))


class Learner:
    """Run AdamW over fp32 masters of the module's parameters, with their moving average.

    The module itself holds copies in `dtype`, which is faster than autocast: no weight is cast
    twice in a step, and normalisations read and write bf16.
    """

    def __init__(
        self, module: nn.Module, training: VaeTraining, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.training = training
        nn.Module.to(module, device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        module.train()
        self.names = [name for name, _ in module.named_parameters()]
        self.live: list[Tensor] = list(module.parameters())
        self.masters = [live.detach().float().clone() for live in self.live]
        # Past diffusers' own `to`, which warns about casts without a cause.
        nn.Module.to(module, dtype=dtype)
        self.average = [master.clone() for master in self.masters]
        self.gradients = [torch.zeros_like(master) for master in self.masters]
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = gradient
        self.optimizer = torch.optim.AdamW(
            self.masters,
            lr=training.learning_rate,
            betas=training.betas,
            weight_decay=training.weight_decay,
            fused=device.type == "cuda",
        )

    def step(self, loss: Tensor, step: int) -> None:
        """Apply one update for `loss`; `step` sets the rate."""
        loss.backward()
        found: list[Tensor] = []
        for name, live in zip(self.names, self.live, strict=True):
            if live.grad is None:
                raise RuntimeError(f"parameter {name} got no gradient; is it part of the loss?")
            found.append(live.grad)
        torch._foreach_copy_(self.gradients, found)
        norm = torch.nn.utils.get_total_norm(self.gradients)
        torch.nn.utils.clip_grads_with_norm_(self.masters, self.training.clip, norm)
        self.optimizer.param_groups[0]["lr"] = learning_rate(self.training, step)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.live, self.masters)
            decay = min(self.training.ema, (1 + step) / (10 + step))
            torch._foreach_lerp_(self.average, self.masters, 1.0 - decay)
        for live in self.live:
            live.grad = None

    def averaged(self) -> dict[str, Tensor]:
        """Return the averaged fp32 weights on the CPU."""
        pairs = zip(self.names, self.average, strict=True)
        return {name: tensor.contiguous().cpu() for name, tensor in pairs}

    def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Write a checkpoint with everything that a bit-exact continuation needs."""
        moments: dict[str, Tensor] = {}
        for name, master in zip(self.names, self.masters, strict=True):
            for key, value in self.optimizer.state[master].items():
                moments[f"{name}.{key}"] = value
        groups = {
            "weights": dict(zip(self.names, self.masters, strict=True)),
            "ema": dict(zip(self.names, self.average, strict=True)),
            "moments": moments,
        }
        checkpoint.save(folder, groups, state)

    def load(self, folder: Path) -> None:
        """Continue from the checkpoint in `folder`; without moments, these start at zero.

        Raises:
            ValueError: the checkpoint is of a module with other parameters.
        """
        self._copy(checkpoint.group(folder, "weights"), self.masters, folder)
        self._copy(checkpoint.group(folder, "ema"), self.average, folder)
        moments = checkpoint.group(folder, "moments")
        if not moments:
            print(f"checkpoint {folder} has no moments; the optimizer starts afresh", flush=True)
        for name, master in zip(self.names, self.masters, strict=True):
            if moments:
                self.optimizer.state[master] = self._moments(moments, name, master)
        with torch.no_grad():
            torch._foreach_copy_(self.live, self.masters)

    def _moments(self, moments: dict[str, Tensor], name: str, master: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.empty_like(master).copy_(moments[f"{name}.{key}"])
        count = moments[f"{name}.step"]
        # Only the fused optimizer keeps its step count on the device.
        state["step"] = count.to(master.device) if master.is_cuda else count
        return state

    def _copy(self, source: dict[str, Tensor], target: list[Tensor], folder: Path) -> None:
        if sorted(source) != sorted(self.names):
            odd = sorted(set(source) ^ set(self.names))[:3]
            raise ValueError(
                f"checkpoint {folder} holds {len(source)} tensors, the settings want "
                f"{len(self.names)} (first differences: {odd}); continue with the settings it was "
                "started with, or train into another folder"
            )
        for name, tensor in zip(self.names, target, strict=True):
            tensor.copy_(source[name])

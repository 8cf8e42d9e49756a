"""Define fused optimizers with the arguments of torch's, and what they do beside the update.

Arguments of all three, after torch's own:

* ``max_grad_norm``: clip all gradients to this norm, as ``clip_grad_norm_`` does; ``inf`` only
  measures. The norm is ``optimizer.grad_norm`` afterwards, on the device. Inside of a
  ``ZeroRedundancyOptimizer`` it is the norm over all processes, each of which has to step.
* ``ema_decay``: keep moving averages, ``optimizer.ema``. A number is the ``decay`` of diffusers'
  ``EMAModel``; an ``EMASchedule`` has its other arguments.
* ``shadow_dtype``: keep copies in fp16 or bf16; ``optimizer.shadow(module)`` is a module of them.
* ``stochastic_rounding``, ``seed``: how bf16 parameters are rounded.
* ``states``: "8bit" keeps the moments of Adam in 8 bits, with a scale for each 256 of them, where a
  parameter has 4096 elements or more and is not fp64. It changes the numbers.
* ``process_group``: these processes step other parameters of the same model, so that the norm to
  clip to, and whether a gradient is not finite, are those of all. Each of them has to step. For
  DTensors of ``fully_shard`` these are the processes of their mesh, without being told.

``foreach``, ``fused`` and ``capturable`` are accepted and change nothing: every step is fused and,
on a GPU, can be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from strop.errors import OptionError, UnsupportedError
from strop.train.ema import EMASchedule
from strop.train.optimizer import Extras, FusedOptimizer
from strop.train.rules import ADAM, SGD

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FusedAdam(FusedOptimizer):
    """Run ``torch.optim.Adam`` in two sweeps."""

    _rule = ADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        max_grad_norm: float | None = None,
        ema_decay: float | EMASchedule | None = None,
        shadow_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        states: str = "fp32",
        process_group: ProcessGroup | None = None,
    ) -> None:
        _check_numbers(lr=lr, eps=eps, weight_decay=weight_decay)
        for place, beta in enumerate(betas):
            if not isinstance(beta, Tensor) and not 0.0 <= beta < 1.0:
                raise OptionError(f"betas[{place}] is {beta}: it must lie in [0, 1)")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        extras = Extras(
            max_grad_norm,
            ema_decay,
            shadow_dtype,
            stochastic_rounding,
            seed,
            states,
            process_group,
        )
        super().__init__(params, defaults, extras)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group.setdefault("maximize", False)
            group.setdefault("decoupled_weight_decay", False)
        super().__setstate__(state)


class FusedAdamW(FusedAdam):
    """Run ``torch.optim.AdamW`` in two sweeps."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **arguments: Any,
    ) -> None:
        """Make the optimizer. ``arguments`` are the keyword arguments of FusedAdam."""
        arguments = {"decoupled_weight_decay": True, **arguments}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **arguments)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group["decoupled_weight_decay"] = True
        super().__setstate__(state)


class FusedSGD(FusedOptimizer):
    """Run ``torch.optim.SGD`` in two sweeps."""

    _rule = SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        ema_decay: float | EMASchedule | None = None,
        shadow_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        states: str = "fp32",
        process_group: ProcessGroup | None = None,
    ) -> None:
        _check_numbers(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if states == "8bit":
            raise UnsupportedError("states='8bit' is built for FusedAdam and FusedAdamW")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise OptionError("nesterov needs a momentum, and a dampening of zero")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        extras = Extras(
            max_grad_norm,
            ema_decay,
            shadow_dtype,
            stochastic_rounding,
            seed,
            states,
            process_group,
        )
        super().__init__(params, defaults, extras)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group.setdefault("maximize", False)
        super().__setstate__(state)


def _check_numbers(**numbers: float | Tensor) -> None:
    for name, value in numbers.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise OptionError(f"{name} is a tensor of {value.numel()} elements: it must be one")
        elif not value >= 0.0:
            raise OptionError(f"{name} is {value}: it must not be negative")

"""Train by Strop under PyTorch Lightning: a callback compiles a module's parts, and has its fused
optimizer do what Lightning's trainer would do in sweeps of its own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import strop
from strop.errors import OptionError, UnsupportedError
from strop.train.optimizer import FusedOptimizer
from strop.train.scaler import GradScaler

if TYPE_CHECKING:
    from strop.options import Options

_NAMES = ("lightning.pytorch", "pytorch_lightning")  # two copies of one library
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")


def lightning_callback(*parts: str, options: Options | None = None) -> Any:
    """Return a callback for ``Trainer(callbacks=[...])`` of PyTorch Lightning.

    While a fit goes on, the submodules of the LightningModule with these names, such as "unet", are
    compiled forward and backward as by ``strop.optimize(part, train=True, options=options)``;
    without names all of its direct submodules with weights that are trained. ``strop.restore``
    follows the fit. Where ``configure_optimizers`` returns one optimizer of ``strop.train``, it
    clips to ``gradient_clip_val`` of the trainer by itself, and with ``precision="16-mixed"``
    looks for NaN and inf in the same sweep.

    Numerics: those of ``strop.optimize`` and of the optimizer. Lightning's precision, such as
    "bf16-mixed", stays as it is. Raises, as the fit starts: OptionError for a name that is no
    submodule, and for a norm to clip to that both the trainer and the optimizer have;
    UnsupportedError for other strategies than one device and DDP. Raises ImportError where there is
    no Lightning.
    """
    base = _library().Callback
    kind = type("StropCallback", (_Compiled, base), {})
    return kind(parts, options)


def _library() -> Any:
    """Return the copy of the library that the script has imported, or else one that there is."""
    for name in _NAMES:
        if name in sys.modules:
            return sys.modules[name]
    for name in _NAMES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name)
    raise ImportError("there is no PyTorch Lightning here: pip install lightning")


class _Compiled:
    """Hold what is done while a fit goes on, to be undone behind it."""

    def __init__(self, parts: tuple[str, ...], options: Options | None) -> None:
        self._parts, self._options, self._done = parts, options, ExitStack()

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        strategy = type(trainer.strategy).__name__
        if strategy not in _STRATEGIES:
            raise UnsupportedError(
                f"the trainer has the strategy {strategy}: Strop's callback takes one device, or "
                "DDP. Of FSDP2, call strop.optimize(model, train=True) behind fully_shard"
            )
        self._undo()
        with ExitStack() as done:
            for part in self._found(module):
                strop.optimize(part, train=True, options=self._options)
                done.callback(strop.restore, part)
            if len(trainer.optimizers) == 1 and isinstance(trainer.optimizers[0], FusedOptimizer):
                _clip_itself(trainer, module, trainer.optimizers[0], done)
                _check_itself(trainer.precision_plugin, done)
            self._done = done.pop_all()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._undo()

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self._undo()

    def _undo(self) -> None:
        self._done.pop_all().close()

    def _found(self, module: nn.Module) -> list[nn.Module]:
        if self._parts:
            return [_part(module, name) for name in self._parts]
        found = [part for part in module.children() if _is_trained(part)]
        if not found:
            raise OptionError(
                f"{type(module).__name__} has no submodule with weights that are trained"
            )
        return found


def _is_trained(part: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in part.parameters())


def _part(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        known = ", ".join(name for name, _ in module.named_children())
        raise OptionError(
            f"{type(module).__name__} has no submodule {name!r}; it has {known}"
        ) from None


def _clip_itself(trainer: Any, module: Any, optimizer: FusedOptimizer, done: ExitStack) -> None:
    """Have the optimizer clip in the place of the trainer, which refuses that where autocast is on,
    and else sweeps twice. Who overrides ``configure_gradient_clipping`` clips as it says there."""
    norm, way = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    name = "configure_gradient_clipping"
    usual = getattr(_library().LightningModule, name)
    own = getattr(module, name)
    is_usual = isinstance(own, MethodType) and own.__func__ is usual
    if not norm or (way or "norm") != "norm" or not is_usual:
        return
    before = optimizer.clip_to(float(norm))
    if before is not None:
        optimizer.clip_to(before)
        raise OptionError(
            f"gradients are clipped to {norm} by Trainer(gradient_clip_val=...) and to {before} by "
            f"{type(optimizer).__name__}(max_grad_norm=...): leave one of them out"
        )
    trainer.gradient_clip_val = None
    done.callback(optimizer.clip_to, None)
    done.callback(partial(setattr, trainer, "gradient_clip_val", norm))


def _check_itself(plugin: Any, done: ExitStack) -> None:
    """Give the plugin of fp16 a scaler that leaves the look for NaN and inf to the optimizer."""
    scaler = getattr(plugin, "scaler", None)
    if not isinstance(scaler, torch.amp.GradScaler) or not _is_torchs(type(scaler)):
        return
    made: Callable[..., GradScaler] = GradScaler
    plugin.scaler = made(
        scaler._device,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )
    done.callback(_hand_back, plugin, scaler)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.") and kind.__name__ == "GradScaler"


def _hand_back(plugin: Any, scaler: torch.amp.GradScaler) -> None:
    """Give a plugin its own scaler again, with the scale that there is now."""
    state = plugin.scaler.state_dict()
    plugin.scaler = scaler
    if state:
        scaler.load_state_dict(state)

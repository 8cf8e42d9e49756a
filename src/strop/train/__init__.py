"""Train: the parameter step, and the whole step as one callable."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.train.ema import EMASchedule
    from strop.train.lightning import lightning_callback
    from strop.train.optimizers import FusedAdam, FusedAdamW, FusedSGD
    from strop.train.scaler import GradScaler
    from strop.train.whole_step import compile_step

__all__ = [
    "EMASchedule",
    "FusedAdam",
    "FusedAdamW",
    "FusedSGD",
    "GradScaler",
    "compile_step",
    "lightning_callback",
]

_HOMES = {
    "EMASchedule": "ema",
    "GradScaler": "scaler",
    "compile_step": "whole_step",
    "lightning_callback": "lightning",
}


def __getattr__(name: str) -> Any:
    """Import torch when something needs it."""
    if name not in __all__:
        raise AttributeError(f"module 'strop.train' has no attribute {name!r}")
    import importlib

    home = importlib.import_module(f"strop.train.{_HOMES.get(name, 'optimizers')}")
    return getattr(home, name)
